"""A whole benchmark: every configuration in turn, in each of several rounds.

It leaves no process and no file behind, also after an error or an interruption.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import Subset

from fastload.bench import measure
from fastload.bench.isolated import RunFailedError, run_isolated
from fastload.cache.random_check import spread_indices
from fastload.system.cpus import worthwhile_cpus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fastload.bench.configurations import Configuration


@dataclass
class Benchmark:
    """What to measure, and what was measured.

    Attributes:
        rows: The configurations, with the figures of those that have run.
        rounds: How often each of them runs.
        length: Samples of the whole dataset.
        num_samples: Samples of an epoch.
        sample_nbytes: Bytes of a sample in a cache; 0 if no cache was filled.
    """

    rows: list[Configuration]
    rounds: int
    length: int
    num_samples: int
    sample_nbytes: int = 0

    def run(self, dataset: Any, transform: Any) -> Iterator[None]:
        """Measure all configurations in turn; yields after each of `rounds * len(rows)` runs.

        Args:
            dataset: The whole dataset.
            transform: The random part behind it; None without one.
        """
        if self.num_samples < self.length:
            dataset = Subset(dataset, spread_indices(self.length, self.num_samples))
        with _folder() as folder, contextlib.suppress(RunFailedError):  # each row will say it
            run_isolated(lambda: measure.read_once(dataset, worthwhile_cpus()), folder)
        for number in range(self.rounds):
            for row in in_turn(self.rows, number, self.rounds):
                if not row.problem:
                    self._run_once(row, dataset, transform)
                yield

    def _run_once(self, row: Configuration, dataset: Any, transform: Any) -> None:
        """Measure a configuration; an error becomes its problem."""
        try:
            with _folder() as folder:
                first, later, nbytes = run_isolated(
                    lambda: measure.measure(dataset, transform, row, folder), folder
                )
        except RunFailedError as error:
            row.problem = str(error)
        else:
            row.first.append(first)
            row.later.append(later)
            self.sample_nbytes = nbytes or self.sample_nbytes

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; rates are samples per second."""
        return {**asdict(self), "rows": [{**asdict(row), "median": row.rate or None} for row in self.rows]}


def in_turn(rows: Sequence[Configuration], number: int, rounds: int) -> list[Configuration]:
    """All rows, in the order of a round: each round begins with a different one.

    In each round every configuration runs once, so a slow minute of the machine affects all of them.
    """
    first = number * max(1, len(rows) // rounds) % len(rows)
    return [*rows[first:], *rows[:first]]


def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fastload-bench-", ignore_cleanup_errors=True)
