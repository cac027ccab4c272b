"""The steps that read samples, each in its own process: the process that compares never reads one."""

from __future__ import annotations

import collections
import os
import time
from typing import TYPE_CHECKING, Any

import torch.utils.data

from fastload.cache.dataset import CachedDataset
from fastload.loader import DataLoader

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.bench.configurations import Configuration

LATER_S = 0.5  # later epochs are repeated until they took this long together


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
