"""Configurations: the combinations of loader, cache and settings that a benchmark compares."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

CACHES = ("none", "ram", "lmdb")


@dataclass(frozen=True)
class Configuration:
    """One way to load the data.

    Attributes:
        loader: `"torch"` or `"fastload"`.
        cache: `"none"`, `"ram"` or `"lmdb"`; `"none"` for torch's loader.
        num_workers: Number of worker processes.
        batch_size: Samples of a batch.
    """

    loader: str
    cache: str
    num_workers: int
    batch_size: int

    @property
    def is_torch(self) -> bool:
        """Whether torch's loader is used."""
        return self.loader == "torch"

    def code(self, *, has_transform: bool, lmdb_path: str) -> list[str]:
        """The lines of Python that make this loader of variables `dataset` and `transform`.

        Args:
            has_transform: Whether the dataset has a transform behind it.
            lmdb_path: Where an LMDB cache is built.
        """
        arguments = [f"batch_size={self.batch_size}", "shuffle=True", f"num_workers={self.num_workers}"]
        if self.num_workers:
            arguments.append("persistent_workers=True")
        rest = ", ".join(arguments)
        dataset, names = "dataset", "DataLoader"
        if has_transform or self.cache != "none":
            transform = ", transform" if has_transform else ""
            where = {"none": "None", "ram": '"ram"', "lmdb": f'"lmdb:{lmdb_path}"'}[self.cache]
            dataset = f"CachedDataset(dataset{transform}, cache={where})"
            names = "CachedDataset" if self.is_torch else "CachedDataset, DataLoader"
        lines = ["from torch.utils.data import DataLoader"] if self.is_torch else []
        if not self.is_torch or dataset != "dataset":
            lines.append(f"from fastload import {names}")
        return [*lines, f"loader = DataLoader({dataset}, {rest})"]


def configurations_of(
    workers: Iterable[int], batch_sizes: Iterable[int], caches: Iterable[str]
) -> list[Configuration]:
    """Every combination of these settings; torch's loader, which has no cache, always takes part."""
    kinds = [("torch", "none"), *(("fastload", cache) for cache in caches)]
    return [
        Configuration(loader, cache, count, batch_size)
        for batch_size, (loader, cache), count in itertools.product(batch_sizes, kinds, workers)
    ]
