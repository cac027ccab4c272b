"""CachedDataset: a dataset, a cache of its samples, and the random transform that runs behind the cache.

Made in the parent, used there and in workers of fastload's and of torch's loader, under every start method.
It pickles as handles: all workers read and fill one cache. Rules:

1. The source is read at the first access to a sample, by whoever comes first; later accesses read the cache.
   Where the machine provides memory so slowly that an epoch would take much longer for it, some samples are
   stored in a later epoch (see `pace`).
2. What the caller or the transform changes never reaches the cache.
3. A hit and a miss give the same: same types, contiguous arrays.
4. Attributes that the dataset inside has and this class does not are found here too, but for those that would
   say something of this dataset that is true of the one inside alone (see `_NOT_FORWARDED`).
"""

from __future__ import annotations

import operator
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from fastload.cache.build.fill import fill
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.cache.pace import Pace
from fastload.cache.sources import StoredSamples
from fastload.cache.transform import TransformCaller, check_callable
from fastload.errors import UnsupportedSampleError
from fastload.nested.tree import private_copy, read_only
from fastload.rng.sample_rng import mark

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from fastload.cache.columns import Allocate
    from fastload.cache.protocol import SampleCache

# The samples here went through `prepare` and `transform`: under the fingerprint of the dataset inside, other
# jobs would find a cache of them as that dataset's, and get wrong images. The state and the epoch of that
# dataset say nothing of cached samples, and a new epoch must not change what is cached later.
_NOT_FORWARDED = frozenset({"fingerprint", "state_dict", "load_state_dict", "set_epoch"})


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

    Epochs fill a cache in RAM as they go, and none takes more than about 1.2 times as long for it: where
    memory is slow to come, a sample may be decoded two or three times before it is stored. `fill` stores all
    at once.

    Public attributes of the dataset inside (`classes`, `targets`, `class_to_idx`) are attributes of this one,
    but for `fingerprint`, `state_dict`, `load_state_dict` and `set_epoch`.

    Args:
        dataset: Map-style and deterministic. Its samples are HWC uint8 arrays, other arrays, tensors,
            numbers, str, bytes, None, and dicts, lists, tuples and namedtuples of these.
        transform: The random part, run at every access: an albumentations pipeline (given the targets of a
            dict sample, or the array that a sample is or starts with) or any callable (given the whole
            sample). It is given private copies of the arrays, and may write to them; a pipeline that
            consists of albumentations' own transforms is given the cached arrays, read-only, where that
            saves the copy.
        cache: `"ram"`, `"lmdb:PATH"` (built now if PATH is not there), `["ram", "lmdb:PATH"]` (what RAM lacks
            is read from the file, and kept), or a cache.
        prepare: The deterministic part, run once a sample, before it is cached; called as `transform` is.
        key: A name that always means these samples, after `prepare`: ranks and jobs of this user that give
            the same key share one cache in RAM. A dataset that has a `fingerprint()` (ImageFolder, and
            torch's Subset of one) shares without a key.
        budget: The most memory a cache in RAM may take: `"auto"` (80% of what is free), bytes, `"40GB"`, or a
            share of what is free. Samples that do not fit are read from the dataset at every access. Whoever
            makes a shared cache decides.
        num_workers: Processes that build an LMDB cache; None for one for each CPU that may be used.
        progress: Show the progress of that build.

    Attributes:
        dataset: As given.
        transform: As given; may be set. Set another pipeline instead of putting parts into this one.
        prepare: As given.
        key: As given.
        cache: The cache in use; `cache.explain()` says why it is this one.

    Raises:
        TypeError: The dataset has no `__len__` or no `__getitem__`, or is iterable-style; `transform` or
            `prepare` cannot be called.
        RandomDatasetError: Two readings of one sample differ.
        UnsupportedSampleError: A sample holds something that cannot be cached.
        CacheMismatchError: The cache was made from something else.
        ValueError: `cache`, `key` or `budget` has none of the forms above.
    """

    def __init__(
        self,
        dataset: Any,
        transform: Callable[..., Any] | None = None,
        *,
        cache: str | SampleCache | Sequence[str | SampleCache] = "ram",
        prepare: Callable[..., Any] | None = None,
        key: str | None = None,
        budget: str | float = "auto",
        num_workers: int | None = None,
        progress: bool = True,
    ) -> None:
        _check_map_style(dataset)
        for role, function in (("transform", transform), ("prepare", prepare)):
            if function is not None:
                check_callable(role, function)
        self.dataset = dataset
        self.transform = transform
        self.prepare = prepare
        self.key = key
        self._caller: TransformCaller | None = None
        self._pace = Pace()
        self._num_samples = len(dataset)
        from fastload.cache.open_cache import Opener, Request  # Pillow and LMDB, which workers may not need

        opener = Opener(Request(dataset, prepare, key, budget, num_workers, progress))
        self._source = opener.source
        self.cache = opener.open(cache)

    @classmethod
    def from_cache(
        cls,
        path: str | os.PathLike[str],
        transform: Callable[..., Any] | None = None,
        *,
        ram: bool = False,
        budget: str | float = "auto",
    ) -> CachedDataset:
        """A finished LMDB cache as the dataset itself: the source is not needed any more.

        Samples that could not be read when it was built are left out, and the others numbered anew. The
        names of ImageFolder's classes are in `classes`.

        Args:
            path: The file, or the directory of shards.
            transform: The random part, run at every access.
            ram: Keep what was read once in RAM, shared with all that read the same file so.
            budget: The most memory that may take.

        Raises:
            FileNotFoundError: There is no such file.
            CacheMismatchError: It is no cache of this format, or shards are missing.
            CacheCorruptError: A file is damaged.
        """
        samples = StoredSamples(LMDBCache(path))
        return cls(samples, transform, cache=["ram", samples] if ram else samples, budget=budget)

    def __len__(self) -> int:
        return self._num_samples

    def __getattr__(self, name: str) -> Any:
        # Python asks here for what it found nowhere else: for `dataset` too, while a copy is made.
        inner = self.__dict__.get("dataset")
        if inner is None or name.startswith("_") or name in _NOT_FORWARDED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(inner, name)
        except AttributeError as error:
            raise AttributeError(
                f"neither {type(self).__name__!r} nor the {type(inner).__name__!r} inside has the attribute "
                f"{name!r}"
            ) from error

    def __getitem__(self, index: int) -> Any:
        """The sample, transformed; without a transform a private, writable copy.

        Raises:
            IndexError: `index` is not in `-len(self) <= index < len(self)`.
            UnsupportedSampleError: The sample holds something that cannot be cached.
            TypeError: `transform` was set to something that cannot be called.
            Exception: What the transform raises, with a note that says what it was given.
        """
        transform = self.transform  # read once: another thread may set it
        if transform is None:
            return private_copy(self.view(index))
        caller = self._caller
        if caller is None or caller.transform is not transform:
            caller = self._caller = TransformCaller(transform)
        return caller(lambda: self.view(index), index)

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
        if sample is None:
            return self._read(position)
        self._pace.hits += 1
        return sample

    def _read(self, index: int) -> Any:
        """The sample from its source, stored if there is room and time."""
        restore = mark()
        started_s = time.perf_counter()
        try:
            fresh = self._source[index]
        except Exception as error:
            stored = getattr(self.cache, "slow", self.cache)  # the file behind a cache in RAM
            if isinstance(stored, LMDBCache) and stored.is_left_out(index):
                error.add_note(
                    f"sample {index} could not be read when {stored.path} was built and was left out, so it "
                    "is read from the dataset again. To train without such samples, use "
                    f"CachedDataset.from_cache({stored.path!r}, transform=...)"
                )
            raise
        read_s = time.perf_counter() - started_s
        restore()  # a sample that was cached before has drawn nothing either
        try:
            sample = read_only(fresh)
        except UnsupportedSampleError as error:
            error.add_note(f"in sample {index} of the dataset")
            raise
        self._pace.put(self.cache, index, sample, read_s=read_s)
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
        batch = self.cache.gather(positions.astype(np.intp, copy=False), allocate)
        if batch is not None:
            self._pace.hits += len(positions)
        return batch

    def fill(self, num_workers: int | None = None, *, progress: bool = True) -> CacheInfo:
        """Read what is not cached yet, as far as the budget goes, now and not in the first epoch.

        Args:
            num_workers: Processes that read; None for one for each CPU that may be used, 0 for none.
            progress: Show a bar if standard error is a terminal; progress is logged otherwise.

        Returns:
            What is cached afterwards. Samples that others stored meanwhile count.

        Raises:
            UnsupportedSampleError: A sample holds something that cannot be cached.
            Exception: What the dataset raises for a sample, with a note that names it.
        """
        fill(self, self.cache, num_workers=num_workers, shown=progress)
        return self.cache_info()

    def cache_info(self) -> CacheInfo:
        """How many samples are cached, and in how many bytes."""
        cache = self.cache
        return CacheInfo(self._num_samples, cache.num_cached, cache.nbytes, cache.budget_bytes, cache.layout)


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
