"""Opens the cache that a user asked for: finds it, builds it or makes it, and logs the decision.

Rules:

1. A dataset without fingerprint and key is examined before anything is stored: is it random, and what is the
   structure of its samples? A dataset with a fingerprint is examined by the process that makes its cache.
2. A process that attaches to a cache that other processes filled reads sample 0 from the source and compares
   it. Only this check can detect a key that is used twice or a fingerprint that covers too little.
3. The decision is logged in one line, with numbers.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from fastload.cache import random_check, ranks
from fastload.cache.build.build import build_lmdb, check_source
from fastload.cache.fingerprint import fingerprint_of, without_fingerprint
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.cache.ram import registry
from fastload.cache.ram.private import PrivateCache
from fastload.cache.ram.shared import SharedMemoryCache
from fastload.cache.record import encode
from fastload.cache.sample_cache import SampleCache
from fastload.cache.sources import PreparedDataset, StoredSamples
from fastload.cache.tiered import TieredCache
from fastload.errors import CacheBusyError, CacheMismatchError, SegmentError
from fastload.memory import segment
from fastload.nested.tree import first_difference
from fastload.system.budget import available_bytes, parse_budget
from fastload.system.logs import log
from fastload.system.sizes import readable_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LMDB_PREFIX = "lmdb:"
_BUSY_POLL_S = 0.2
_BUSY_LOG_S = 10.0
_USAGE = 'give "ram", "lmdb:PATH", ["ram", "lmdb:PATH"] or a cache object'


class Request(NamedTuple):
    """The user's arguments for a cache; see CachedDataset."""

    dataset: Any
    prepare: Callable[..., Any] | None
    key: str | None
    budget: str | float
    num_workers: int | None
    progress: bool


