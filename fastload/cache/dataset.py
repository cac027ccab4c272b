"""CachedDataset: a dataset, a cache of its samples, and the random transform that runs behind the cache.

Made in the parent, used there and in workers of fastload's and of torch's loader, under every start method.
It pickles as handles: all workers read and fill one cache. Rules:

1. The source is read at the first access to a sample, by whoever comes first; later accesses read the cache.
2. What the caller or the transform changes never reaches the cache.
3. A hit and a miss give the same: same types, contiguous arrays, read-only for the transform.
"""

from __future__ import annotations

import logging
import operator
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from fastload.cache import guard
from fastload.cache.budget import available_bytes, parse_budget
from fastload.cache.build import build_lmdb, check_source
from fastload.cache.lmdb import LMDBCache
from fastload.cache.nests import private_copy, read_only
from fastload.cache.private import PrivateCache
from fastload.cache.protocol import SampleCache
from fastload.cache.record import encode
from fastload.cache.shared import SharedMemoryCache
from fastload.cache.transform import TransformCaller
from fastload.errors import CacheMismatchError, UnsupportedSampleError
from fastload.transport import segment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastload.cache.columns import Allocate

log = logging.getLogger("fastload")

_LMDB_PREFIX = "lmdb:"


@dataclass(frozen=True)
class CacheInfo:
    """The state of a cache.

    Attributes:
        num_samples: Of the dataset.
        num_cached: Samples that are stored now.
        nbytes: Bytes that they take.
        budget_bytes: The most bytes that they may take; None for a finished file.
        layout: How they lie: `"uniform"`, `"ragged"`, `"lmdb"` or `"private"`.
    """

    num_samples: int
    num_cached: int
    nbytes: int
    budget_bytes: int | None
    layout: str


