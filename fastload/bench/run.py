"""A whole benchmark: every configuration in turn, in each of several rounds.

It leaves no process and no file behind, also after an error or an interruption.
"""

from __future__ import annotations

import collections
import contextlib
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch.utils.data

from fastload.bench.isolated import RunFailedError, run_isolated
from fastload.cache.dataset import CachedDataset
from fastload.cache.random_check import spread_indices
from fastload.loader import DataLoader
from fastload.system.cpus import worthwhile_cpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fastload.bench.configurations import Configuration

LATER_S = 0.5  # later epochs are repeated until they took this long together


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
            dataset = torch.utils.data.Subset(dataset, spread_indices(self.length, self.num_samples))
        with _folder() as folder, contextlib.suppress(RunFailedError):  # each row will say it
            run_isolated(lambda: read_once(dataset, worthwhile_cpus()), folder)
        for number in range(self.rounds):
            for row in in_turn(self.rows, number, self.rounds):
                if not row.problem:
                    self._run_once(row, dataset, transform)
                yield

    def _run_once(self, row: Configuration, dataset: Any, transform: Any) -> None:
        """Measure a configuration; an error becomes its problem."""
        try:
            with _folder() as folder:
                first, later, nbytes = run_isolated(lambda: measure(dataset, transform, row, folder), folder)
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
    # A short name: the sockets of torch's workers lie below it.
    return tempfile.TemporaryDirectory(prefix="fastload-", ignore_cleanup_errors=True)


def read_once(dataset: Any, num_workers: int) -> None:
    """Read every sample once, so every configuration finds its files in the page cache."""
    collections.deque(DataLoader(dataset, batch_size=None, num_workers=num_workers), maxlen=0)


def measure(
    dataset: Any, transform: Callable[..., Any] | None, configuration: Configuration, folder: str
) -> tuple[float, float, int]:
    """The rates of one configuration over all samples of the dataset, and the bytes of a sample in its cache.

    The first rate, in samples per second, is of the first epoch, with the start of the workers and filling
    the cache; the second of the epochs after it, with the same workers, and with a cache that is full.

    Args:
        dataset: The samples of an epoch.
        transform: The random part, run on every access; None without one.
        configuration: The loader and its settings.
        folder: Where an LMDB cache is built.
    """
    num_samples, started_s = len(dataset), time.perf_counter()
    path = os.path.join(folder, "cache.lmdb")
    place = None if configuration.by_file else configuration.place(path)
    if place or transform is not None:
        if place == f"lmdb:{path}":
            CachedDataset.build(dataset, path, progress=False).close()
        dataset = CachedDataset(dataset, transform, cache=place)
    kind: Any = torch.utils.data.DataLoader if configuration.loader == "torch" else DataLoader
    loader = kind(dataset, **configuration.options(path))
    collections.deque(loader, maxlen=0)
    first_s = time.perf_counter() - started_s
    started_s, num_epochs, later_s = time.perf_counter(), 0, 0.0
    while later_s < LATER_S:
        collections.deque(loader, maxlen=0)
        num_epochs, later_s = num_epochs + 1, time.perf_counter() - started_s
    nbytes = dataset.cache_info().nbytes // num_samples if place else 0
    return num_samples / first_s, num_samples * num_epochs / later_s, nbytes