class Opener:
    """Opens the caches of one dataset.

    Args:
        request: The user's arguments.

    Attributes:
        source: The dataset after its deterministic part; its samples are cached.
        fingerprint: Of these samples; None without a fingerprint() and a key.
        examples: Samples that were already read from the source, by index.
    """

    def __init__(self, request: Request) -> None:
        dataset = request.dataset
        self._request = request
        self._allowed_bytes = parse_budget(request.budget)
        self.source = dataset if request.prepare is None else PreparedDataset(dataset, request.prepare)
        self.fingerprint = fingerprint_of(dataset, key=request.key, prepare=request.prepare)
        self.examples: dict[int, Any] = {}
        self._num_samples = len(dataset)
        self._is_examined = False

    def open(self, cache: str | SampleCache | Sequence[str | SampleCache]) -> SampleCache:
        """The cache, or the tiers of caches, that the user asked for.

        Raises:
            RandomDatasetError: Two readings of one sample differ.
            UnsupportedSampleError: A value in a sample cannot be cached.
            CacheMismatchError: The cache was made from other samples.
            ValueError: `cache` is not a valid description of a cache.
        """
        opened = self._open_tiers(cache) if isinstance(cache, (list, tuple)) else self._open_one(cache)
        for index, sample in self.examples.items():
            opened.put(index, sample)
        self._report(opened)
        return opened

    def _open_tiers(self, tiers: Sequence[Any]) -> SampleCache:
        if len(tiers) != 2 or tiers[0] != "ram" or tiers[1] == "ram":
            raise ValueError(f"cache={tiers!r} is not a cache in RAM followed by one on disk: {_USAGE}")
        slow = self._open_one(tiers[1])
        if self.fingerprint is None and isinstance(slow, LMDBCache) and slow.stored_indices is None:
            # The file identifies its samples, so ranks that read it share the samples that they keep in RAM.
            self.fingerprint = fingerprint_of(StoredSamples(slow))
        return TieredCache(self._open_ram(), slow)

    def _open_one(self, cache: Any) -> SampleCache:
        if isinstance(cache, str) and cache.startswith(_LMDB_PREFIX) and len(cache) > len(_LMDB_PREFIX):
            return self._open_lmdb(os.path.expanduser(cache.removeprefix(_LMDB_PREFIX)))
        if cache == "ram":
            return self._open_ram()
        if isinstance(cache, str) or not isinstance(cache, SampleCache):
            raise ValueError(f"cache={cache!r} is not a cache: {_USAGE}")
        if isinstance(cache, StoredSamples) and cache is self._request.dataset:
            return cache
        self._examine()
        if isinstance(cache, LMDBCache):
            check_source(cache, self._num_samples, self.examples.get(0), fingerprint=self.fingerprint)
        elif cache.num_samples != self._num_samples:
            raise CacheMismatchError(
                f"the cache was made for {cache.num_samples} samples, but the dataset has "
                f"{self._num_samples}: make a cache for this dataset"
            )
        return cache

    # --- in RAM -------------------------------------------------------------------------------------------

    def _open_ram(self) -> SampleCache:
        reason = segment.why_unsupported()
        if reason is None:
            try:
                return self._open_shared()
            except SegmentError as error:
                reason = str(error)
        self._examine()
        budget_bytes = self._ram_bytes()
        log.warning(
            "cache: shared memory is not available: %s. Each process decodes every sample and keeps its own "
            'copy, of up to %s; cache="lmdb:PATH" is shared',
            reason,
            readable_size(budget_bytes),
        )
        return PrivateCache(self._num_samples, budget=budget_bytes, reason=reason)

    def _open_shared(self) -> SharedMemoryCache:
        if self.fingerprint is None:
            self._examine()
            return self._private_ram()
        cache = registry.find(self.fingerprint, self._num_samples)
        if cache is None:
            self._examine()
            examples = list(self.examples.values())
            cache = registry.create(self.fingerprint, self._num_samples, examples, self._ram_bytes())
            if cache.unregister is None:
                self._warn_ranks(cache.reason)
        self._compare_first(cache)
        return cache

    def _private_ram(self) -> SharedMemoryCache:
        cache = SharedMemoryCache(self._num_samples, list(self.examples.values()), budget=self._ram_bytes())
        why = without_fingerprint(self._request.dataset, self._request.prepare)
        cache.reason = (
            f"private to this process and its workers, because {why}, to share with other ranks and jobs"
        )
        self._warn_ranks(cache.reason)
        return cache

    def _warn_ranks(self, reason: str) -> None:
        """Warn that a cache is private, if several ranks would each decode all samples and keep a copy."""
        if ranks.are_several():
            log.warning("cache: %s", reason)

    def _ram_bytes(self) -> int:
        return max(1, min(self._allowed_bytes, available_bytes()))

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
                f"fingerprint ({reason}): the dataset was changed, or is random, or its fingerprint() or key "
                "covers too little. Give another key, or end the processes that hold that cache"
            )

    # --- on disk ------------------------------------------------------------------------------------------

    def _open_lmdb(self, path: str) -> LMDBCache:
        if self.fingerprint is None or not os.path.exists(path):
            self._examine()
        builder, said_at_s = "", 0.0
        while True:
            try:
                return build_lmdb(
                    self.source,
                    path,
                    num_workers=self._request.num_workers,
                    progress=self._request.progress,
                    probed=self.examples,
                    fingerprint=self.fingerprint,
                )
            except CacheBusyError as error:
                # Ranks start together and all request the same file: one rank builds it, the others wait.
                if not ranks.are_several():
                    raise
                if str(error) != builder or time.monotonic() - said_at_s >= _BUSY_LOG_S:
                    builder, said_at_s = str(error), time.monotonic()
                    log.info("cache: waiting: %s", builder)
            time.sleep(_BUSY_POLL_S)

    # --- both ---------------------------------------------------------------------------------------------

    def _examine(self) -> None:
        """Read the first, the middle and the last sample, two of them twice, unless this was done before."""
        if self._is_examined or not self._num_samples:
            return
        last = self._num_samples - 1
        indices = list(dict.fromkeys([0, self._num_samples // 2, last]))
        self.examples = random_check.probe(self.source, indices, rechecked=[0, last])
        self._is_examined = True

    def _report(self, cache: SampleCache) -> None:
        num_samples, budget_bytes = self._num_samples, cache.budget_bytes
        if not num_samples:
            log.info("cache: the dataset is empty")
            return
        if self.examples and budget_bytes is not None:
            needed = sum(len(encode(sample)) for sample in self.examples.values()) / len(self.examples)
            needed_bytes = max(1.0, needed * num_samples)
            fit = getattr(cache, "capacity", None)
            if fit is None:
                fit = int(num_samples * min(1.0, budget_bytes / needed_bytes))
            figures = f"{fit:,} of {num_samples:,} samples fit, about {readable_size(needed_bytes)} needed"
        else:
            size = readable_size(cache.nbytes)
            figures = f"{cache.num_cached:,} of {num_samples:,} samples cached in {size}"
        log.info(
            "cache: %s layout, %s, budget %s; %s",
            cache.layout,
            figures,
            "none" if budget_bytes is None else readable_size(budget_bytes),
            cache.explain().partition("\n")[0],
        )
