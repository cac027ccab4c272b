"""Opens the requested cache: finds it, builds it or makes it, and logs the decision.

Rules:

1. A dataset without fingerprint and key is examined before anything is stored: is it random, and what is the
   structure of its samples? Its cache in RAM is private. A dataset with a fingerprint is examined by the
   process that makes its cache.
2. A process that attaches to a cache filled by other processes reads sample 0 from the source and compares
   it. Only this check can detect a key used twice or a fingerprint that covers too little.
3. The decision is logged in one line, with numbers.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.cache import random_check, ranks
from fastload.cache.build.build import build_lmdb
from fastload.cache.build.plan import check_source
from fastload.cache.encoded import decode_images, decoded_nbytes, encoded_source, holds_images
from fastload.cache.format.codecs import SOURCE
from fastload.cache.format.fingerprint import (
    Fingerprint,
    check_key,
    fingerprint_of,
    has_own_fingerprint,
    why_private,
)
from fastload.cache.format.record import encode
from fastload.cache.format.sample_cache import SampleCache
from fastload.cache.in_memory import held_bytes
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.cache.ram import sharing
from fastload.cache.ram.arena import log_short
from fastload.cache.ram.private import PrivateCache
from fastload.cache.ram.shared import SharedMemoryCache
from fastload.cache.sources import StoredSamples, decoded_source
from fastload.cache.tiers import Stack, split_budget
from fastload.errors import CacheBusyError, CacheMismatchError, SharedMemoryError
from fastload.files.file_systems import is_url, local_path
from fastload.memory import segment
from fastload.nested.tree import first_difference, structure_of
from fastload.system.budget import available_bytes, check_memory, parse_memory
from fastload.system.humanize import readable_size
from fastload.system.logs import log, say_once

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LMDB_PREFIX = "lmdb:"
_BUSY_POLL_S = 0.2
_BUSY_LOG_POLLS = 50
_USAGE = (
    'pass "ram", "lmdb:PATH", ["ram", "lmdb:PATH"], "ram-encoded", ["ram", "ram-encoded"], None or a cache '
    "object"
)
_ENCODED = "ram-encoded"
_MEASURED = 64  # samples whose sizes decide how memory is split between decoded and undecoded ones


@dataclass
class Opener:
    """Opens the caches of one dataset; the arguments are those of CachedDataset and its `build`.

    Attributes:
        source: The dataset after its deterministic part; its samples are cached.
        holds_images: Whether samples can hold undecoded images.
        jpegs: The cache in use, if its images are jpegs, decoded on every access.
        examples: Samples that were already read from the source, by index.
    """

    dataset: Any
    pre_transform: Callable[..., Any] | None
    key: str | None
    max_memory: str | float = "auto"
    num_workers: int | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        check_memory(self.max_memory, name="max_memory")  # raises before anything is read
        self.holds_images = False
        self.jpegs: LMDBCache | StoredSamples | None = None
        self.source = decoded_source(self.dataset, self.pre_transform)
        check_key(self.key)
        self.examples: dict[int, Any] = {}
        self._num_samples = len(self.dataset)
        self._is_examined = False
        self._held_bytes = 0  # of an array that holds the samples in memory already

    @functools.cached_property
    def fingerprint(self) -> Fingerprint | None:
        """Identifies the samples, or None; computed on demand: a folder calls stat for each file."""
        return fingerprint_of(self.dataset, key=self.key, pre_transform=self.pre_transform)

    @functools.cached_property
    def shared_as(self) -> Fingerprint | None:
        """The fingerprint under which other processes find the cache in RAM; None if it is private."""
        return self.fingerprint if self.key is not None or has_own_fingerprint(self.dataset) else None

    def _use_encoded_source(self, asked: str) -> None:
        """Make the source return undecoded images.

        Raises:
            ValueError: The dataset has none, or `pre_transform` needs decoded ones.
        """
        if self.pre_transform is not None:
            raise ValueError(
                f"{asked} stores images before they are decoded, but pre_transform= works on decoded ones: "
                "omit pre_transform=, and do this in transform="
            )
        self.source = encoded_source(self.dataset)
        self.holds_images = True
        self.fingerprint = None if self.fingerprint is None else self.fingerprint.of_encoded()
        example = random_check.read_unnoticed(self.source, 0) if self._num_samples else None
        if example is not None and not holds_images(example):
            raise ValueError(
                f"{asked} needs samples with undecoded images, but {type(self.dataset).__name__}[0] is "
                f"{structure_of(example)}: return fastload.EncodedImage(path) instead of the decoded array, "
                "or use fastload.ImageFolder"
            )

    def open(self, cache: str | SampleCache | Sequence[str | SampleCache] | None) -> SampleCache:
        """The requested cache, or tiers of caches.

        Raises:
            NondeterministicDatasetError: Reading a sample twice gave different results.
            UnsupportedSampleError: A value in a sample cannot be cached.
            CacheMismatchError: The cache was made from other samples.
            ValueError: `cache` is not a valid description of a cache.
        """
        if cache is None:
            if self.pre_transform is None:
                self.source = encoded_source(self.dataset, is_needed=False)
                self.holds_images = True
            log.info("cache: none, every access reads the dataset")
            return Stack(self._num_samples)
        opened = self._open_tiers(cache) if isinstance(cache, (list, tuple)) else self._open_one(cache)
        if isinstance(opened, (LMDBCache, StoredSamples)) and opened.description.codec == "jpeg":
            self.jpegs, self.holds_images = opened, True
        for index, sample in self.examples.items():
            opened.put(index, sample)
        self._report(opened)
        return opened

    def _open_tiers(self, tiers: Sequence[Any]) -> SampleCache:
        if len(tiers) != 2 or tiers[0] != "ram" or tiers[1] == "ram":
            raise ValueError(f"cache={tiers!r} is not a valid pair of caches: {_USAGE}")
        if tiers[1] == _ENCODED:
            return self._open_decoded_and_encoded()
        slow = self._open_one(tiers[1])
        if self.shared_as is None and isinstance(slow, LMDBCache) and slow.stored_indices is None:
            # The file identifies its samples, so ranks that read it share the samples that they keep in RAM.
            self.shared_as = fingerprint_of(StoredSamples(slow))
        return Stack(self._num_samples, [self._open_ram()], slow)

    def _open_one(self, cache: Any) -> SampleCache:
        url = None
        if isinstance(cache, str) and cache.startswith(_LMDB_PREFIX) and len(cache) > len(_LMDB_PREFIX):
            path = cache.removeprefix(_LMDB_PREFIX)
            if is_url(path):
                url = path  # a local copy, never built here
            else:
                path = os.path.abspath(os.path.expanduser(local_path(path)))
                if not os.path.lexists(path):
                    return self._build_lmdb(path)
            cache = LMDBCache(path, progress=self.progress)
        if isinstance(cache, LMDBCache):
            if cache.description.codec == SOURCE:
                self._use_encoded_source(url or cache.path)
            if self.fingerprint is None or cache.description.parts is None:
                self._examine()
            first = self.examples.get(0)
            check_source(cache, self._num_samples, first, fingerprint=self.fingerprint, url=url)
            if url is not None:
                cache.reason = f"{cache.reason}; the local copy of {url}"
            return cache
        if cache in ("ram", _ENCODED):
            if cache == _ENCODED:
                self._use_encoded_source('cache="ram-encoded"')
            return self._open_ram()
        if isinstance(cache, str) or not isinstance(cache, SampleCache):
            is_place = isinstance(cache, str) and (is_url(cache) or os.path.exists(os.path.expanduser(cache)))
            hint = f'pass cache="{_LMDB_PREFIX}{cache}" for the cache at this path' if is_place else _USAGE
            raise ValueError(f"cache={cache!r} is not a cache: {hint}")
        if isinstance(cache, StoredSamples) and self.dataset is cache:
            self.holds_images = cache.description.codec == SOURCE
            return cache
        self._examine()
        if cache.num_samples != self._num_samples:
            raise CacheMismatchError(
                f"the cache was made for {cache.num_samples} samples, but the dataset has "
                f"{self._num_samples}: make a cache for this dataset"
            )
        return cache

    def _open_decoded_and_encoded(self) -> SampleCache:
        """The tiers of `["ram", "ram-encoded"]`."""
        decoded = copy.copy(self)
        decoded.fingerprint = self.fingerprint
        self._use_encoded_source('cache=["ram", "ram-encoded"]')
        self._examine()
        if self._num_samples:
            chosen = np.linspace(0, self._num_samples - 1, min(self._num_samples, _MEASURED)).astype(int)
            samples = [random_check.read_unnoticed(self.source, int(index)) for index in chosen]
            encoded_bytes = sum(len(encode(sample)) for sample in samples) / len(samples)
            decoded_bytes = sum(decoded_nbytes(sample) for sample in samples) / len(samples)
            max_bytes = self._ram_bytes(is_shared=self.shared_as is not None)
            budgets = split_budget(max_bytes, self._num_samples, decoded_bytes, encoded_bytes)
            decoded.max_memory, self.max_memory = budgets
        decoded.examples = {index: decode_images(sample) for index, sample in self.examples.items()}
        decoded._is_examined = True
        stores = decoded._open_ram(), self._open_ram()
        for cache in stores:
            if isinstance(cache, SharedMemoryCache):
                cache.expect_short()  # what does not fit into one of them can fit into the other
        return Stack(self._num_samples, stores)

    def _open_ram(self) -> SampleCache:
        reason = segment.why_unsupported()
        if reason is None:
            try:
                return self._open_shared()
            except SharedMemoryError as error:
                reason = str(error)
        self._examine()
        max_bytes = self._ram_bytes(is_shared=False)
        log.warning(
            "cache: shared memory is not available: %s. Each process decodes every sample and keeps its own "
            'copy, of up to %s; cache="lmdb:PATH" is shared',
            reason,
            readable_size(max_bytes),
        )
        return PrivateCache(self._num_samples, max_bytes, reason)

    def _open_shared(self) -> SharedMemoryCache:
        """The cache that another process holds, or a new one."""
        if self.shared_as is None:
            why = why_private(self.dataset, self.pre_transform)
        elif (found := self._open_registered(self.shared_as)) is not None:
            return found
        else:
            why = "the registry of shared caches cannot be used"
        self._examine()
        cache = SharedMemoryCache(
            self._num_samples,
            self._examples(),
            max_memory=self._ram_bytes(is_shared=False),
            fingerprint=self.shared_as,
        )
        cache.reason = f"private to this process and its workers, because {why}"
        if ranks.of_host() > 1:
            say_once(
                f"cache: {cache.reason}. Each rank of this host decodes every sample and keeps its own copy"
            )
        return cache

    def _open_registered(self, fingerprint: Fingerprint) -> SharedMemoryCache | None:
        """The cache of this name, new or not; None without a registry of shared caches."""
        try:
            cache = sharing.find(fingerprint, self._num_samples)
            if cache is None:
                self._examine()
                max_bytes = self._ram_bytes(is_shared=True)
                cache = sharing.create(fingerprint, self._num_samples, self._examples(), max_bytes)
        except CacheMismatchError as error:
            raise CacheMismatchError(
                f"{error}. If the cache is right, change the dataset. If the dataset is right, use a "
                "different key, or end the processes that hold the cache"
            ) from None
        if cache is not None:
            self._compare_first(cache)
        return cache

    def _examples(self) -> list[Any]:
        return list(self.examples.values())

    def _ram_bytes(self, *, is_shared: bool) -> int:
        """The limit for a cache in RAM; a private one gets this rank's share of the free memory."""
        free_bytes = available_bytes() // (1 if is_shared else ranks.of_host())
        return max(1, min(parse_memory(self.max_memory, available=free_bytes), free_bytes))

    def _compare_first(self, cache: SharedMemoryCache) -> None:
        stored = cache.get(0) if self._num_samples else None
        if stored is None:
            return
        fresh = self.examples[0] if 0 in self.examples else random_check.read_unnoticed(self.source, 0)
        path = first_difference(stored, fresh)
        if path is not None:
            reason = cache.reason
            cache.close()
            raise CacheMismatchError(
                f"sample 0 of the dataset differs at {path} from the one in the shared cache of the same "
                f"fingerprint ({reason}): the dataset has changed or is random, or its fingerprint() or key "
                "covers too little. Use a different key, or end the processes that hold that cache"
            )

    def _build_lmdb(self, path: str) -> LMDBCache:
        self._examine()
        for attempt in itertools.count():
            try:
                return build_lmdb(
                    self.source,
                    path,
                    num_workers=self.num_workers,
                    progress=self.progress,
                    probed=self.examples,
                    fingerprint=self.fingerprint,
                )
            except CacheBusyError as error:
                # Ranks start together and all request the same file: one rank builds it, the others wait.
                if not ranks.are_several():
                    raise
                if attempt % _BUSY_LOG_POLLS == 0:
                    log.info("cache: waiting: %s", str(error))  # the error would keep this frame alive
            time.sleep(_BUSY_POLL_S)
        raise AssertionError("the count has no end")

    def _examine(self) -> None:
        """Read the first, the middle and the last sample, two of them twice, unless this was done before."""
        if self._is_examined or not self._num_samples:
            return
        last = self._num_samples - 1
        indices = list(dict.fromkeys([0, self._num_samples // 2, last]))
        self.examples = random_check.probe(self.source, indices, [0, last], look=self._look)
        self._is_examined = True

    def _look(self, sample: Any) -> None:
        self._held_bytes = held_bytes(sample, self._num_samples)

    def _report(self, cache: SampleCache) -> None:
        num_samples, max_bytes = self._num_samples, cache.max_bytes
        if not num_samples:
            log.info("cache: the dataset is empty")
            return
        figures = f"{cache.num_cached:,} of {num_samples:,} samples cached in {readable_size(cache.nbytes)}"
        stores = cache.stores if isinstance(cache, Stack) else [cache]
        if self.examples and max_bytes is not None:
            sample_bytes = sum(len(encode(sample)) for sample in self._examples()) / len(self.examples)
            needed = f"about {readable_size(sample_bytes * num_samples)}"
            fit = getattr(stores[0], "capacity", None) if len(stores) == 1 else None
            if fit is None:
                fit = min(num_samples, int(max_bytes / max(1, sample_bytes)))
            figures = f"{fit:,} of {num_samples:,} samples fit, {needed} needed"
            is_own = not isinstance(stores[0], SharedMemoryCache) or stores[0].origin.pid == os.getpid()
            if is_own and self._held_bytes:
                log.warning(
                    "cache: the samples are in memory already, in an array of %s: a cache in RAM takes as "
                    "much memory again and, with a transform, is no faster than the dataset. Give the "
                    "loader a dataset that calls the transform itself, without CachedDataset",
                    readable_size(self._held_bytes),
                )
            if is_own and fit < num_samples and cache.layout != "ragged":  # such a cache says it itself
                log_short(max_bytes, fit, num_samples, f"which need {needed}")
                if isinstance(stores[0], SharedMemoryCache):
                    stores[0].expect_short()
        log.info(
            "cache: %s layout, %s, at most %s; %s",
            cache.layout,
            figures,
            "none" if max_bytes is None else readable_size(max_bytes),
            cache.explain().partition("\n")[0],
        )
