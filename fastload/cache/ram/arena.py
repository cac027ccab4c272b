"""Arena: the segment of a shared cache, mapped in this process, and how samples are read and stored.

Space in it is claimed, and never given back: the memory goes with the last process that holds the segment.
Rules:

1. Processes read through a PROT_READ mapping. They write samples with pwrite, which reports missing memory,
   and then the entry of the table that publishes the sample. A writer that dies in between leaves an empty
   entry and nothing to repair. A `fence` comes before the entry, which is one aligned store of 8 bytes
   through a second mapping, of the table alone. Readers need no fence, because they compute the address of
   a sample from its entry (see `memory.order`). Each read also checks the frame of a ragged record.
2. If all uniform samples have a row, their rows need no lock, because all writers of a row write the same
   bytes. All other space (ragged space, and rows of a cache that cannot hold all samples) is claimed by
   increasing a number under a try-lock. A process that does not get the lock returns the sample uncached.
3. The claims together never exceed `max_bytes`.
4. The lock is taken on a file description opened for this purpose: flock does not exclude processes that
   share an inherited one.
5. The descriptor is closed with the object. Views of samples keep the mapping, and with it the memory.
"""

from __future__ import annotations

import os
import struct
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastload.cache.format.columns import ColumnReader
from fastload.cache.format.record import ALIGNMENT_BYTES, decode, record_parts
from fastload.cache.ram.layout import CURSOR_AT, ENTRY_BYTES, FRAME_BYTES, TABLE_AT, Layout
from fastload.errors import SharedMemoryError
from fastload.memory.memory_model import fence
from fastload.memory.segment import PAGE_BYTES, populate, round_up
from fastload.system.humanize import readable_size
from fastload.system.locks import flocked
from fastload.system.logs import log, say_once

if TYPE_CHECKING:
    import mmap
    from collections.abc import Sequence

    from fastload.cache.format.columns import Allocate
    from fastload.memory.segment import Segment
    from fastload.nested.spec import Spec

_EMPTY = 0
_CURSOR = struct.Struct("<qqqq")
_FRAME = struct.Struct("<8sQQ")  # magic, index, bytes of the record
_FRAME_MAGIC = b"FLragged"
_LOCK_WAIT_S = 0.002  # the lock is held for a few microseconds


class Cursor(NamedTuple):
    """How much of an arena is claimed.

    Attributes:
        ragged_bytes: Claimed bytes of the ragged area.
        rows: Claimed rows, if rows are assigned one after another.
        used_bytes: What the claims take of the room of the layout.
        is_short: Whether the warning that the cache cannot hold all samples was logged, or is unwanted.
    """

    ragged_bytes: int
    rows: int
    used_bytes: int
    is_short: int


