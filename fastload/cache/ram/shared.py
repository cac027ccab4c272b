"""SharedMemoryCache: decodes each sample once, into one segment of anonymous memory that all processes share.

The parent makes it; the parent and its workers of every start method use it, because the cache pickles as a
handle. Other ranks and jobs of the same user find a cache that has a fingerprint (see `registry`). The
segment (see `layout`) is sparse, so memory is allocated as samples are stored, and sealed, so its size never
changes. `arena` reads and stores samples. Rules:

1. Nothing is evicted: with a new permutation in each epoch, no policy beats a fixed subset.
2. The memory is freed when the last process that holds the segment ends, however it ends.
"""

from __future__ import annotations

import contextlib
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.cache.format.sample_cache import BaseCache
from fastload.cache.ram import registry
from fastload.cache.ram.arena import Arena
from fastload.cache.ram.layout import Layout, Origin, create
from fastload.errors import CacheMismatchError, SharedMemoryError
from fastload.memory.segment import Segment, is_for_other_machines
from fastload.nested.spec import flatten
from fastload.system.budget import parse_memory
from fastload.system.humanize import readable_size
from fastload.system.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from fastload.cache.format.columns import Allocate
    from fastload.cache.format.fingerprint import Fingerprint
    from fastload.cache.format.sample_cache import SampleCache
    from fastload.cache.ram.registry import Entry


class SharedMemoryCache(BaseCache):
    """A cache of samples in shared memory.

    Args:
        num_samples: Number of samples of the dataset.
        examples: A few samples that are typical of the dataset, or none; they are not stored.
        max_memory: The limit, as in `parse_memory`.
        fingerprint: Of the samples, if other processes should find the cache.

    Attributes:
        layout: `"uniform"` (columns, and ragged records for samples that do not match) or `"ragged"`.
        capacity: How many uniform samples fit; None for ragged samples, whose sizes are unknown.
        origin: Which process made it, when, and from which samples.

    Raises:
        SharedMemoryError: The memory, or the lock that ragged samples need, is not available.
        UnsupportedSampleError: A value in an example cannot be cached.
        ValueError: `parse_memory` does not accept `max_memory`.
    """

    # Attributes of the class, because the properties of SampleCache with these names cannot be set.
    num_samples, max_bytes, layout = 0, 0, "ragged"
    capacity: int | None
    _arena: Arena

    def __init__(
        self,
        num_samples: int,
        examples: Sequence[Any] = (),
        *,
        max_memory: str | float = "auto",
        fingerprint: Fingerprint | None = None,
    ) -> None:
        made = create(num_samples, parse_memory(max_memory), examples, Origin.new(fingerprint))
        self._hold(Arena(*made))

    @classmethod
    def attach(cls, segment: Segment) -> SharedMemoryCache:
        """The cache in a segment; the cache owns the segment from here on, and closes it if this fails.

        Raises:
            CacheMismatchError: The segment is not a cache of this format version, or its size could change.
        """
        try:
            layout = Layout.read(segment)
        except CacheMismatchError:
            segment.close()
            raise
        return _attached(segment, layout)

    def _hold(self, arena: Arena) -> None:
        self._arena = arena
        layout = arena.plan
        self.num_samples, self.max_bytes = layout.num_samples, layout.max_bytes
        is_ragged = layout.spec is None
        self.layout, self.capacity = ("ragged", None) if is_ragged else ("uniform", layout.rows)
        self.origin = layout.origin
        self.reason = "it is private to this process and its workers"
        self.unregister: Callable[[], object] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if is_for_other_machines():
            return _of_this_machine, (registry.entry_of("", self._fd), self._arena.plan)
        return _attached, (self._arena.segment, self._arena.plan)

    # --- properties ---------------------------------------------------------------------------------------

    @property
    def _fd(self) -> int:
        """A descriptor of the cache in this process; -1 once closed."""
        return self._arena.segment.fd

    def explain(self) -> str:
        """Why this cache is in use, and the parts of its fingerprint."""
        fingerprint = self.origin.fingerprint
        named = {} if fingerprint is None else dict(fingerprint.parts)
        if fingerprint is not None and fingerprint.key is not None:
            named = {"cache_key": fingerprint.key, **named}
        parts = "".join(f"\n  {k}: {v}" for k, v in named.items())
        held = f"{self.num_cached:,} of {self.num_samples:,} samples, {readable_size(self.nbytes)}"
        return f"shared memory, {held}: {self.reason}{parts}"

    def missing(self) -> npt.NDArray[np.intp]:
        """Indices of missing samples that fit, ascending; the first ones if not all fit."""
        return self._arena.missing()

    @property
    def num_cached(self) -> int:
        """How many samples are stored now."""
        return self._arena.num_cached

    @property
    def nbytes(self) -> int:
        """Memory in use now, by all processes together."""
        return self._arena.nbytes

    def expect_short(self) -> None:
        """Keep all processes from warning that the cache cannot hold all samples."""
        self._arena.expect_short()

    # --- reading ------------------------------------------------------------------------------------------

    def __contains__(self, index: object) -> bool:
        if not isinstance(index, (int, np.integer)) or not 0 <= index < self.num_samples:
            return False
        return self._arena.holds(int(index))

    def get(self, index: int) -> Any | None:
        """The sample at `0 <= index < num_samples`, or None if it is not cached.

        Arrays are read-only views of the shared memory and keep it mapped, also after close(); tensors are
        private copies.
        """
        arena = self._arena
        entry = arena.entries[index]
        if entry & 1 and arena.columns is not None:
            return arena.columns.sample(entry >> 1)
        return arena.ragged_sample(index, entry) if entry else None

    def gather(self, indices: npt.NDArray[np.intp], allocate: Allocate) -> Any | None:
        """The batch, column by column; None if a sample is not a uniform row, or torch must collate."""
        return self._arena.gather(indices, allocate)

    # --- writing ------------------------------------------------------------------------------------------

    def put(self, index: int, sample: Any) -> bool:
        """Store a sample; False if it does not fit, or another process holds the lock.

        Raises:
            UnsupportedSampleError: A value in the sample cannot be cached.
        """
        spec, values = flatten(sample)
        arena = self._arena
        if arena.is_full:
            return False
        try:
            return arena.put(index, spec, values)
        except (OSError, MemoryError) as error:  # a cache that cannot grow is slower, but not an error
            arena.is_full = True
            log.warning(
                "the cache stops growing at %s of %s, the rest is read from the dataset: %s",
                readable_size(self.nbytes),
                readable_size(self.max_bytes),
                str(error),  # the error itself would keep this frame alive in a log handler
            )
            return False

    def close(self) -> None:
        """Release the segment; samples that were handed out stay valid, and all later reads are misses."""
        if self.unregister is not None:
            self.unregister()
        self._arena.segment.close()
        self._arena = Arena(Segment(-1, 0), self._arena.plan)


def _attached(segment: Segment, layout: Layout) -> SharedMemoryCache:
    cache = SharedMemoryCache.__new__(SharedMemoryCache)
    cache._hold(Arena(segment, layout))
    return cache


def _of_this_machine(entry: Entry | None, layout: Layout) -> SampleCache:
    """Unpickle on any machine: the same cache if it can be reached, else one of this machine's own."""
    if entry is not None:
        with contextlib.suppress(SharedMemoryError, CacheMismatchError):
            cache = SharedMemoryCache.attach(entry.attach())
            if cache.origin.cache_id == layout.origin.cache_id:
                return cache
    registry = import_module("fastload.cache.ram.sharing")  # which builds on this file
    made: SampleCache = registry.of_this_machine(layout)
    return made
