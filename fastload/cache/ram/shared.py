"""SharedMemoryCache: decodes each sample once, into one segment of anonymous memory that all processes share.

The parent makes it; the parent and its workers of every start method use it, because the cache pickles as a
handle. Other ranks and jobs of the same user find a cache that has a fingerprint (see `registry`). The
segment (see `layout`) is sparse, so memory is allocated as samples are stored, and sealed, so its size never
changes. `generation` reads and stores samples. Rules:

1. Nothing is evicted: with a new permutation in each epoch, no policy beats a fixed subset. Only `retain`
   drops samples: it starts an empty segment, the next generation of the cache (see `generation`).
2. Every access checks for a next generation, and follows. A sample stored in an old generation meanwhile is
   lost, and is read from the dataset again.
3. Samples in use keep their generation's memory, so they never change.
4. The memory is freed when the last process that holds the segment ends, however it ends.
5. Other processes reach the cache through its anchor: a descriptor that is never read or written, and that
   refers to the newest generation that this process holds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import weakref
from importlib import import_module
from multiprocessing import context
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fastload.cache.ram import generation, owners
from fastload.cache.ram.generation import Generation
from fastload.cache.ram.layout import RETAINS_ALL, Layout, Origin, Stamp, create
from fastload.cache.sample_cache import BaseCache
from fastload.errors import SegmentError
from fastload.memory.segment import Segment, is_for_other_machines
from fastload.nested.spec import flatten
from fastload.system.budget import parse_memory
from fastload.system.locks import locked
from fastload.system.logs import log
from fastload.system.sizes import readable_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastload.cache.columns import Allocate
    from fastload.cache.fingerprint import Fingerprint
    from fastload.cache.ram.owners import Entry
    from fastload.cache.sample_cache import SampleCache

_RETAIN_WAIT_S = 10.0  # for a process that makes the next generation


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
        SegmentError: The memory, or the lock that ragged samples need, is not available.
        UnsupportedSampleError: A value in an example cannot be cached.
        ValueError: `parse_memory` does not accept `max_memory`.
    """

    # Attributes of the class, because the properties of SampleCache with these names cannot be set.
    num_samples, max_bytes, layout = 0, 0, "ragged"
    capacity: int | None
    _now: Generation

    def __init__(
        self,
        num_samples: int,
        examples: Sequence[Any] = (),
        *,
        max_memory: str | float = "auto",
        fingerprint: Fingerprint | None = None,
    ) -> None:
        origin = Origin(os.getpid(), time.time(), fingerprint)
        layout, segment, mapping = create(num_samples, parse_memory(max_memory), examples, origin)
        self._hold(Generation(segment, layout, mapping))

    @classmethod
    def attach(cls, segment: Segment) -> SharedMemoryCache:
        """The cache in a segment; the cache owns the segment from here on.

        Raises:
            CacheMismatchError: The segment is not a cache of this format version, or its size could change.
        """
        return _attached(segment, Layout.read(segment))

    def _hold(self, first: Generation) -> None:
        self._now = first
        self._plan = layout = first.plan
        self.num_samples, self.max_bytes = layout.num_samples, layout.max_bytes
        is_ragged = layout.spec is None
        self.layout, self.capacity = ("ragged", None) if is_ragged else ("uniform", layout.rows)
        self.origin = layout.origin
        self._anchor: Segment | None = None
        self.reason = "it is private to this process and its workers"
        self.unregister: Callable[[], object] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        now = self._newest()
        if is_for_other_machines():
            return _of_this_machine, (owners.entry_of("", self.anchor_fd()), now.stamp.cache_id, self._plan)
        if context.get_spawning_popen() is None and now.stamp.number:
            # Not pickled to start a child process. This process can move to a new generation before the
            # pickle is read; the anchor then leads to it.
            entry = owners.entry_of("", self.anchor_fd())
            if entry is not None:
                return _found, (entry, now.stamp.cache_id, self._plan)
        return _attached, (now.segment, self._plan)

    # --- generations --------------------------------------------------------------------------------------

    def _newest(self) -> Generation:
        """The newest generation that this process can reach."""
        now = self._now
        while now.successor[0] != now.followed:
            number = now.successor[0]
            newer = now.newer()
            if newer is None:
                log.info("cache: process %d keeps an old part of it: the new one is gone", os.getpid())
                now.followed = number
                break
            self._move(newer)
            now = newer
        return now

    def _move(self, new: Generation) -> None:
        """Use a new generation from here on; the old one goes with the last view of its samples."""
        if self._anchor is not None:
            os.dup2(new.segment.fd, self._anchor.fd, inheritable=False)
        self._now = new

    def anchor_fd(self) -> int:
        """A descriptor that always refers to the newest generation that this process holds.

        Raises:
            OSError: This process has no descriptor left.
        """
        if self._anchor is None:
            fd = os.dup(self._now.segment.fd)
            self._anchor = Segment(fd, self._now.segment.nbytes)
            weakref.finalize(self, self._anchor.close).atexit = False
        return self._anchor.fd

    @property
    def generation(self) -> int:
        """The number of the generation in use; the first one is 1. It is 0 if the cache cannot be read."""
        return self._newest().stamp.number

    def is_retained(self, index: int) -> bool:
        """Whether the sample can be stored."""
        entry: int = self._newest().entries[index]
        return entry != generation.NOT_RETAINED

    def retain(self, indices: npt.NDArray[np.intp] | None) -> None:
        """Drop all samples, and store only these from now on, in all processes that use this cache.

        The cache starts empty and fills again: the samples that stay are read from the dataset once more. The
        old memory is freed once all processes have followed, each on its next access, and none of its samples
        is in use. Until then, the cache takes the old memory and that of samples stored meanwhile: at most
        `nbytes + max_bytes`.

        Each process that shares the cache can call this: the first call does the work. If the indices are
        those of the last call, nothing changes.

        Args:
            indices: Of the samples, each `0 <= index < num_samples`; None for all samples.
        """
        retained = np.zeros(self.num_samples, np.bool_)
        retained[slice(None) if indices is None else indices] = True
        digest = RETAINS_ALL
        if not retained.all():
            digest = hashlib.blake2b(np.packbits(retained).tobytes(), digest_size=len(RETAINS_ALL)).digest()
        try:
            while True:
                self._now.followed = 0  # a generation that was unreachable before might be reachable now
                now = self._newest()
                if not now.stamp.number or now.stamp.digest == digest:
                    return
                with locked(now.segment.reopen, wait_s=_RETAIN_WAIT_S) as has_lock:
                    if not has_lock:
                        raise SegmentError(f"another process has held its lock for {_RETAIN_WAIT_S:,.0f} s")
                    if now.successor[0] == now.followed:
                        self._succeed(now, retained, digest)
                        return
        except (OSError, MemoryError, SegmentError) as error:
            log.warning("cache: retain() has changed nothing, and all samples remain valid: %s", str(error))

    def _succeed(self, old: Generation, retained: npt.NDArray[np.bool_], digest: bytes) -> None:
        """Start a new generation for the retained samples, and tell the other processes."""
        holder = owners.entry_of("", self.anchor_fd())
        if holder is None:
            raise SegmentError("other processes could not follow, because this needs /proc")
        number = max(old.stamp.number, old.successor[0]) + 1
        segment, mapping = self._plan.create_segment(Stamp(number, old.stamp.cache_id, digest))
        new = Generation(segment, self._plan, mapping)
        new.begin(retained, is_short=old.cursor.is_short)
        self._move(new)  # before others are told: they attach through the anchor
        old.announce(number, holder)
        log.info("cache: empty now, for %s of %s samples", f"{retained.sum():,}", f"{self.num_samples:,}")

    # --- properties ---------------------------------------------------------------------------------------

    @property
    def fd(self) -> int:
        """A descriptor of the cache in this process; -1 once closed."""
        return self._now.segment.fd if self._anchor is None else self._anchor.fd

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
        return self._newest().missing()

    @property
    def num_cached(self) -> int:
        """How many samples are stored now."""
        return self._newest().num_cached

    @property
    def nbytes(self) -> int:
        """Memory in use now, by all processes together."""
        return self._now.nbytes

    def expect_short(self) -> None:
        """Keep all processes from warning that the cache cannot hold all samples."""
        self._newest().expect_short()

    # --- reading ------------------------------------------------------------------------------------------

    def __contains__(self, index: object) -> bool:
        if not isinstance(index, (int, np.integer)) or not 0 <= index < self.num_samples:
            return False
        return self._newest().holds(int(index))

    def get(self, index: int) -> Any | None:
        """The sample at `0 <= index < num_samples`, or None if it is not cached.

        Arrays are read-only views of the shared memory and keep it mapped, also after close(); tensors are
        private copies.
        """
        now = self._now
        if now.successor[0] != now.followed:
            now = self._newest()
        entry = now.entries[index]
        if entry & 1 and now.columns is not None:
            return now.columns.sample(entry >> 1)
        return now.ragged_sample(index, entry) if entry else None

    def gather(self, indices: npt.NDArray[np.intp], allocate: Allocate) -> Any | None:
        """The batch, column by column; None if a sample is not a uniform row, or torch must collate."""
        now = self._now
        if now.successor[0] != now.followed:
            now = self._newest()
        return now.gather(indices, allocate)

    # --- writing ------------------------------------------------------------------------------------------

    def put(self, index: int, sample: Any) -> bool:
        """Store a sample; False if it does not fit, is not retained, or another process holds the lock.

        Raises:
            UnsupportedSampleError: A value in the sample cannot be cached.
        """
        spec, values = flatten(sample)
        now = self._newest()
        if now.is_full:
            return False
        try:
            return now.put(index, spec, values)
        except (OSError, MemoryError) as error:  # a cache that cannot grow is slower, but not an error
            now.is_full = True
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
        if self._anchor is not None:
            self._anchor.close()
        self._now.segment.close()
        self._now = Generation(Segment(-1, 0), self._plan)


def _attached(segment: Segment, layout: Layout) -> SharedMemoryCache:
    cache = SharedMemoryCache.__new__(SharedMemoryCache)
    cache._hold(Generation(segment, layout))
    return cache


def _found(entry: Entry, cache_id: int, layout: Layout) -> SharedMemoryCache:
    return _attached(generation.attach(entry, Stamp(0, cache_id, RETAINS_ALL)), layout)


def _of_this_machine(entry: Entry | None, cache_id: int, layout: Layout) -> SampleCache:
    """Unpickle on any machine: the same cache if it can be reached, else one of this machine's own."""
    if entry is not None:
        with contextlib.suppress(SegmentError):
            return _found(entry, cache_id, layout)
    registry = import_module("fastload.cache.ram.registry")  # which builds on this file
    made: SampleCache = registry.of_this_machine(layout, cache_id)
    return made
