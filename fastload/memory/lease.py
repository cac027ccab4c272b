"""Memory that is leased to one batch after another, and the allocators that lay batches out in it.

Every view of a batch is made from a lease. The lease dies with the last tensor, array, memoryview or storage
alias made from it, in any order and on any thread; until then the memory is not written again.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fastload.memory.segment import PAGE_BYTES, populate, round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ALIGNMENT_BYTES = 64  # a cache line, and the alignment of torch's own CPU allocator
# Extra bytes in a new slot, for data whose size is not known when the slot is made: labels beside images.
SLACK_BYTES = 64 * 1024

# Private memory of at most this size comes from the heap: a loop that keeps all labels, for a metric, must
# not keep the buffers with the images. malloc reuses memory of this size while it is warm.
SMALL_BYTES = 64 * 1024

# glibc's thresholds rise with the largest block that was freed, up to this size: see `_free_as_torch`.
_MAX_THRESHOLD_BYTES = (32 << 20) - SLACK_BYTES

# Buffers of a loader without workers: for the caller's batch, the next batch, and a few in a prefetcher.
MAX_BUFFERS = 5

_PEAK_BATCHES = 32
_KEPT_BYTES = 1 << 20  # memory below this size is never given up

_forks = 0  # how often this process has forked since it first leased shared memory
_counts_forks = False


def _count_fork() -> None:
    global _forks
    _forks += 1


class Memory:
    """One writable mapping that is leased to one batch after another.

    Args:
        mapping: The pages; this object and every lease keep them alive.
        shared: Whether a forked child sees this process's later writes.
    """

    def __init__(self, mapping: mmap.mmap, *, shared: bool) -> None:
        global _counts_forks
        if shared and not _counts_forks:
            _counts_forks = True
            os.register_at_fork(after_in_parent=_count_fork)
        self.nbytes = len(mapping)
        self._mapping = mapping
        self._shared = shared
        self._lease_type = ctypes.c_char * self.nbytes
        self._lease: weakref.ref[Any] | None = None
        self._forks_at_lease = _forks

    @property
    def address(self) -> int:
        """The address of the pages in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    def lease(self) -> Any:
        """A new buffer object over all of the memory; views made from it keep the memory leased."""
        lease = self._lease_type.from_buffer(self._mapping)
        # Not a finalizer, which would run on the thread that drops the last view, at any moment, and would
        # need a lock: whoever wants the memory asks `is_leased`.
        self._lease = weakref.ref(lease)
        self._forks_at_lease = _forks
        return lease

    @property
    def is_leased(self) -> bool:
        """Whether the last lease, or a view made from it, is still alive."""
        return self._lease is not None and self._lease() is not None

    @property
    def is_fork_shared(self) -> bool:
        """Whether a forked child can hold a view of the last lease, and would see what is written next."""
        return self._shared and self._lease is not None and self._forks_at_lease != _forks


def private_memory(nbytes: int) -> Memory:
    """Anonymous private pages, allocated now; a forked child has its own copy."""
    nbytes = round_up(max(nbytes, 1), PAGE_BYTES)
    if hasattr(mmap, "MAP_PRIVATE"):
        mapping = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        populate(mapping)
    else:
        mapping = mmap.mmap(-1, nbytes)  # Windows: no fork, and pages are allocated on first touch
    return Memory(mapping, shared=False)


def _free_as_torch(nbytes: int) -> None:
    """Free a block of the heap, as torch's loader frees a batch.

    glibc then keeps twice as much of what is freed later. Otherwise each sample that is freed at the top of
    the heap goes back to the system, and its pages are faulted in again for the next one.
    """
    with contextlib.suppress(MemoryError):  # a limit on address space; nothing is written to the block
        np.empty(min(nbytes, _MAX_THRESHOLD_BYTES), np.uint8)


