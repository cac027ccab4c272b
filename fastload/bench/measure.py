"""The steps that read samples: examine the dataset, warm the page cache, build a cache, time a configuration.

Each step runs in its own process (see `subprocess_runner`). The process that compares never reads a sample.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.utils.data

from fastload.bench.subprocess_runner import in_a_line
from fastload.cache.build.random_check import probe, spread_indices
from fastload.cache.dataset import CachedDataset
from fastload.cache.open_cache import pre_transformed
from fastload.cache.records import encode
from fastload.errors import CacheError, UnsupportedSampleError
from fastload.loader import DataLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastload.bench.configurations import Configuration

LATER_S = 0.5  # later epochs are repeated until they took this long together
_MAX_EXAMINED = 32
_EXAMINE_S = 2.0


class Examined(NamedTuple):
    """Findings from some samples of a dataset.

    Attributes:
        sample_nbytes: Bytes of a decoded sample; 0 if unknown.
        why_no_batch: Why `default_collate` makes no batch of them; "" if it does.
        why_no_cache: Why they cannot be cached; "" if they can.
    """

    sample_nbytes: int
    why_no_batch: str
    why_no_cache: str


class Epochs(NamedTuple):
    """Samples per second of one run.

    Attributes:
        first: In the first epoch, with the start of the workers; with a cache in RAM, with filling it.
        later: In the epochs after it, with the same workers, and with a cache that is full.
    """

    first: float
    later: float


def examine(dataset: Any, transform: Callable[..., Any] | None) -> Examined:
    """Look at some samples, evenly spaced. An error of the dataset or the transform is raised."""
    indices = spread_indices(len(dataset), _MAX_EXAMINED)
    samples = []
    started_s = time.perf_counter()
    for index in indices:
        samples.append(dataset[index])
        if time.perf_counter() - started_s > _EXAMINE_S and len(samples) > 1:
            break
    nbytes, why_no_cache = _cacheable(dataset, indices, samples)
    transformed = with_transform(samples, transform)
    outputs = [transformed[position] for position in range(len(samples))]
    return Examined(nbytes, _why_no_batch(outputs), why_no_cache)


def with_transform(dataset: Any, transform: Callable[..., Any] | None) -> Any:
    """The dataset with a transform behind it, which gets the samples as that of a CachedDataset does."""
    return dataset if transform is None else pre_transformed(dataset, transform)


def _why_no_batch(samples: Sequence[Any]) -> str:
    try:
        torch.utils.data.default_collate(list(samples))
    except Exception as error:  # noqa: BLE001  # default_collate raises several types
        return in_a_line(error)
    return ""


def _cacheable(dataset: Any, indices: Sequence[int], samples: Sequence[Any]) -> tuple[int, str]:
    """Bytes of a cached sample, and why samples cannot be cached."""
    try:
        nbytes = sum(len(encode(sample)) for sample in samples) // len(samples)
    except UnsupportedSampleError as error:
        return 0, f"a cache cannot hold its samples: {error}"
    if isinstance(dataset, CachedDataset):
        return nbytes, "the dataset is a CachedDataset already"
    try:
        probe(dataset, indices=sorted({indices[0], indices[len(samples) // 2], indices[len(samples) - 1]}))
    except CacheError:
        return nbytes, "the dataset is random: move its random part to --transform"
    return nbytes, ""


def warm(dataset: Any, num_workers: int) -> None:
    """Read every sample once, so every configuration finds its files in the page cache."""
    with DataLoader(dataset, batch_size=None, num_workers=num_workers) as loader:
        for _ in loader:
            pass


def build(dataset: Any, path: str, num_workers: int) -> float:
    """Build an LMDB cache; returns the seconds that it took."""
    started_s = time.perf_counter()
    CachedDataset.build(dataset, path, num_workers=num_workers, progress=False).close()
    return time.perf_counter() - started_s


def measure(
    dataset: Any, transform: Callable[..., Any] | None, configuration: Configuration, lmdb_path: str
) -> Epochs:
    """The rates of one configuration over all samples of the dataset.

    Args:
        dataset: The samples of an epoch.
        transform: The random part, run on every access.
        configuration: The loader and its settings.
        lmdb_path: The finished cache of the dataset, where the configuration reads one.
    """
    num_samples = len(dataset)
    if configuration.cache == "lmdb":
        dataset = CachedDataset(dataset, transform, cache=f"lmdb:{lmdb_path}")
    elif configuration.cache == "ram":
        # A key of this run: it must not find a different process's cache, which is already filled.
        key = f"fastload bench, process {os.getpid()}"
        dataset = CachedDataset(dataset, transform, cache="ram", cache_key=key)
    else:
        dataset = with_transform(dataset, transform)
    loader_class: Any = torch.utils.data.DataLoader if configuration.is_torch else DataLoader
    loader = loader_class(
        dataset,
        batch_size=configuration.batch_size,
        shuffle=True,
        num_workers=configuration.num_workers,
        persistent_workers=configuration.num_workers > 0,
    )
    try:
        first_s = _epoch_s(loader)
        later_s, num_epochs = 0.0, 0
        while later_s < LATER_S:
            later_s += _epoch_s(loader)
            num_epochs += 1
    finally:
        if not configuration.is_torch:
            loader.close()
        loader._iterator = None  # ends persistent workers of torch's loader
    return Epochs(num_samples / first_s, num_samples * num_epochs / later_s)


def _epoch_s(loader: Any) -> float:
    """Seconds of an epoch, from `iter(loader)` to its last batch."""
    started_s = time.perf_counter()
    num_batches = sum(1 for _ in loader)
    elapsed_s = time.perf_counter() - started_s
    if num_batches != len(loader):
        raise RuntimeError(f"expected {len(loader)} batches, but got {num_batches}")
    return elapsed_s
