"""SharedMemoryCache: decodes each sample once, into one segment of anonymous memory that all processes share.

The parent makes it; the parent and its workers of every start method use it, as the cache pickles as a
handle. Other ranks and jobs of the same user find a cache that has a fingerprint (see `registry`). The
segment (see `layout`) is sparse, so memory is allocated as samples are stored, and sealed, so its size never
changes. Rules:

1. Processes read through a PROT_READ mapping and write with pwrite: first the payload, then the 8 bytes of
   the table that publish it. A writer that dies in between leaves an empty entry and nothing to repair. This
   relies on x86, where stores are seen in order; each read also checks the frame of a ragged record.
2. Uniform rows need no lock, because all writers of a row write the same bytes. Ragged space is claimed by
   increasing one number under a try-lock; a process that does not get the lock returns the sample uncached.
3. The lock is taken on a file description opened for this purpose: flock does not exclude processes that
   share an inherited one.
4. Nothing is evicted: with a new permutation in each epoch, no policy beats a fixed subset.
5. The memory is freed when the last process that holds the segment ends, in whatever way.
"""

from __future__ import annotations

import os
import struct
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fastload.cache.columns import ColumnReader
from fastload.cache.locks import try_lock, unlock
from fastload.cache.ram.layout import CURSOR_AT, ENTRY_BYTES, FRAME_BYTES, TABLE_AT, Layout, Origin, create
from fastload.cache.record import ALIGNMENT_BYTES, decode, record_parts
from fastload.cache.sample_cache import BaseCache
from fastload.errors import CacheMismatchError, SegmentError
from fastload.memory.segment import round_up
from fastload.nested.spec import Spec, flatten
from fastload.system.budget import parse_budget
from fastload.system.logs import log
from fastload.system.sizes import readable_size

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Sequence

    from fastload.cache.columns import Allocate
    from fastload.cache.fingerprint import Fingerprint
    from fastload.memory.segment import Segment

EMPTY, UNIFORM = 0, 1

_CURSOR = struct.Struct("<QQ")  # used bytes of the ragged area; uniform rows replaced by ragged records
_ENTRY = struct.Struct("<Q")
_FRAME = struct.Struct("<8sQQ")  # magic, index, bytes of the record
_FRAME_MAGIC = b"FLragged"
_MOST_BUFFERS = 512  # a call takes up to 1024 (IOV_MAX)
_LOCK_ATTEMPTS = 50  # each yields the core once; the lock is held for a few microseconds


