"""Configurations: the combinations of loader, cache and settings that a benchmark compares."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_WORKERS = 32  # by default


class Cache(StrEnum):
    """Where decoded samples are kept."""

    NONE = "none"
    RAM = "ram"
    LMDB = "lmdb"


@dataclass
class Configuration:
    """One way to load the data, and its rates in samples per second.

    Attributes:
        loader: `"torch"` or `"fastload"`.
        cache: `Cache.NONE` for torch's loader.
        num_workers: Number of worker processes.
        batch_size: Samples of a batch.
        first: Of the first epoch of each round, with the start of the workers and the filling of the cache.
        later: Of the later epochs of each round.
        problem: Why there are no figures; "" if there are.
    """

    loader: str
    cache: Cache
    num_workers: int
    batch_size: int
    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    problem: str = ""

    @property
    def rate(self) -> float:
        """The median of the later epochs; 0 if a round failed, or none has run."""
        return statistics.median(self.later) if self.later and not self.problem else 0.0

    @property
    def options(self) -> dict[str, int | bool]:
        """The arguments of the loader beside its dataset."""
        options = {"batch_size": self.batch_size, "shuffle": True, "num_workers": self.num_workers}
        return options | ({"persistent_workers": True} if self.num_workers else {})

    def line(self, dataset: str, *, has_transform: bool) -> str:
        """The line of Python that makes this loader.

        Args:
            dataset: An expression for the dataset.
            has_transform: Whether a variable `transform` has the random part.
        """
        if has_transform or self.cache != Cache.NONE:
            where = {Cache.NONE: "None", Cache.RAM: '"ram"', Cache.LMDB: '"lmdb:PATH"'}[self.cache]
            arguments = [dataset, *(["transform"] if has_transform else []), f"cache={where}"]
            dataset = f"fastload.CachedDataset({', '.join(arguments)})"
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        module = "torch.utils.data" if self.loader == "torch" else "fastload"
        return f"loader = {module}.DataLoader({dataset}, {options})"


def configurations_of(
    workers: Iterable[int], batch_size: int, caches: Iterable[Cache]
) -> list[Configuration]:
    """Every combination of these settings; torch's loader, which has no cache, always takes part."""
    kinds = [("torch", Cache.NONE), *(("fastload", cache) for cache in caches)]
    return [
        Configuration(loader, cache, count, batch_size)
        for (loader, cache), count in itertools.product(kinds, workers)
    ]


def default_workers(num_cpus: int) -> list[int]:
    """No workers, one for each second CPU, and one for each CPU."""
    return sorted({min(_MAX_WORKERS, count) for count in (0, -(-num_cpus // 2), num_cpus)})
