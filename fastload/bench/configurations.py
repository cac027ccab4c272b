"""Configurations: the combinations of loader, cache and settings that a benchmark compares."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


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
        by_file: Whether the cache is the loader's, of decoded files; else CachedDataset has one of samples.
        first: Of the first epoch of each round, with the start of the workers and the filling of the cache.
        later: Of the later epochs of each round.
        problem: Why there are no figures; "" if there are.
    """

    loader: str
    cache: Cache
    num_workers: int
    batch_size: int
    by_file: bool = False
    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    problem: str = ""

    @property
    def rate(self) -> float:
        """The median of the later epochs; 0 if a round failed, or none has run."""
        return statistics.median(self.later) if self.later and not self.problem else 0.0

    def options(self, path: str = "PATH") -> dict[str, Any]:
        """The arguments of the loader beside its dataset; an LMDB cache of decoded files lies at a path."""
        cache = {"cache": self.place(path)} if self.by_file and self.cache != Cache.NONE else {}
        workers = {"num_workers": self.num_workers, "persistent_workers": self.num_workers > 0}
        return {"batch_size": self.batch_size, "shuffle": True, **workers, **cache}

    def place(self, path: str = "PATH") -> str | None:
        """The cache as `cache=` takes it; one on disk lies at a path."""
        return {Cache.NONE: None, Cache.RAM: "ram", Cache.LMDB: f"lmdb:{path}"}[self.cache]

    def line(self, dataset: str, *, has_transform: bool) -> str:
        """The line of Python that makes this loader.

        Args:
            dataset: An expression for the dataset.
            has_transform: Whether a variable `transform` has the random part.
        """
        place = None if self.by_file else self.place()
        if has_transform or place:
            dataset += f"{', transform' if has_transform else ''}, cache={place!r}"
            dataset = f"fastload.CachedDataset({dataset})"
        options = ", ".join(f"{name}={value!r}" for name, value in self.options().items())
        module = "torch.utils.data" if self.loader == "torch" else "fastload"
        return f"loader = {module}.DataLoader({dataset}, {options})"


def configurations_of(
    workers: Iterable[int], batch_size: int, caches: Iterable[Cache], *, by_file: bool
) -> list[Configuration]:
    """Every combination of these settings; torch's loader, which has no cache, always takes part."""
    kinds = [("torch", Cache.NONE), *(("fastload", cache) for cache in caches)]
    return [
        Configuration(loader, cache, count, batch_size, by_file)
        for (loader, cache), count in itertools.product(kinds, workers)
    ]


def default_workers(num_cpus: int) -> list[int]:
    """No workers, one for each second CPU, and one for each CPU, but never more than 32."""
    return sorted({min(32, count) for count in (0, -(-num_cpus // 2), num_cpus)})