class CachedDataset(Dataset[Any]):
    """A map-style dataset whose samples are decoded once and then read from a cache.

    Args:
        dataset: Map-style and deterministic. Its samples are HWC uint8 arrays, other arrays, tensors,
            numbers, str, bytes, None, and dicts, lists, tuples and namedtuples of these.
        transform: The random part, run at every access: an albumentations pipeline (given the targets of a
            dict sample, or the array that a sample is or starts with) or any callable (given the whole
            sample). Arrays are read-only to it.
        cache: `"ram"`, `"lmdb:PATH"` (built now if PATH is not there), or a cache.
        budget: The most memory a cache in RAM may take: `"auto"` (80% of what is free), bytes, `"40GB"`, or a
            share of what is free. Samples that do not fit are read from the dataset at every access.
        num_workers: Processes that build an LMDB cache; None for one a core.
        progress: Show the progress of that build.

    Attributes:
        dataset: As given.
        transform: As given; may be set.
        cache: The cache in use.

    Raises:
        TypeError: The dataset has no `__len__` or no `__getitem__`, or is iterable-style.
        RandomDatasetError: Two readings of one sample differ.
        UnsupportedSampleError: A sample holds something that cannot be cached.
        CacheMismatchError: The cache was made from something else.
        ValueError: `cache` or `budget` is none.
    """

    def __init__(
        self,
        dataset: Any,
        transform: Callable[..., Any] | None = None,
        *,
        cache: str | SampleCache = "ram",
        budget: str | float = "auto",
        num_workers: int | None = None,
        progress: bool = True,
    ) -> None:
        _check_map_style(dataset)
        self.dataset = dataset
        self.transform = transform
        self._caller: TransformCaller | None = None
        self._num_samples = len(dataset)
        last = self._num_samples - 1
        examined = list(dict.fromkeys([0, self._num_samples // 2, last])) if self._num_samples else []
        examples = guard.probe(dataset, examined, rechecked=[0, last])
        self.cache = self._open(cache, budget, examples, num_workers, progress)
        for index, sample in examples.items():
            self.cache.put(index, sample)
        self._report(examples)

    def _open(
        self,
        cache: Any,
        budget: str | float,
        examples: dict[int, Any],
        num_workers: int | None,
        progress: bool,
    ) -> SampleCache:
        allowed = parse_budget(budget)
        if isinstance(cache, str) and cache.startswith(_LMDB_PREFIX) and len(cache) > len(_LMDB_PREFIX):
            path = os.path.expanduser(cache.removeprefix(_LMDB_PREFIX))
            return build_lmdb(self.dataset, path, num_workers=num_workers, progress=progress, probed=examples)
        if cache == "ram":
            allowed = max(1, min(allowed, available_bytes()))
            if segment.is_supported():
                return SharedMemoryCache(self._num_samples, list(examples.values()), budget=allowed)
            log.warning(
                "this platform has no anonymous shared memory: each worker process decodes every sample "
                'and keeps its own copy; cache="lmdb:PATH" is shared'
            )
            return PrivateCache(self._num_samples, budget=allowed)
        if isinstance(cache, str) or not isinstance(cache, SampleCache):
            raise ValueError(f'cache={cache!r} is none: give "ram", "lmdb:PATH" or a cache object')
        if isinstance(cache, LMDBCache):
            check_source(cache, self._num_samples, examples.get(0))
        elif cache.num_samples != self._num_samples:
            raise CacheMismatchError(
                f"the cache was made for {cache.num_samples} samples, the dataset has {self._num_samples}: "
                "make a cache for this dataset"
            )
        return cache

    def _report(self, examples: dict[int, Any]) -> None:
        info = self.cache_info()
        if not examples:
            log.info("cache: the dataset is empty")
            return
        needed_bytes = (
            sum(len(encode(sample)) for sample in examples.values()) / len(examples) * info.num_samples
        )
        fit = info.num_samples
        if info.budget_bytes is not None:
            capacity = getattr(self.cache, "capacity", None)
            estimate = int(info.num_samples * min(1.0, info.budget_bytes / max(needed_bytes, 1)))
            fit = estimate if capacity is None else capacity
        log.info(
            "cache: %s layout, %s of %s samples fit, about %s needed, budget %s",
            info.layout,
            f"{fit:,}",
            f"{info.num_samples:,}",
            _size(needed_bytes),
            "none" if info.budget_bytes is None else _size(info.budget_bytes),
        )

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Any:
        """The sample, transformed; without a transform a private, writable copy.

        Raises:
            IndexError: `index` is not in `-len(self) <= index < len(self)`.
            UnsupportedSampleError: The sample holds something that cannot be cached.
        """
        if self.transform is None:
            return private_copy(self.view(index))
        caller = self._caller
        if caller is None or caller.transform is not self.transform:
            caller = self._caller = TransformCaller(self.transform)
        return caller(lambda: self.view(index))

    def view(self, index: int) -> Any:
        """The sample before the transform, without a copy where it is cached.

        Arrays are read-only, and valid for as long as they are held; tensors are private copies.

        Raises:
            IndexError: `index` is not in `-len(self) <= index < len(self)`.
            UnsupportedSampleError: The sample holds something that cannot be cached.
        """
        position = operator.index(index)
        if not 0 <= position < self._num_samples:
            if not -self._num_samples <= position < 0:
                raise IndexError(
                    f"index {position} is out of range: the dataset has {self._num_samples} samples"
                )
            position += self._num_samples
        sample = self.cache.get(position)
        return self._read(position) if sample is None else sample

    def _read(self, index: int) -> Any:
        """The sample from its source, stored if there is room."""
        fresh = self.dataset[index]
        try:
            sample = read_only(fresh)
        except UnsupportedSampleError as error:
            error.add_note(f"in sample {index} of the dataset")
            raise
        self.cache.put(index, sample)
        return sample

    def gather(self, indices: Sequence[int], allocate: Allocate) -> Any | None:
        """A batch in one go: what `default_collate([self[i] for i in indices])` gives, if that is possible.

        Args:
            indices: Of the samples, in the batch's order.
            allocate: Called as `allocate(shape, dtype)` for each array, tensor or number of a sample; gives a
                writable C-contiguous array, whose memory the batch's tensors use.

        Returns:
            None if there is a transform, a sample is not cached in columns, or default_collate must decide;
            the caller then fetches sample by sample.
        """
        if self.transform is not None or not len(indices):
            return None
        positions = np.asarray(indices)
        if positions.dtype.kind not in "iu" or positions.ndim != 1:
            return None
        if positions.min() < 0 or positions.max() >= self._num_samples:
            return None
        return self.cache.gather(positions.astype(np.intp, copy=False), allocate)

    def cache_info(self) -> CacheInfo:
        """How many samples are cached, and in how many bytes."""
        cache = self.cache
        return CacheInfo(self._num_samples, cache.num_cached, cache.nbytes, cache.budget_bytes, cache.layout)


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def _check_map_style(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"{type(dataset).__name__} is an iterable-style dataset: its samples have no index to be cached "
            "by. Give a map-style dataset, with __len__ and __getitem__"
        )
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(type(dataset), name)]
    if missing:
        raise TypeError(
            f"{type(dataset).__name__} has no {' and no '.join(missing)}: give a map-style dataset, with "
            "__len__ and __getitem__"
        )
