"""Plans a benchmark: default numbers of workers, and how many samples the time allows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastload.bench.measure import LATER_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastload.bench.contenders import Contender

MOST_WORKERS = 32  # by default
_START_S = 0.3  # of a process, and of forked workers
_IMPORT_S = 3.0  # of a spawned worker or a fork server, on a CPU of its own
_LEAST_BATCHES = 4  # of an epoch, or as many as the workers prefetch
_PREFETCH = 2
_EPOCHS = 2  # of a run, if one later epoch takes long enough
_READS = {"none": 2.0, "ram": 1.0, "lmdb": 0.1}  # how many times a run decodes each sample, or as long


def default_workers(num_cpus: int) -> tuple[int, ...]:
    """No workers, one for each second CPU, and one for each CPU."""
    return tuple(sorted({0, min(MOST_WORKERS, math.ceil(num_cpus / 2)), min(MOST_WORKERS, num_cpus)}))


@dataclass(frozen=True)
class Costs:
    """What the runs of a benchmark cost.

    Attributes:
        rounds: How often each contender runs.
        sample_s: Seconds to read one sample, in one process.
        transform_s: Seconds to transform it.
        num_cpus: The number of processes that can compute at once.
    """

    rounds: int
    sample_s: float
    transform_s: float
    num_cpus: int

    def seconds(self, contenders: Sequence[Contender], num_samples: int) -> float:
        """The expected time of a benchmark with this many samples in an epoch."""
        fixed, variable = self._parts(contenders)
        return fixed + variable * num_samples

    def num_samples_within(self, budget_s: float, contenders: Sequence[Contender], length: int) -> int:
        """How many samples of a dataset fill the time, and never fewer than some batches for each worker."""
        fixed, variable = self._parts(contenders)
        fitting = max(0, int((budget_s - fixed) / variable)) if variable else length
        least = max(
            contender.batch_size * max(_LEAST_BATCHES, _PREFETCH * contender.num_workers)
            for contender in contenders
        )
        return min(length, max(least, fitting))

    def _parts(self, contenders: Sequence[Contender]) -> tuple[float, float]:
        """Seconds that do not depend on the number of samples, and seconds for each sample."""
        fixed = 0.0
        # The pass that warms the page cache.
        variable = len({contender.size for contender in contenders}) / self.num_cpus * self.sample_s
        for contender in contenders:
            fixed += self.rounds * (_START_S + LATER_S)
            if contender.num_workers and contender.start_method != "fork":
                fixed += self.rounds * _IMPORT_S * math.ceil(contender.num_workers / self.num_cpus)
            at_once = min(max(1, contender.num_workers), self.num_cpus)
            each_s = _READS[contender.cache] * self.sample_s + _EPOCHS * self.transform_s
            variable += self.rounds * each_s / at_once
        return fixed, variable