class Arena:
    """One segment of a shared cache, mapped; without a segment, it holds and stores nothing.

    Args:
        segment: The segment; the arena owns it from here on.
        plan: Its layout.
        mapping: The segment, read-only; None to map it now.

    Attributes:
        segment: As given.
        plan: As given.
        entries: The table of all samples, of Python numbers.
        table: The same, `(num_samples,) intp`.
        columns: Reads uniform samples; None if there are none.
        is_full: Whether memory for a sample, or for the segment itself, could not be allocated.
    """

    __slots__ = (
        *("__weakref__", "_allocated", "_cursor", "_memory", "_pages", "_words", "columns", "entries"),
        *("is_full", "plan", "segment", "table"),
    )

    def __init__(self, segment: Segment, plan: Layout, mapping: mmap.mmap | None = None) -> None:
        self.segment = segment
        self.plan = plan
        memory: mmap.mmap | bytes | None = mapping
        if segment.fd >= 0:
            weakref.finalize(self, segment.close).atexit = False
            try:
                memory = mapping or segment.map(writable=False)
            except SharedMemoryError as error:  # for this process only: others can have other limits
                log.warning(
                    "process %d reads all samples from the dataset, because it cannot map their cache: %s",
                    os.getpid(),
                    str(error),  # the error itself would keep this frame alive in a log handler
                )
        self.is_full = memory is None
        if memory is None:
            memory = bytes(TABLE_AT + plan.num_samples * ENTRY_BYTES)
        self._memory = memoryview(memory)
        self.entries = self._memory[TABLE_AT : TABLE_AT + plan.num_samples * ENTRY_BYTES].cast("Q")
        self.table = np.frombuffer(self.entries, np.intp)
        self._cursor = self._memory[CURSOR_AT : CURSOR_AT + _CURSOR.size].cast("q")
        self._pages: mmap.mmap | None = None  # writable, from the start to the end of the table
        self._allocated: set[int] = set()  # pages of the table that a store cannot lack memory for
        self.columns: ColumnReader | None = None
        if plan.spec is not None and not self.is_full:
            self.columns = ColumnReader(plan.spec, plan.columns, plan.rows, memory)

    # --- properties ---------------------------------------------------------------------------------------

    @property
    def num_cached(self) -> int:
        """How many samples are stored now."""
        return int(np.count_nonzero(self.table))

    @property
    def nbytes(self) -> int:
        """Memory in use now, by all processes together."""
        return os.fstat(self.segment.fd).st_blocks * 512 if self.segment.fd >= 0 else 0

    @property
    def cursor(self) -> Cursor:
        """About how much is claimed now; without the lock, the figures can be of different moments."""
        return Cursor(*self._cursor)

    def missing(self) -> npt.NDArray[np.intp]:
        """Indices of missing samples that fit, ascending; the first ones if not all fit."""
        if self.is_full:
            return np.empty(0, np.intp)
        plan, cursor = self.plan, self.cursor
        empty = np.flatnonzero(self.table == _EMPTY)
        if not plan.is_packed:
            return empty
        rows = min(plan.rows - cursor.rows, (plan.room_bytes - cursor.used_bytes) // max(1, plan.row_bytes))
        return empty[: max(0, rows)]

    # --- reading ------------------------------------------------------------------------------------------

    def holds(self, index: int) -> bool:
        """Whether a sample is stored now."""
        entry: int = self.entries[index]
        return entry != _EMPTY

    def ragged_sample(self, index: int, offset: int) -> Any | None:
        """The sample of a ragged record; None if the entry is not, or not completely, that of a record."""
        plan = self.plan
        if not plan.ragged_at <= offset <= plan.ragged_at + plan.ragged_bytes - FRAME_BYTES:
            return None
        magic, owner, nbytes = _FRAME.unpack_from(self._memory, offset)
        if magic != _FRAME_MAGIC or owner != index:
            return None  # the entry is not completely written yet
        start = offset + FRAME_BYTES
        return decode(self._memory[start : start + nbytes])

    def gather(self, indices: npt.NDArray[np.intp], allocate: Allocate) -> Any | None:
        """The batch, column by column; None if a sample is not a uniform row, or torch must collate."""
        if self.columns is None:
            return None
        entries = self.table.take(indices)
        if not (entries & 1).all():
            return None
        return self.columns.gather(entries >> 1, allocate)  # not `indices`: see rule 1

    # --- writing ------------------------------------------------------------------------------------------

    def put(self, index: int, spec: Spec, values: list[Any]) -> bool:
        """Store a sample; False if it does not fit, or another process holds the lock.

        Raises:
            OSError: The system has no memory left.
            MemoryError: This process gets no more memory.
        """
        if self.holds(index):
            return True
        plan = self.plan
        if plan.spec is not None and spec == plan.spec:
            packed = [column.pack(value) for column, value in zip(plan.columns, values, strict=True)]
            if all(part is not None for part in packed):
                row: int | None = index
                if plan.is_packed:
                    claimed = self._claim(index, plan.row_bytes, rows=1)
                    row = None if claimed is None else claimed.rows
                if row is None:
                    return self.holds(index)
                for column, part in zip(plan.columns, packed, strict=True):
                    self._write([part], column.offset + row * column.row_bytes)
                self.publish(index, 2 * row + 1)
                return True
        parts, nbytes = record_parts(spec, values)
        record_bytes = round_up(FRAME_BYTES + nbytes, ALIGNMENT_BYTES)
        claimed = self._claim(index, record_bytes, ragged_bytes=record_bytes)
        if claimed is None:
            return self.holds(index)
        offset = plan.ragged_at + claimed.ragged_bytes
        frame = _FRAME.pack(_FRAME_MAGIC, index, nbytes).ljust(FRAME_BYTES, b"\0")
        self._write([frame, *parts], offset)
        self.publish(index, offset)
        return True

    def _claim(self, index: int, nbytes: int, *, rows: int = 0, ragged_bytes: int = 0) -> Cursor | None:
        """The cursor before this claim of space for this caller alone; None if there is none."""
        if self._after(self.cursor, nbytes, rows, ragged_bytes) is None and self.cursor.is_short:
            return None  # usually `max_memory` is too small, and a warning has said so
        with flocked(self.segment.reopen, wait_s=_LOCK_WAIT_S, failed=_lock_denied) as has_lock:
            if not has_lock or self.holds(index):
                return None
            cursor = self._locked_cursor()
            after = self._after(cursor, nbytes, rows, ragged_bytes)
            self._set(after or cursor._replace(is_short=1))
        if after is None and not cursor.is_short:
            log_short(self.plan.max_bytes, self.num_cached, self.plan.num_samples)
        return None if after is None else cursor

    def _after(self, cursor: Cursor, nbytes: int, rows: int, ragged_bytes: int) -> Cursor | None:
        """The cursor after a claim; None if it does not fit."""
        plan = self.plan
        if ragged_bytes:
            nbytes = plan.ragged_cost(nbytes, is_first=not cursor.ragged_bytes)
        rows, ragged_bytes = cursor.rows + rows, cursor.ragged_bytes + ragged_bytes
        used_bytes = cursor.used_bytes + nbytes
        if used_bytes > plan.room_bytes or rows > plan.rows or ragged_bytes > plan.ragged_bytes:
            return None
        return Cursor(ragged_bytes, rows, used_bytes, cursor.is_short)

    def _locked_cursor(self) -> Cursor:
        return Cursor(*_CURSOR.unpack(os.pread(self.segment.fd, _CURSOR.size, CURSOR_AT)))

    def _set(self, cursor: Cursor) -> None:
        """Write the cursor; the caller holds its lock."""
        self.segment.write(_CURSOR.pack(*cursor), CURSOR_AT)

    def expect_short(self) -> None:
        """Log no warning that the cache cannot hold all samples."""
        with flocked(self.segment.reopen, wait_s=_LOCK_WAIT_S, failed=_lock_denied) as has_lock:
            if has_lock:
                self._set(self._locked_cursor()._replace(is_short=1))

    def publish(self, index: int, entry: int) -> None:
        """Show an entry of the table to all processes, at once and after the payload written before.

        Raises:
            SharedMemoryError: There is no memory for the table, or it cannot be mapped.
        """
        offset = TABLE_AT + index * ENTRY_BYTES
        if self._pages is None:
            nbytes = TABLE_AT + self.plan.num_samples * ENTRY_BYTES
            self._words = memoryview(pages := self.segment.map(writable=True, nbytes=nbytes)).cast("Q")
            self._pages = pages
        page = offset // PAGE_BYTES
        if page not in self._allocated:
            populate(self._pages, page * PAGE_BYTES, PAGE_BYTES)
            self._allocated.add(page)
        fence()
        self._words[offset // ENTRY_BYTES] = entry

    def _write(self, buffers: Sequence[Any], offset: int) -> None:
        """Write buffers one after another; joining them would take as much memory again."""
        for buffer in buffers:
            view = memoryview(buffer)
            if view.nbytes:
                self.segment.write(view.cast("B"), offset)
            offset += view.nbytes


def _lock_denied(error: OSError) -> None:
    say_once(
        "cache: some samples are read from the dataset on every access: the lock on the cache cannot be "
        f"taken: {error}"
    )


def log_short(max_bytes: int, num_held: int, num_samples: int, needed: str = "of several sizes") -> None:
    """Warn that the cache holds only some of the samples."""
    log.warning(
        "cache: max_memory=%s holds only %s of %s samples (%.0f%%), %s: the others are read again on "
        "every access. Increase max_memory=, or shrink the samples in pre_transform=",
        *(readable_size(max_bytes), f"{num_held:,}", f"{num_samples:,}", 100 * num_held / num_samples),
        needed,
    )
