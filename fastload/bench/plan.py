"""Plans a benchmark: default numbers of workers, and how many samples the time allows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fastload.bench.measure import LATER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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


def fixed_s(contender: Contender, num_cpus: int) -> float:
    """Seconds of a run that do not depend on the number of samples."""
    start_s = _START_S
    if contender.num_workers and contender.start_method != "fork":
        start_s += _IMPORT_S * math.ceil(contender.num_workers / num_cpus)
    return start_s + LATER_S


def seconds(
    contenders: Iterable[Contender],
    num_samples: int,
    *,
    rounds: int,
    sample_s: float,
    transform_s: float,
    num_cpus: int,
) -> float:
    """The expected time of a benchmark; see `num_samples_within`."""
    fixed, variable = _costs(contenders, rounds, sample_s, transform_s, num_cpus)
    return fixed + variable * num_samples


def _costs(
    contenders: Iterable[Contender], rounds: int, sample_s: float, transform_s: float, num_cpus: int
) -> tuple[float, float]:
    """Seconds that do not depend on the number of samples, and seconds for each sample."""
    every = list(contenders)
    fixed = rounds * sum(fixed_s(contender, num_cpus) for contender in every)
    once = len({contender.size for contender in every}) / num_cpus  # the pass that warms the page cache
    variable = once * sample_s
    for contender in every:
        at_once = min(max(1, contender.num_workers), num_cpus)
        variable += rounds * (_READS[contender.cache] * sample_s + _EPOCHS * transform_s) / at_once
    return fixed, variable


def num_samples_within(
    budget_s: float,
    contenders: Sequence[Contender],
    *,
    length: int,
    rounds: int,
    sample_s: float,
    transform_s: float,
    num_cpus: int,
) -> int:
    """How many samples fill the time, and never fewer than some batches for each worker.

    Args:
        budget_s: The time that the whole benchmark may take.
        contenders: All of them.
        length: The number of samples of the dataset, which is the most.
        rounds: How often each contender runs.
        sample_s: Seconds to read one sample, in one process.
        transform_s: Seconds to transform it.
        num_cpus: The number of processes that can compute at once.
    """
    fixed, variable = _costs(contenders, rounds, sample_s, transform_s, num_cpus)
    fitting = max(0, int((budget_s - fixed) / variable)) if variable else length
    least = max(
        contender.batch_size * max(_LEAST_BATCHES, _PREFETCH * contender.num_workers)
        for contender in contenders
    )
    return min(length, max(least, fitting))