class SharedMemoryCache(BaseCache):
    """A cache of samples in shared memory.

    Args:
        num_samples: Number of samples of the dataset.
        examples: A few samples that are typical of the dataset, or none; they are not stored.
        budget: The most memory it may take, as in `parse_budget`.
        fingerprint: Of the samples, if other processes shall find the cache.

    Raises:
        SegmentError: The system refused the memory, or the lock that ragged samples need.
        UnsupportedSampleError: A value in an example cannot be cached.
        ValueError: `parse_budget` does not accept the budget.
    """

    def __init__(
        self,
        num_samples: int,
        examples: Sequence[Any] = (),
        *,
        budget: str | float = "auto",
        fingerprint: Fingerprint | None = None,
    ) -> None:
        origin = Origin(os.getpid(), time.time(), fingerprint)
        layout, segment, mapping = create(num_samples, parse_budget(budget), examples, origin)
        self._hold(segment, layout)
        self._use(mapping)

    @classmethod
    def attach(cls, segment: Segment) -> SharedMemoryCache:
        """The cache in a segment; the cache owns the segment from here on.

        Raises:
            CacheMismatchError: The segment is not a cache of this format version, or its size could change.
        """
        if not segment.is_sealed or not segment.is_own:
            raise CacheMismatchError(
                "not a shared cache: its size could change, or it belongs to another user"
            )
        return _attached(segment, Layout.read(segment))

    def _hold(self, segment: Segment, layout: Layout) -> None:
        """Take ownership of a segment; the caller maps it now, or the first access does."""
        self._segment = segment
        self._plan = layout
        self._mapping: mmap.mmap | None = None
        self._memory = memoryview(b"")
        self._entries = self._memory.cast("Q")
        self._columns: ColumnReader | None = None
        self._is_full = False
        self._is_unmappable = False
        self._reasons_logged: set[str] = set()
        self.reason = "it is private to this process and its workers"
        self.unregister: Callable[[], object] | None = None
        weakref.finalize(self, segment.close).atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (self._segment, self._plan)

    # --- properties ---------------------------------------------------------------------------------------

    @property
    def num_samples(self) -> int:
        """Number of samples of the dataset."""
        return self._plan.num_samples

    @property
    def budget_bytes(self) -> int:
        """The most memory it takes."""
        return self._plan.budget_bytes

    @property
    def layout(self) -> str:
        """`"uniform"` (columns, and ragged records for samples that do not match) or `"ragged"`."""
        return "ragged" if self._plan.spec is None else "uniform"

    @property
    def capacity(self) -> int | None:
        """How many uniform samples fit; None for ragged samples, whose sizes are not known."""
        return None if self._plan.spec is None else self._plan.rows

    @property
    def origin(self) -> Origin:
        """Which process made it, when, and from which samples."""
        return self._plan.origin

    @property
    def fd(self) -> int:
        """The segment's descriptor in this process; -1 once closed."""
        return self._segment.fd

    def explain(self) -> str:
        """The reason why this cache is in use, and the parts of its fingerprint."""
        fingerprint = self._plan.origin.fingerprint
        parts = "" if fingerprint is None else "".join(f"\n  {k}: {v}" for k, v in fingerprint.parts.items())
        held = f"{self.num_cached:,} of {self.num_samples:,} samples, {readable_size(self.nbytes)}"
        return f"shared memory, {held}: {self.reason}{parts}"

    def missing(self) -> npt.NDArray[np.intp]:
        """Indices of the samples that are not stored and may fit, ascending."""
        if self._is_full or not self._map():
            return np.empty(0, np.intp)
        plan = self._plan
        empty = np.flatnonzero(np.asarray(self._entries) == EMPTY)
        only_rows = plan.spec is not None and plan.spare_bytes < plan.row_bytes
        return empty[empty < plan.rows] if only_rows else empty

    @property
    def num_cached(self) -> int:
        """How many samples are stored now."""
        return int(np.count_nonzero(np.asarray(self._entries))) if self._map() else 0

    @property
    def nbytes(self) -> int:
        """Memory in use now, by all processes together."""
        return os.fstat(self._segment.fd).st_blocks * 512 if self._segment.fd >= 0 else 0

    # --- reading ------------------------------------------------------------------------------------------

    def _map(self) -> bool:
        """Map the segment if it is not mapped in this process; False if it is closed or cannot be mapped."""
        if self._mapping is None:
            if self._segment.fd < 0 or self._is_unmappable:
                return False
            try:
                mapping = self._segment.map(writable=False)
            except SegmentError as error:  # for this process only: other processes may have other limits
                self._is_unmappable = True
                log.warning(
                    "process %d reads all samples from the dataset, because it cannot map their cache: %s",
                    os.getpid(),
                    str(error),  # the error itself would keep this frame alive in a log handler
                )
                return False
            self._use(mapping)
        return True

    def _use(self, mapping: mmap.mmap) -> None:
        plan = self._plan
        self._memory = memoryview(mapping)
        self._entries = self._memory[TABLE_AT : TABLE_AT + plan.num_samples * ENTRY_BYTES].cast("Q")
        if plan.spec is not None:
            self._columns = ColumnReader(plan.spec, plan.columns, plan.rows, mapping)
        self._mapping = mapping  # last: other threads check this attribute before they use the others

    def __contains__(self, index: object) -> bool:
        if not isinstance(index, (int, np.integer)) or not 0 <= index < self.num_samples:
            return False
        return self._map() and self._entries[int(index)] != EMPTY

    def get(self, index: int) -> Any | None:
        """The sample at `0 <= index < num_samples`, or None if it is not cached.

        Arrays are read-only views of the shared memory and keep it mapped, also after close(); tensors are
        private copies.
        """
        if self._mapping is None and not self._map():
            return None
        entry = self._entries[index]
        if entry == UNIFORM and self._columns is not None:
            return self._columns.sample(index)
        return self._ragged_sample(index, entry) if entry != EMPTY else None

    def _ragged_sample(self, index: int, offset: int) -> Any | None:
        plan = self._plan
        if not plan.ragged_at <= offset <= plan.ragged_at + plan.ragged_bytes - FRAME_BYTES:
            return None
        magic, owner, nbytes = _FRAME.unpack_from(self._memory, offset)
        if magic != _FRAME_MAGIC or owner != index:
            return None  # the entry is not completely written yet
        start = offset + FRAME_BYTES
        return decode(self._memory[start : start + nbytes])

    def cached_rows(self, indices: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """Which of these samples are cached as uniform rows, `(len(indices),) bool`."""
        if not self._map():
            return np.zeros(len(indices), np.bool_)
        rows: npt.NDArray[np.bool_] = np.asarray(self._entries).take(indices) == UNIFORM
        return rows

    def gather(self, indices: npt.NDArray[np.intp], allocate: Allocate) -> Any | None:
        """The batch, column by column; None if a sample is not a uniform row, or torch must collate."""
        if not self._map() or self._columns is None or not self.cached_rows(indices).all():
            return None
        return self._columns.gather(indices, allocate)

    # --- writing ------------------------------------------------------------------------------------------

    def put(self, index: int, sample: Any) -> bool:
        """Store a sample; False if it does not fit, or another process holds the lock.

        Raises:
            UnsupportedSampleError: A value in the sample cannot be cached.
        """
        spec, values = flatten(sample)
        if self._is_full or not self._map():
            return False
        if self._entries[index] != EMPTY:
            return True
        try:
            return self._put_row(index, spec, values) or self._put_ragged(index, spec, values)
        except (OSError, MemoryError) as error:  # a cache that cannot grow is slower, but not an error
            self._is_full = True
            log.warning(
                "the cache stops growing at %s of %s, the rest is read from the dataset: %s",
                readable_size(self.nbytes),
                readable_size(self.budget_bytes),
                str(error),  # the error itself would keep this frame alive in a log handler
            )
            return False

    def _put_row(self, index: int, spec: Spec, values: list[Any]) -> bool:
        plan = self._plan
        if index >= plan.rows or plan.spec is None or spec.node != plan.spec.node:
            return False
        rows = [column.pack(value) for column, value in zip(plan.columns, values, strict=True)]
        if any(row is None for row in rows):
            return False
        for column, row in zip(plan.columns, rows, strict=True):
            self._write([row], column.offset + index * column.row_bytes)
        self._publish(index, UNIFORM)
        return True

    def _put_ragged(self, index: int, spec: Spec, values: list[Any]) -> bool:
        plan = self._plan
        if (
            plan.spec is not None
            and spec.node == plan.spec.node
            and index >= plan.rows
            and plan.spare_bytes < plan.row_bytes
        ):
            return False  # usually the budget is too small: return before the record is built
        parts, nbytes = record_parts(spec, values)
        offset = self._claim(index, round_up(FRAME_BYTES + nbytes, ALIGNMENT_BYTES))
        if offset is None:
            return False
        frame = _FRAME.pack(_FRAME_MAGIC, index, nbytes).ljust(FRAME_BYTES, b"\0")
        self._write([frame, *parts], offset)
        self._publish(index, offset)
        return True

    def _claim(self, index: int, nbytes: int) -> int | None:
        """The offset of space that only this caller may write, or None."""
        plan = self._plan
        try:
            fd = self._segment.reopen()
        except OSError as error:
            self._leave_out(f"the lock on the cache cannot be opened: {error}")
            return None
        try:
            if not self._lock(fd):
                return None
            try:
                used, given_up = _CURSOR.unpack(os.pread(fd, _CURSOR.size, CURSOR_AT))
                given_up += index < plan.rows
                if used + nbytes > plan.spare_bytes + given_up * plan.row_bytes:
                    return None
                if used + nbytes > plan.ragged_bytes:
                    size = readable_size(plan.ragged_bytes)
                    self._leave_out(f"they are larger than the examples, by which {size} were reserved")
                    return None
                os.pwrite(fd, _CURSOR.pack(used + nbytes, given_up), CURSOR_AT)
                return plan.ragged_at + int(used)
            finally:
                # A fork in another thread may have copied the descriptor, so close() may not release the
                # lock.
                unlock(fd)
        finally:
            os.close(fd)

    def _lock(self, fd: int) -> bool:
        try:
            return try_lock(fd, attempts=_LOCK_ATTEMPTS)
        except OSError as error:
            self._leave_out(f"the system refuses the lock on the cache: {error}")
            return False

    def _leave_out(self, reason: str) -> None:
        """Log once per process why samples that need ragged space are not cached."""
        if reason not in self._reasons_logged:
            self._reasons_logged.add(reason)
            log.warning("cache: some samples are read from the dataset at each access: %s", reason)

    def _publish(self, index: int, entry: int) -> None:
        os.pwrite(self._segment.fd, _ENTRY.pack(entry), TABLE_AT + index * ENTRY_BYTES)

    def _write(self, buffers: Sequence[Any], offset: int) -> None:
        """Write buffers one after another, without joining them, which would take as much memory again."""
        fd = self._segment.fd
        for first in range(0, len(buffers), _MOST_BUFFERS):
            views = [memoryview(buffer) for buffer in buffers[first : first + _MOST_BUFFERS]]
            left = [view.cast("B") for view in views if view.nbytes]
            while left:
                written = os.pwritev(fd, left, offset)
                offset += written
                while left and written >= left[0].nbytes:
                    written -= left.pop(0).nbytes
                if written:
                    left[0] = left[0][written:]

    def close(self) -> None:
        """Release the segment; samples that were handed out stay valid, and all later reads are misses."""
        if self.unregister is not None:
            self.unregister()
        self._segment.close()
        self._columns = None
        self._memory = memoryview(b"")
        self._entries = self._memory.cast("Q")
        self._mapping = None


def _attached(segment: Segment, layout: Layout) -> SharedMemoryCache:
    cache = SharedMemoryCache.__new__(SharedMemoryCache)
    cache._hold(segment, layout)
    return cache
