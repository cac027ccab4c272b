"""Opens the requested cache: finds it, builds it or makes it, and logs the decision in one line.

Rules:

1. A dataset without fingerprint and key is examined before anything is stored: is it random, and what is the
   structure of its samples? Its cache in RAM is private. A dataset with a fingerprint is examined by the
   process that makes its cache.
2. A process that attaches to a cache filled by other processes reads sample 0 and one in the middle from the
   source, and compares them. Only this check can detect a key used twice, an edited `__getitem__`, or a
   fingerprint that covers too little.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastload.cache.build import build_lmdb, compared, first_differing
from fastload.cache.fingerprint import Fingerprint, check_key, fingerprint_of, why_private
from fastload.cache.finished import LMDBCache
from fastload.cache.ram import shared
from fastload.cache.ram.shared import SharedMemoryCache
from fastload.cache.random_check import probe
from fastload.cache.records import encode
from fastload.cache.sample_cache import NoCache, SampleCache
from fastload.cache.sources import MappedDataset, encoded_source
from fastload.cache.transform import TransformCaller
from fastload.errors import CacheMismatchError, SharedMemoryError
from fastload.memory import segment
from fastload.readers.request import DISK, check_cache
from fastload.system.budget import check_memory
from fastload.system.cached_property import cached_property
from fastload.system.humanize import readable_size
from fastload.system.logs import log, say_once
from fastload.system.ranks import count_ranks_of_host

if TYPE_CHECKING:
    from collections.abc import Callable

_COMPARED = 2  # samples of a shared cache, in each process that opens it


@dataclass(eq=False)
class _Samples:
    """The samples to cache, and what is known of them.

    Attributes:
        dataset: Of the user.
        pre_transform: Of the user.
        key: Of the user.
        source: The dataset after its deterministic part.
        examples: Samples that were read from the source by `examine`, by index.
    """

    dataset: Any
    pre_transform: Callable[..., Any] | None
    key: str | None
    source: Any
    examples: dict[int, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.dataset)

    @cached_property
    def fingerprint(self) -> Fingerprint | None:
        """Identifies the samples, or None; computed on demand: a folder calls stat for each file."""
        return fingerprint_of(self.dataset, key=self.key, pre_transform=self.pre_transform)

    def examine(self) -> dict[int, Any]:
        """The `examples`; reads them, most of them twice, unless this was done before; see `probe`."""
        if not self.examples and len(self):
            self.examples = probe(self.source)
        return self.examples


def pre_transformed(dataset: Any, function: Callable[..., Any]) -> MappedDataset:
    """A dataset whose samples pass through a deterministic function, as a transform is called."""
    caller = TransformCaller(function, role="pre_transform")
    return MappedDataset(dataset, functools.partial(_read_pre_transformed, caller), is_pre_transformed=True)


def _read_pre_transformed(caller: TransformCaller, dataset: Any, index: int) -> Any:
    sample = dataset[index]
    # A shallow copy for the note on an error, because `pre_transform` can modify the containers.
    before = copy.copy(sample) if isinstance(sample, (dict, list)) else sample
    return caller.call(before, sample, index)


def open_cache(
    cache: str | SampleCache | None,
    dataset: Any,
    pre_transform: Callable[..., Any] | None,
    key: str | None,
    max_memory: str | float = "auto",
    **options: Any,
) -> tuple[SampleCache, Any, bool]:
    """The requested cache, and how a CachedDataset reads what it does not hold.

    Args:
        cache: As of CachedDataset, as are all that follow.
        dataset: Map-style.
        pre_transform: The deterministic part.
        key: The name of the samples.
        max_memory: The limit in RAM.
        options: Of `build_lmdb`, if a file is built.

    Returns:
        The cache; the dataset after its deterministic part; whether it has undecoded images.

    Raises:
        NondeterministicDatasetError: A sample draws random numbers, or differs when it is read again.
        UnsupportedSampleError: A value in a sample cannot be cached.
        CacheMismatchError: The cache was made from other samples.
        ValueError: `cache` is not a valid description of a cache.
    """
    check_memory(max_memory, name="max_memory")  # raises before anything is read
    check_key(key)
    place = cache if isinstance(cache, SampleCache) else check_cache(cache)
    source = dataset if pre_transform is None else pre_transformed(dataset, pre_transform)
    if place is None:
        log.info("cache: none, every access reads the dataset")
        encoded = encoded_source(source)
        return NoCache(len(dataset), "of cache=None"), encoded, encoded is not source
    samples = _Samples(dataset, pre_transform, key, source)
    if isinstance(place, SampleCache):
        opened = _given(samples, place)
    elif place.startswith(DISK):
        opened = build_lmdb(source, place.removeprefix(DISK), fingerprint=samples.fingerprint, **options)
    elif "auto" in (place, max_memory):
        opened = _ram_cache(samples, max_memory if place == "auto" else place)
    else:
        raise ValueError(f"cache={cache!r} sets a limit, and so does max_memory=: pass one of them")
    for index, sample in samples.examples.items():
        opened.put(index, sample)
    needed = ""
    if samples.examples and opened.max_bytes is not None:
        needed_bytes = sum(len(encode(sample)) for sample in samples.examples.values())
        needed = readable_size(needed_bytes * len(samples) // len(samples.examples))
        needed = f"; all take about {needed} of at most {readable_size(opened.max_bytes)}"
    log.info("cache: %s%s", opened.explain().partition("\n")[0], needed)
    return opened, source, False


def _given(samples: _Samples, cache: SampleCache) -> SampleCache:
    if isinstance(cache, LMDBCache):
        is_source = samples.source is cache
        return cache if is_source else compared(cache, samples.source, {}, samples.fingerprint)
    samples.examine()
    if cache.num_samples != len(samples):
        raise CacheMismatchError(
            f"the cache was made for {cache.num_samples} samples, but the dataset has {len(samples)}: make a "
            "cache for this dataset"
        )
    changed = first_differing(cache, samples.source, samples.examples, _COMPARED)
    if changed is not None:
        raise CacheMismatchError(f"{changed} from the one in the cache: make a cache for this dataset")
    return cache


# --- caches in RAM ---------------------------------------------------------------------------------------


def _ram_cache(samples: _Samples, max_memory: str | float) -> SampleCache:
    """The cache that another process holds, or a new one; none, with a warning, without shared memory."""
    reason = segment.why_unsupported()
    if reason is None:
        try:
            return _shared_cache(samples, max_memory)
        except SharedMemoryError as error:
            reason = str(error)
    samples.examine()
    reason = f"shared memory is not available: {reason}"
    log.warning('cache: none in RAM, because %s. cache="lmdb:PATH" needs no shared memory', reason)
    return NoCache(len(samples), reason)


def _shared_cache(samples: _Samples, max_memory: str | float) -> SharedMemoryCache:
    """The cache that another process holds, or a new one."""
    fingerprint = samples.fingerprint
    if fingerprint is None:
        why = why_private(samples.dataset, samples.pre_transform)
    else:
        why = "the registry of shared caches cannot be used"
        try:
            cache = shared.find(fingerprint, len(samples))
            if cache is None:
                cache = shared.create(fingerprint, len(samples), samples.examine(), max_memory)
            changed = cache and first_differing(cache, samples.source, samples.examples, _COMPARED)
            if cache is not None and changed is not None:
                cache.close()
                raise CacheMismatchError(
                    f"{changed} from the one in the shared cache of the same fingerprint ({cache.reason}): "
                    "the dataset has changed or is random, or its fingerprint() or key covers too little"
                )
        except CacheMismatchError as error:
            raise CacheMismatchError(
                f"{error}. If the cache is right, change the dataset. If the dataset is right, use a "
                "different key, or end the processes that hold the cache"
            ) from None
        if cache is not None:
            return cache
    examples = [*samples.examine().values()]
    cache = SharedMemoryCache(len(samples), examples, max_memory=max_memory, fingerprint=fingerprint)
    cache.reason = f"private to this process and its workers, because {why}"
    if count_ranks_of_host() > 1:
        say_once(f"cache: {cache.reason}. Each rank of this host decodes every sample and keeps its own copy")
    return cache
