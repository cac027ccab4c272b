"""CachedDataset: a dataset, a cache of its samples, and the random transform that runs after the cache.

The parent makes it; the parent and the workers of fastload's or torch's loader use it, with every start
method. It pickles as handles, so all workers read and fill one cache. Loaded from a checkpoint, it begins
with an empty cache in RAM. Rules:

1. The first access to a sample reads the source and stores the sample, in any process; later accesses read
   the cache. A sample that draws random numbers is not stored.
2. Changes that the caller or the transform makes to a sample never reach the cache.
3. A hit and a miss return the same sample: same types, contiguous arrays.
4. Attributes that only the wrapped dataset has are also attributes of this class, except for those that are
   true only of the wrapped dataset (see `_NOT_FORWARDED`). Setting them sets them there, or is an error where
   samples are stored, because these would not change.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import Dataset, IterableDataset

from fastload.augmentation.encoded import decoded
from fastload.batch.access import expect, expects, positions_of
from fastload.batch.failures import FailedSample
from fastload.cache.fill import FillOptions, fill
from fastload.cache.finished import LMDBCache
from fastload.cache.sample_cache import NoCache
from fastload.cache.transform import TransformCaller, check_callable
from fastload.errors import UnsupportedSampleError
from fastload.nested.tree import private_copy, read_only, read_only_views
from fastload.rng.draws import DrawWatch
from fastload.rng.sample_rng import save_generators
from fastload.system.cache_counts import cache_counts
from fastload.system.checks import as_path, position_of
from fastload.system.logs import log
from fastload.system.notes import add_note

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastload.batch.access import Allocate, BatchAccess
    from fastload.cache.sample_cache import SampleCache

# Samples of a CachedDataset went through `pre_transform` and `transform`. If it had the wrapped dataset's
# fingerprint, other jobs would take a cache of these samples for a cache of that dataset, and get wrong
# images. The state and the epoch of that dataset do not describe cached samples. Neither a new epoch nor the
# setters of Hugging Face datasets can change the samples that are cached later.
_NOT_FORWARDED = frozenset(
    {
        *("fingerprint", "state_dict", "load_state_dict", "set_epoch"),
        *("set_format", "reset_format", "set_transform"),
    }
)


_MAX_LISTED = 10  # left-out samples that the log names
# The attributes that decide which samples are stored.
_DECIDED = frozenset({"cache", "cache_key", "dataset", "pre_transform"})


@dataclass(frozen=True)
class CacheInfo:
    """The state of a cache.

    Attributes:
        num_samples: Number of samples of the dataset.
        num_cached: Samples stored now.
        nbytes: Their size in bytes.
        max_bytes: The limit for `nbytes`; None for a finished file, and without a cache.
        layout: How they are stored: `"uniform"`, `"ragged"`, `"lmdb"`, or `"none"`.
    """

    num_samples: int
    num_cached: int
    nbytes: int
    max_bytes: int | None
    layout: str


class CachedDataset(Dataset[Any]):
    """A map-style dataset whose samples are decoded once and then read from a cache.

    A cache in RAM fills during the first epoch, which takes longer by the time of storing. `fill` stores all
    samples before it.

    Public attributes of the wrapped dataset (`classes`, `targets`, `class_to_idx`) are also attributes of
    this one, except for `fingerprint`, `state_dict`, `load_state_dict`, `set_epoch`, `set_format`,
    `reset_format` and `set_transform`. Setting one here sets it there; where samples are stored, it
    raises AttributeError: set it before the dataset is cached.

    Args:
        dataset: Map-style and deterministic. Its samples are HWC uint8 arrays, other arrays, tensors,
            numbers, str, bytes, None, and dicts, lists and tuples of these. `pre_transform` converts other
            samples, such as PIL images (``pre_transform=numpy.asarray``) and namedtuples (``=tuple``).
        transform: The random part, run on every access: an albumentations pipeline (it gets the targets of a
            dict sample, the sample if it is an array, or else its first element), a pipeline of torchvision's
            first transforms or timm's (it gets the image beside labels) or any other callable, such as one of
            torchvision's v2 (it gets the whole sample). It gets private copies, and can write to them. A
            pipeline of albumentations' own transforms gets the cached arrays, read-only, if that saves the
            copy.
        cache: `"ram"`, `"ram:32G"` (with this `max_memory`), `"lmdb:PATH"` (built now if PATH does not exist,
            see `build`; if another process builds it, this one waits), or a cache object.
            None stores nothing, and the dataset is read every time. (Of an ImageFolder's JPEGs, only the
            region is decoded that a pipeline of albumentations begins by cropping, with the extra `regions`.)
        pre_transform: The deterministic part, run once per sample, before it is cached; called like
            `transform`.
        cache_key: A name that always means these samples, after `pre_transform`. Ranks and jobs of this user
            with the same key share one cache in RAM. Datasets with a `fingerprint()` (ImageFolder, and
            torch's Subset of one) are shared without a key. Of any other dataset, each rank has its own
            cache.
        max_memory: The limit for a cache in RAM: `"auto"` (70% of free memory), bytes, `"40GB"`, or a share
            of free memory. Samples that do not fit are read from the dataset every time. The process that
            creates a shared cache sets its limit. For a rank's own cache, free memory is what is free on the
            host, divided by the number of ranks there. The limit reserves nothing: a cache stops earlier, and
            says so, while others leave less than 30% of that memory free (a twentieth, if you set a
            limit).

    Attributes:
        dataset: As given.
        transform: As given; can be set. Set a new pipeline instead of modifying this one in place.
        pre_transform: As given.
        cache_key: As given.
        cache: The cache in use; `cache.explain()` says why.

    Raises:
        TypeError: The dataset is a path, has no `__len__` or no `__getitem__`, or is iterable-style;
            `transform` or `pre_transform` is not callable.
        NondeterministicDatasetError: A sample draws random numbers, or differs when it is read again.
        UnsupportedSampleError: A value in a sample cannot be cached.
        CacheMismatchError: The cache was made from other samples.
        ValueError: `cache`, `cache_key` or `max_memory` is invalid.
    """

    def __init__(
        self,
        dataset: Any,
        transform: Callable[..., Any] | None = None,
        *,
        cache: str | SampleCache | None = "ram",
        pre_transform: Callable[..., Any] | None = None,
        cache_key: str | None = None,
        max_memory: str | float = "auto",
    ) -> None:
        _check_map_style(dataset)
        for role, function in (("transform", transform), ("pre_transform", pre_transform)):
            if function is not None:
                check_callable(role, function)
        self.dataset = dataset
        self.transform = transform
        self.pre_transform = pre_transform
        self.cache_key = cache_key
        self._caller: TransformCaller | None = None
        self._num_samples = len(dataset)
        # Here: they import Pillow and LMDB.
        from fastload.cache.open_cache import open_cache

        opened = open_cache(cache, dataset, pre_transform, cache_key, max_memory)
        self.cache, self._source, self._holds_images = opened
        self._stores = cache is not None
        is_watched = self._stores and self._source is not self.cache
        self._watch = DrawWatch(self._source) if is_watched else None
        self._has_warned = False

    @staticmethod
    def build(
        dataset: Any,
        path: str | os.PathLike[str],
        *,
        pre_transform: Callable[..., Any] | None = None,
        cache_key: str | None = None,
        num_workers: int | None = None,
        progress: bool = True,
        on_error: Literal["raise", "skip"] = "raise",
        max_errors: int | float = 0.01,
        wait: bool = True,
    ) -> LMDBCache:
        """Build the LMDB cache of a dataset, which ``cache="lmdb:PATH"`` then opens; open it if it exists.

        Args:
            dataset: As for this class.
            path: The file.
            pre_transform: As for this class.
            cache_key: As for this class.
            num_workers: Processes that read; None for one per usable CPU, at most 16; 0 for none.
            progress: Show a bar if standard error is a terminal; progress is logged otherwise.
            on_error: `"raise"` ends the build at the first sample that cannot be read; `"skip"` leaves such a
                sample out and writes a line about it to PATH.errors.jsonl.
            max_errors: The maximum number of left-out samples (an int), or their share (a float).
            wait: Wait while another process builds the cache, and then open it.

        Raises:
            CacheBusyError: Another process is building it, and `wait` is False; or another thread is.
            TooManyFailuresError: More samples than `max_errors` allows could not be read.
            Exception: As this class.
        """
        from fastload.cache.open_cache import open_cache  # here: as above

        _check_map_style(dataset)
        cache: Any
        cache, _, _ = open_cache(
            f"lmdb:{as_path('path', path)}",
            dataset,
            pre_transform,
            cache_key,
            num_workers=num_workers,
            progress=progress,
            on_error=on_error,
            max_errors=max_errors,
            wait=wait,
        )
        return cache  # type: ignore[no-any-return]

    @classmethod
    def from_cache(
        cls,
        path: str | os.PathLike[str],
        transform: Callable[..., Any] | None = None,
    ) -> CachedDataset:
        """A finished LMDB cache as a dataset; the source is no longer needed.

        Samples that could not be read during the build are left out, and the other samples are renumbered.
        `classes` holds the names of ImageFolder's classes.

        Args:
            path: The file.
            transform: The random part, run on every access.

        Raises:
            FileNotFoundError: There is no such file.
            CacheMismatchError: It is not a cache of this format.
            CacheCorruptError: A file is damaged.
            ValueError: `path` is a URL.
        """
        if isinstance(path, str) and not os.path.lexists(path):
            path = path.removeprefix("lmdb:")  # as in cache="lmdb:PATH"
        samples = LMDBCache(path, renumber=True)
        return cls(samples, transform, cache=samples)

    def __getstate__(self) -> dict[str, Any]:
        # What is known of the transform is of the releases of libraries here; a checkpoint can meet others.
        return {**vars(self), "_caller": None}

    def __len__(self) -> int:
        return self._num_samples

    def __setattr__(self, name: str, value: Any) -> None:
        is_made = "_has_warned" in vars(self)  # the last attribute that the constructor sets
        is_inner = (
            is_made
            and type(self) is CachedDataset  # a subclass can have attributes of the same names
            and not (name.startswith("_") or name in vars(self) or hasattr(CachedDataset, name))
            and name not in _NOT_FORWARDED
            and hasattr(self.dataset, name)
        )
        if is_inner and not self._stores:
            setattr(self.dataset, name, value)
        elif is_inner or (is_made and name in _DECIDED):
            text = (
                f"{name} should not be set after {type(self).__name__} is initialized, because samples that "
                "are stored do not change with it: set it before, and make a new one (transform can be set)"
            )
            raise AttributeError(text, name=name, obj=self)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        # Python calls this for attributes that it found nowhere else, also for `dataset` while it makes a
        # copy.
        inner: Any = self.__dict__.get("dataset")
        if inner is None or name.startswith("_") or name in _NOT_FORWARDED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(inner, name)
        except AttributeError as error:
            if error.obj is not inner or error.name != name:
                raise  # of a property of the dataset
            owners = f"{type(self).__name__} nor its dataset, of type {type(inner).__name__},"
            raise AttributeError(f"neither {owners} has {name!r}", name=name, obj=self) from None

    def __getitem__(self, index: int) -> Any:
        """The transformed sample; without a transform, a private, writable copy of the sample.

        Raises:
            IndexError: `index` is not in `-len(self) <= index < len(self)`.
            UnsupportedSampleError: A value in the sample cannot be cached.
            TypeError: `transform` was set to an object that is not callable.
            Exception: An error of the transform, with a note that describes its input.
        """
        transform = self.transform  # read once: other threads can set it
        if transform is None:
            return private_copy(self._lend(index))
        return self._caller_of(transform)(self._view, index)

    def __repr__(self) -> str:
        cache = "no cache" if isinstance(self.cache, NoCache) else type(self.cache).__name__
        parts = [f"{type(self.dataset).__name__} of {self._num_samples:,} samples", cache]
        for role, function in (("pre_transform", self.pre_transform), ("transform", self.transform)):
            if function is not None:
                parts.append(f"{role}={getattr(function, '__name__', type(function).__name__)}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def _lend(self, index: int) -> Any:
        """The sample with decoded images, before the transform.

        Arrays that come from the cache are read-only views of its memory.
        """
        sample = self._view(index)
        return decoded(sample) if self._holds_images else sample

    def _caller_of(self, transform: Callable[..., Any]) -> TransformCaller:
        caller = self._caller
        if caller is None or not caller.serves(transform):
            caller = self._caller = TransformCaller(transform, holds_images=self._holds_images)
        return caller

    def explain(self) -> str:
        """Why this cache is in use, and what is decoded on every access."""
        text: str = self.cache.explain()
        if not self._holds_images:
            return text
        if self.transform is None:
            return f"{text}\nwhole images are decoded: there is no transform"
        return f"{text}\n{self._caller_of(self.transform).explain_decoding()}"

    def _view(self, index: int) -> Any:
        """The sample before the transform, without a copy if it is cached.

        Arrays are read-only, and valid as long as they are referenced; tensors are private copies. The image
        is an `EncodedImage` if the source has undecoded ones.

        Raises:
            IndexError: `index` is not in `-len(self) <= index < len(self)`.
            UnsupportedSampleError: A value in the sample cannot be cached.
        """
        length = self._num_samples
        position = index if type(index) is int and 0 <= index < length else position_of(index, length)
        sample = self.cache.get(position)
        if sample is None:
            return self._read_and_store(position)[0]
        cache_counts.hits += 1
        return sample

    def _store(self, index: int) -> bool:
        """Store a sample, unless it is random; returns whether it is stored now."""
        sample, is_random = self.cache.get(index), False
        if sample is None:
            sample, is_random = self._read_and_store(index)
        # If another process held the lock meanwhile, this tries once more.
        return not is_random and self.cache.put(index, sample)

    def _read_and_store(self, index: int) -> tuple[Any, bool]:
        """The sample from its source, and whether it is random, and so not stored."""
        cache_counts.misses += 1
        drawn: list[str] = []
        restore = save_generators() if self._stores else None
        try:
            if self._watch is None:
                fresh = self._source[index]
            else:
                fresh, drawn = self._watch.read(self._source, index)
        except Exception as error:
            stored = self.cache
            if isinstance(stored, LMDBCache) and stored.is_left_out(index):
                add_note(
                    error,
                    f"sample {index} could not be read when {stored.path} was built and was left out, so it "
                    "is read from the dataset again. To train without such samples, use "
                    f"CachedDataset.from_cache({stored.path!r}, transform)",
                )
            raise
        if drawn and not self._has_warned:
            self._has_warned = True
            log.warning(
                "cache: sample %d of the dataset is random (drawn from %s). Such samples are not cached, but "
                "read anew on every access. Move the random part of the dataset to transform=",
                index,
                ", ".join(drawn),
            )
        if drawn or restore is None:
            return read_only_views(fresh), bool(drawn)
        restore()  # reading a cached sample draws no random numbers, so a miss must not change the state
        try:
            sample = read_only(fresh)
        except UnsupportedSampleError as error:
            add_note(error, f"in sample {index} of the dataset")
            raise
        self.cache.put(index, sample)
        return sample, False

    @property
    def _expect(self) -> Callable[[Sequence[int]], None] | None:
        """See `batch.access`: it tells the wrapped dataset which uncached samples are read next."""
        return self._expect_missing if expects(self._source) else None

    def _expect_missing(self, indices: Sequence[int]) -> None:
        positions = (index + self._num_samples if index < 0 else index for index in indices)
        expect(self._source, [position for position in positions if position not in self.cache])

    def _batch_access(self) -> BatchAccess | None:
        return self

    @property
    def lend(self) -> Callable[[int], Any] | None:
        """Returns a sample whose arrays can be read-only views of the cache; None if there is a transform."""
        return self._lend if self.transform is None else None

    @property
    def defer(self) -> Callable[[int], Any]:
        """Returns a transformed sample whose image can be a `DeferredImage`; for one batch."""
        transform = self.transform
        return self.__getitem__ if transform is None else self._caller_of(transform).of_batch(self._view)

    def gather(self, indices: Sequence[int], allocate: Allocate) -> Any | None:
        """The batch of these samples, as `BatchAccess` has it.

        Returns:
            None if there is a transform, a sample is not cached in columns, or the batch needs
            default_collate.
        """
        if self.transform is not None:
            return None
        positions = positions_of(indices, self._num_samples)
        batch = None if positions is None else self.cache.gather(positions, allocate)
        if batch is not None and positions is not None:
            cache_counts.hits += len(positions)
        return batch

    def fill(
        self,
        num_workers: int | None = None,
        *,
        progress: bool = True,
        on_error: Literal["raise", "skip"] = "raise",
        max_errors: int | float = 0.01,
    ) -> CacheInfo:
        """Cache all missing samples that fit into `max_memory` now, instead of in the first epoch.

        Args:
            num_workers: Processes that read; None for one per usable CPU, at most 16; 0 for none.
            progress: Show a bar if standard error is a terminal; progress is logged otherwise.
            on_error: `"raise"` ends it at the first sample that cannot be read; `"skip"` leaves such samples
                out of the cache, so each access reads them again, and `on_error` of the loader applies.
            max_errors: The maximum number of left-out samples (an int), or their share (a float).

        Returns:
            The state of the cache afterwards, including samples that other processes have stored meanwhile.

        Raises:
            UnsupportedSampleError: A value in a sample cannot be cached.
            TooManyFailuresError: More samples than `max_errors` allows could not be read.
            Exception: An error of the dataset, with a note that names the sample.
        """
        cache, left_out = self.cache, list[FailedSample]()
        options = FillOptions(num_workers, on_error, max_errors, progress)
        fill(self, left_out, options, advice="The others stay in the cache", title="filling the cache")
        if left_out:
            listed = "; ".join(map(str, left_out[:_MAX_LISTED])) + "; ..." * (len(left_out) > _MAX_LISTED)
            text = "cache: %d of %d samples could not be read, and are left out: %s"
            log.warning(text, len(left_out), cache.num_samples, listed)
        log.info("cache: %s", cache.explain().partition("\n")[0])
        return self.cache_info()

    def cache_info(self) -> CacheInfo:
        """How many samples are cached, and how many bytes they take."""
        cache = self.cache
        return CacheInfo(self._num_samples, cache.num_cached, cache.nbytes, cache.max_bytes, cache.layout)


def _check_map_style(dataset: Any) -> None:
    if isinstance(dataset, (str, bytes, os.PathLike)):
        path = os.fsdecode(dataset)
        raise TypeError(f"dataset={path!r} is a path, not a dataset: pass fastload.ImageFolder({path!r})")
    is_indexed = all(hasattr(type(dataset), name) for name in ("__len__", "__getitem__"))
    if isinstance(dataset, IterableDataset) or not is_indexed:
        raise TypeError(
            f"{type(dataset).__name__} is not a map-style dataset, but a cache needs samples with an index: "
            "pass a dataset with __len__ and __getitem__"
        )
