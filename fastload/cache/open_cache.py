"""Opens the requested cache: finds it, builds it or makes it, and logs the decision.

Rules:

1. A dataset without fingerprint and key is examined before anything is stored: is it random, and what is the
   structure of its samples? Its cache in RAM is private. A dataset with a fingerprint is examined by the
   process that makes its cache.
2. A process that attaches to a cache filled by other processes reads sample 0 and one in the middle from the
   source, and compares them. Only this check can detect a key used twice, an edited `__getitem__`, or a
   fingerprint that covers too little.
3. The decision is logged in one line, with numbers.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import operator
import os
import sys
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastload.cache.build import build_lmdb, opened_lmdb
from fastload.cache.decoded_files import is_of_files
from fastload.cache.fingerprint import (
    Fingerprint,
    check_key,
    fingerprint_of,
    why_private,
)
from fastload.cache.finished import Description, LMDBCache, check_source
from fastload.cache.no_cache import NoCache
from fastload.cache.ram import shared
from fastload.cache.ram.arena import budget_bytes, reserve_bytes
from fastload.cache.ram.shared import SharedMemoryCache
from fastload.cache.random_check import probe, read_unnoticed, readable
from fastload.cache.records import encode
from fastload.cache.sample_cache import SampleCache
from fastload.cache.sources import LMDBDataset, MappedDataset, encoded_source
from fastload.cache.transform import TransformCaller
from fastload.errors import CacheMismatchError, SharedMemoryError
from fastload.memory import segment
from fastload.nested.tree import first_difference, leaves
from fastload.readers.request import check_cache
from fastload.system.budget import check_memory
from fastload.system.humanize import readable_size
from fastload.system.logs import log, say_once
from fastload.system.paths import cache_path
from fastload.system.ranks import count_ranks_of_host

if TYPE_CHECKING:
    from collections.abc import Callable

_COMPARED = 2  # samples of a shared cache, in each process that opens it
_private_classes: dict[tuple[str, str, int], weakref.ref[type]] = {}  # by name and number of samples
_VALUES = (bool, int, float, complex, str, bytes)
_IN_MEMORY_SHARE = 0.5  # of all samples; less can be a buffer of a few samples


class OpenedCache(NamedTuple):
    """A cache, and how a CachedDataset reads what it does not hold.

    Attributes:
        cache: The cache.
        source: The dataset after its deterministic part; its samples are cached.
        holds_images: Whether the source has undecoded images.
    """

    cache: SampleCache
    source: Any
    holds_images: bool = False


@dataclass(frozen=True)
class CacheRequest:
    """The arguments of CachedDataset and its `build` that describe samples and limits."""

    dataset: Any
    pre_transform: Callable[..., Any] | None
    key: str | None
    max_memory: str | float = "auto"
    num_workers: int | None = None
    progress: bool = True
    on_error: str = "raise"
    max_errors: int | float = 0.01
    wait: bool = True

    @functools.cached_property
    def fingerprint(self) -> Fingerprint | None:
        """Identifies the samples, or None; computed on demand: a folder calls stat for each file."""
        return fingerprint_of(self.dataset, key=self.key, pre_transform=self.pre_transform)


@dataclass(eq=False)
class _Samples:
    """The samples to cache, and what is known of them.

    Attributes:
        request: The user's arguments.
        source: The dataset after its deterministic part.
        examples: Samples that were already read from the source, by index.
        is_examined: Whether it is known that the samples are not random, and can be cached.
        bytes_in_memory: Of the arrays that hold the samples in memory already; 0 if none was seen.
    """

    request: CacheRequest
    source: Any
    examples: dict[int, Any] = field(default_factory=dict)
    is_examined: bool = False
    bytes_in_memory: int = 0
    _behind: list[Any] = field(default_factory=list)  # the last sample that was looked at

    def __len__(self) -> int:
        return len(self.request.dataset)

    @property
    def fingerprint(self) -> Fingerprint | None:
        """Identifies the samples, and is the name of their cache in RAM; None if nothing does."""
        return self.request.fingerprint

    def examine(self) -> list[Any]:
        """Read a few samples, most of them twice, unless this was done before; see `probe`."""
        if not self.is_examined and len(self):
            self.examples = probe(self.source, look=self._look)
            self.is_examined = True
        return list(self.examples.values())

    def _look(self, sample: Any) -> None:
        """Find out if all samples are views of the same arrays, so that reading them costs nothing.

        Arrays over foreign memory do not count: a mapped file (np.memmap, torch.load) might not be in memory.
        """
        before, self._behind = self._behind, _arrays_behind(sample)
        whole_bytes = 0
        if len(before) == len(self._behind) and all(map(operator.is_, before, self._behind)):
            is_own = all(isinstance(each, np.ndarray) and each.base is None for each in before)
            whole_bytes = is_own * sum({id(each): each.nbytes for each in before}.values())
        sample_bytes = sum(leaf.nbytes for leaf in leaves(sample) if isinstance(leaf, np.ndarray))
        is_whole = whole_bytes >= _IN_MEMORY_SHARE * len(self) * max(1, sample_bytes)
        self.bytes_in_memory = whole_bytes if is_whole else 0


def pre_transformed(dataset: Any, function: Callable[..., Any]) -> MappedDataset:
    """A dataset whose samples pass through a deterministic function, as a transform is called."""
    caller = TransformCaller(function, role="pre_transform")
    return MappedDataset(dataset, functools.partial(_read_pre_transformed, caller), is_pre_transformed=True)


def _read_pre_transformed(caller: TransformCaller, dataset: Any, index: int) -> Any:
    sample = dataset[index]
    # A shallow copy for the note on an error, because `pre_transform` can modify the containers.
    before = copy.copy(sample) if isinstance(sample, (dict, list)) else sample
    return caller.call(before, sample, index)


def open_cache(cache: str | SampleCache | None, request: CacheRequest) -> OpenedCache:
    """The requested cache.

    Raises:
        NondeterministicDatasetError: A sample draws random numbers, or differs when it is read again.
        UnsupportedSampleError: A value in a sample cannot be cached.
        CacheMismatchError: The cache was made from other samples.
        ValueError: `cache` is not a valid description of a cache.
    """
    if isinstance(cache, str) and cache.startswith("ram:"):
        if request.max_memory != "auto":
            raise ValueError(f"cache={cache!r} sets a limit, and so does max_memory=: pass one of them")
        cache, request = "ram", dataclasses.replace(request, max_memory=check_cache(cache) or "auto")
    dataset, pre_transform = request.dataset, request.pre_transform
    check_memory(request.max_memory, name="max_memory")  # raises before anything is read
    check_key(request.key)
    source = dataset if pre_transform is None else pre_transformed(dataset, pre_transform)
    if cache is None:
        log.info("cache: none, every access reads the dataset")
        encoded = encoded_source(source)
        return OpenedCache(NoCache(len(dataset), "of cache=None"), encoded, encoded is not source)
    samples = _Samples(request, source)
    opened = _open_one(samples, cache)
    for index, sample in samples.examples.items():
        opened.put(index, sample)
    _report(opened, samples)
    return OpenedCache(opened, samples.source)


# --- the kinds of caches ---------------------------------------------------------------------------------


# To add a kind of cache, add its name, or its prefix, and what opens it.
def _open_one(samples: _Samples, cache: Any) -> SampleCache:
    if cache == "ram":
        return _ram_cache(samples)
    if isinstance(cache, str) and cache.startswith("lmdb:") and cache != "lmdb:":
        return _open_lmdb(samples, cache.removeprefix("lmdb:"))
    if isinstance(cache, LMDBCache):
        is_source = isinstance(samples.source, LMDBDataset) and samples.source.cache is cache
        return cache if is_source else _checked_lmdb(samples, cache)
    if isinstance(cache, str) or not isinstance(cache, SampleCache):
        is_location = isinstance(cache, str) and (
            cache.endswith(".lmdb") or os.path.exists(cache_path(cache, "cache"))
        )
        literal = json.dumps(f"lmdb:{cache}", ensure_ascii=False)  # the same text in Python
        hint = f"pass cache={literal} for the cache at this path" if is_location else _USAGE
        if cache == "ram-encoded":
            hint = (
                "to keep the files in RAM, cache fastload.ImageFolder(root, decode=False), and decode in "
                "transform= with fastload.decode_image"
            )
        if isinstance(cache, (list, tuple)):
            hint = "pass one of these: the system keeps in memory what it reads of a file, if there is room"
        raise ValueError(f"cache={cache!r} is not a cache: {hint}")
    samples.examine()
    if cache.num_samples != len(samples):
        raise CacheMismatchError(
            f"the cache was made for {cache.num_samples} samples, but the dataset has {len(samples)}: make a "
            "cache for this dataset"
        )
    return cache


def _open_lmdb(samples: _Samples, location: str) -> LMDBCache:
    """The cache at a path, which is built if it does not exist."""
    path = cache_path(location, "cache")
    if not os.path.lexists(path):
        return _build_lmdb(samples, path)
    if is_of_files(path):
        raise CacheMismatchError(
            f"{path} has decoded files, not samples: read it with fastload.DataLoader(dataset, "
            f"cache={f'lmdb:{path}'!r}), or use a different path for the samples of CachedDataset"
        )
    return _checked_lmdb(samples, opened_lmdb(path))


_USAGE = 'pass "ram", "ram:32G", "lmdb:PATH", None or a cache object'


# --- caches in RAM ---------------------------------------------------------------------------------------


def _ram_cache(samples: _Samples) -> SharedMemoryCache | NoCache:
    """The cache that another process holds, or a new one; none, with a warning, without shared memory."""
    reason = segment.why_unsupported()
    if reason is None:
        try:
            return _shared_cache(samples, samples.fingerprint)
        except SharedMemoryError as error:
            reason = str(error)
    samples.examine()
    reason = f"shared memory is not available: {reason}"
    log.warning('cache: none in RAM, because %s. cache="lmdb:PATH" needs no shared memory', reason)
    return NoCache(len(samples), reason)


def _shared_cache(samples: _Samples, shared_as: Fingerprint | None) -> SharedMemoryCache:
    """The cache that another process holds, or a new one."""
    max_memory = samples.request.max_memory
    why = why_private(samples.request.dataset, samples.request.pre_transform)
    reserved_bytes = reserve_bytes(max_memory)
    if shared_as is not None:
        why = "the registry of shared caches cannot be used"
        try:
            cache = shared.find(shared_as, len(samples))
            if cache is None:
                examples, max_bytes = samples.examine(), budget_bytes(max_memory, is_shared=True)
                cache = shared.create(shared_as, len(samples), examples, max_bytes, reserved_bytes)
        except CacheMismatchError as error:
            raise CacheMismatchError(
                f"{error}. If the cache is right, change the dataset. If the dataset is right, use a "
                "different key, or end the processes that hold the cache"
            ) from None
        if cache is not None:
            _check_first(cache, samples)
            return cache
    examples, max_bytes = samples.examine(), budget_bytes(max_memory, is_shared=False)
    cache = SharedMemoryCache(
        len(samples), examples, max_memory=max_bytes, fingerprint=shared_as, reserved_bytes=reserved_bytes
    )
    cache.reason = f"private to this process and its workers, because {why}"
    if count_ranks_of_host() > 1:
        say_once(f"cache: {cache.reason}. Each rank of this host decodes every sample and keeps its own copy")
    if shared_as is None:
        _warn_of_repetition(samples, why)
    return cache


def _warn_of_repetition(samples: _Samples, why: str) -> None:
    """Warn once if a cell of a notebook is run again, so that its samples are decoded again.

    The cell defines the class of its dataset anew, or makes another dataset of the same class and length.
    """
    cls = type(samples.request.dataset)
    name = cls.__module__, cls.__qualname__, len(samples)
    earlier = _private_classes.get(name)
    _private_classes[name] = weakref.ref(cls)
    is_run_again = earlier is not None and (earlier() is not cls or hasattr(sys, "ps1"))
    if is_run_again and "<locals>" not in cls.__qualname__:
        say_once(
            f"cache: a CachedDataset of {len(samples):,} samples of {cls.__qualname__} was made before in "
            f"this process, and this one decodes all of them again, because {why}. With the same cache_key=, "
            "a new CachedDataset takes the samples of the old one, while that lives"
        )


def _check_first(cache: SharedMemoryCache, samples: _Samples) -> None:
    """Compare two samples in a cache that other processes fill, the first and another, with the source."""

    def read(index: int) -> str | None:
        stored = cache.get(index)
        if stored is None:
            return None
        fresh = (
            samples.examples[index] if index in samples.examples else read_unnoticed(samples.source, index)
        )
        return first_difference(stored, fresh)

    compared = itertools.islice(readable(samples.source, read), _COMPARED)
    index, path = next((pair for pair in compared if pair[1] is not None), (0, None))
    if path is not None:
        reason = cache.reason
        cache.close()
        raise CacheMismatchError(
            f"sample {index} of the dataset differs at {path} from the one in the shared cache of the same "
            f"fingerprint ({reason}): the dataset has changed or is random, or its fingerprint() or key "
            "covers too little. Use a different key, or end the processes that hold that cache"
        )


# --- caches on disk --------------------------------------------------------------------------------------


def _checked_lmdb(samples: _Samples, cache: LMDBCache) -> LMDBCache:
    """The cache, after it was compared with the samples."""
    if samples.fingerprint is None or cache.description.parts is None:
        samples.examine()
    elif len(samples) and samples.fingerprint.needs_key:
        with contextlib.suppress(Exception):  # the source may have gone since the build
            samples.examples[0] = read_unnoticed(samples.source, 0)
    check_source(cache, Description.of(samples.source, samples.examples, samples.fingerprint))
    return cache


def _build_lmdb(samples: _Samples, path: str) -> LMDBCache:
    samples.examine()
    request = samples.request
    return build_lmdb(
        samples.source,
        path,
        num_workers=request.num_workers,
        progress=request.progress,
        probed=samples.examples,
        fingerprint=samples.fingerprint,
        on_error=request.on_error,
        max_errors=request.max_errors,
        wait=request.wait,
    )


# --- the report ------------------------------------------------------------------------------------------


def _report(cache: SampleCache, samples: _Samples) -> None:
    if not len(samples):
        log.info("cache: the dataset is empty")
        return
    needed = ""
    if samples.examples and cache.max_bytes is not None:
        examples = samples.examples.values()
        needed_bytes = sum(len(encode(sample)) for sample in examples) * len(samples) // len(examples)
        needed = f"; all take about {readable_size(needed_bytes)} of at most {readable_size(cache.max_bytes)}"
        is_own = not isinstance(cache, SharedMemoryCache) or cache.pid == os.getpid()
        if is_own and samples.bytes_in_memory:
            log.warning(
                "cache: the samples are in memory already, in an array of %s: a cache in RAM takes as "
                "much memory again and, with a transform, is no faster than the dataset. Give the "
                "loader a dataset that calls the transform itself, without CachedDataset",
                readable_size(samples.bytes_in_memory),
            )
    log.info("cache: %s%s", cache.explain().partition("\n")[0], needed)


def _arrays_behind(sample: Any) -> list[Any]:
    """The array that each part of a sample is a view of, or the part itself; numbers and texts are none."""
    found = []
    for leaf in leaves(sample):
        while isinstance(leaf, np.ndarray) and isinstance(leaf.base, np.ndarray):
            leaf = leaf.base
        if not isinstance(leaf, (*_VALUES, np.generic, type(None))):
            found.append(leaf)
    return found