class RecentPeak:
    """The largest of the last batches: of those since the last multiple of 32, and of the 32 before.

    Attributes:
        nbytes: Its size; 0 before the first batch.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._period_bytes = self._num_batches = 0

    def add(self, nbytes: int) -> bool:
        """Note a batch; returns whether older ones were forgotten."""
        self.nbytes = max(self.nbytes, nbytes)
        self._period_bytes = max(self._period_bytes, nbytes)
        self._num_batches += 1
        if self._num_batches < _PEAK_BATCHES:
            return False
        self.nbytes, self._period_bytes, self._num_batches = self._period_bytes, 0, 0
        return True

    def is_exceeded_by(self, memory_bytes: int) -> bool:
        """Whether memory was made for a batch of another size, and is not worth keeping for these."""
        return memory_bytes > 2 * self.nbytes + _KEPT_BYTES


class BumpAllocator:
    """Lays out the arrays of one batch after another in memory, as aligned regions in sequence.

    Args:
        make: Returns new memory of at least the given number of bytes; called if there is no memory or it is
            too small.

    Attributes:
        scratch: Memory for batches before their `batch_transform`, which stays warm between epochs.
    """

    def __init__(self, make: Callable[[int], Memory]) -> None:
        self._make = make
        self.memory: Memory | None = None
        self.lease: Any = None
        self.used_bytes = 0
        self.missing_bytes = 0  # of requests for which the memory was too small
        self.scratch: BufferPool | None = None

    def begin(self, memory: Memory | None = None) -> None:
        """Start a batch in ``memory``, or in new memory, made on the first request for a region."""
        self.memory = memory
        self.lease = None
        self.used_bytes = self.missing_bytes = 0

    def reserve(self, nbytes: int) -> int | None:
        """The offset of a new aligned region, or None if the memory of the current batch is full."""
        offset = round_up(self.used_bytes, ALIGNMENT_BYTES)
        if self.memory is None or offset + nbytes > self.memory.nbytes:
            if self.used_bytes:
                self.missing_bytes += round_up(nbytes, ALIGNMENT_BYTES)
                return None
            self.memory = self._make(nbytes + SLACK_BYTES)
            self.lease = None
        if self.lease is None:
            self.lease = self.memory.lease()
        self.used_bytes = offset + nbytes
        return offset

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """A writable region of ``nbytes`` bytes; see `array`."""
        return self.array((nbytes,), np.uint8)

    def array(self, shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A writable C-contiguous array in a new region; from the heap if it does not fit into the memory."""
        dtype = np.dtype(dtype)
        offset = self._place(math.prod(shape) * dtype.itemsize)
        return np.empty(shape, dtype) if offset is None else np.ndarray(shape, dtype, self.lease, offset)

    def _place(self, nbytes: int) -> int | None:
        """The offset of a new array; None: on the heap."""
        return self.reserve(nbytes)

    def end(self) -> None:
        """Drop this object's reference to the batch; views made from it keep it alive."""
        self.lease = None


class BufferPool(BumpAllocator):
    """Lays out batches in private buffers: one per batch, reused when no view of the batch is left.

    A buffer is made when the first leaf of a batch is known, and is as large as whole batches were lately, so
    the order of leaves does not matter. Buffers of a huge batch are given up once batches are small again.

    Args:
        limit_bytes: Upper bound on the bytes of all buffers in the pool; a batch beyond it gets its own
            memory.
        max_buffers: Maximum number of buffers in the pool.
    """

    def __init__(self, limit_bytes: int, max_buffers: int = MAX_BUFFERS) -> None:
        super().__init__(self._take)
        self._limit_bytes = limit_bytes
        self._max_buffers = max_buffers
        self._buffers: list[Memory] = []
        self._peak = RecentPeak()

    def begin(self, memory: Memory | None = None) -> None:
        """Start a batch; see `BumpAllocator.begin`."""
        nbytes = self.used_bytes + self.missing_bytes
        if nbytes:
            is_too_small = self.missing_bytes and nbytes + SLACK_BYTES <= self._limit_bytes
            if is_too_small and self.memory in self._buffers:
                self._buffers.remove(self.memory)
            if self._peak.add(nbytes):
                self._buffers = [one for one in self._buffers if not self._peak.is_exceeded_by(one.nbytes)]
        super().begin(memory)

    def _place(self, nbytes: int) -> int | None:
        return None if nbytes <= SMALL_BYTES else self.reserve(nbytes)

    def clear(self) -> None:
        """Forget all buffers; views that the caller holds stay valid."""
        self._buffers.clear()
        self.scratch = None
        self.begin()

    def _take(self, nbytes: int) -> Memory:
        """An unreferenced buffer: the last used if large enough, else a new one replaces it."""
        for buffer in reversed(self._buffers):
            if not buffer.is_leased:
                if buffer.nbytes >= nbytes:
                    return buffer
                self._buffers.remove(buffer)
                break
        left_bytes = self._limit_bytes - sum(buffer.nbytes for buffer in self._buffers)
        has_room = len(self._buffers) < self._max_buffers
        if has_room:  # for the leaves after this one, too
            nbytes = max(nbytes, min(self._peak.nbytes + SLACK_BYTES, left_bytes // PAGE_BYTES * PAGE_BYTES))
        new = private_memory(nbytes)
        _free_as_torch(nbytes)
        if has_room and new.nbytes <= left_bytes:
            self._buffers.append(new)
        return new


class _Current(threading.local):
    """Where this thread lays out the arrays of the batch that it makes."""

    allocator: BumpAllocator | None = None


_current = _Current()


def current_allocator() -> BumpAllocator | None:
    """The allocator for what this thread makes now; None: the heap."""
    return _current.allocator


class allocating_in:  # noqa: N801  # like contextlib.suppress; a generator would take three times as long
    """A block in which functions that ask for `current_allocator` write their results there.

    Use it only around code whose result is the batch. Whatever makes a part of one, such as a dataset that
    calls default_collate for a sample, must get memory elsewhere, because the batch's memory can be reused
    while the part is in use.

    Args:
        allocator: The memory of the batch; None: the heap.
    """

    __slots__ = ("_allocator", "_before")

    def __init__(self, allocator: BumpAllocator | None) -> None:
        self._allocator = allocator
        self._before: BumpAllocator | None = None

    def __enter__(self) -> None:
        self._before = _current.allocator
        _current.allocator = self._allocator

    def __exit__(self, *exc_info: object) -> None:
        _current.allocator = self._before
