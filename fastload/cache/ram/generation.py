"""One generation of a shared cache: its segment, mapped in this process, and how samples are read and stored.

Rules:

1. Processes read through a PROT_READ mapping and write with pwrite: first the payload, then the 8 bytes of
   the table that publish it. A writer that dies in between leaves an empty entry and nothing to repair. This
   relies on x86, where stores are seen in order; each read also checks the frame of a ragged record.
2. If all uniform samples have a row, their rows need no lock, because all writers of a row write the same
   bytes. All other space is claimed by increasing a number under a try-lock: ragged space, and rows of a
   cache that cannot hold all samples. A process that does not get the lock returns the sample uncached.
3. The claims together never exceed the budget.
4. The lock is taken on a file description opened for this purpose: flock does not exclude processes that
   share an inherited one.
5. The descriptor is closed with the object, so a thread that still writes to an old generation never writes
   to another file. Views of samples keep the mapping, and with it the memory.

`SharedMemoryCache.retain` makes a new generation. The process that makes it writes to the old segment where
the new one can be reached: a descriptor of its own, as an entry of the registry would tell it. Rules:

1. A generation is complete before any other process can find it. If the maker dies before that, nothing has
   changed for the others.
2. The pointer in the old segment has a checksum and is written before the number that announces it, so a
   process sees it complete or not at all.
3. Every access of a process compares the announced number with the number that it has dealt with. If they
   differ, the process attaches to the new generation and gives up the old one.
4. The descriptor in the pointer is the maker's anchor (see `shared`), which always refers to the newest
   generation that the maker holds. So one step is enough for a process that missed several generations.
5. If the maker is gone, other owners of the cache are asked, if it is registered. If the new generation
   cannot be reached at all, the process goes on with the old one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import weakref
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastload.cache.columns import ColumnReader
from fastload.cache.locks import locked
from fastload.cache.ram import owners
from fastload.cache.ram.layout import (
    CURSOR_AT,
    ENTRY_BYTES,
    FRAME_BYTES,
    RETAINS_ALL,
    SUCCESSOR_AT,
    TABLE_AT,
    Layout,
    Stamp,
)
from fastload.cache.record import ALIGNMENT_BYTES, decode, record_parts
from fastload.errors import SegmentError
from fastload.memory.segment import round_up
from fastload.system.logs import log, say_once
from fastload.system.sizes import readable_size

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator, Sequence

    from fastload.cache.columns import Allocate
    from fastload.cache.ram.owners import Entry
    from fastload.memory.segment import Segment
    from fastload.nested.spec import Spec

EMPTY, NOT_RETAINED = 0, 2
WORD_BYTES = 8
NOT_MAPPED = -1
SHORT = 1  # a flag: a warning was logged, or is not wanted, that the cache cannot hold all samples

_CURSOR = struct.Struct("<QQQQ")
_ENTRY = struct.Struct("<Q")
_FRAME = struct.Struct("<8sQQ")  # magic, index, bytes of the record
_FRAME_MAGIC = b"FLragged"
_MOST_BUFFERS = 512  # a call takes up to 1024 (IOV_MAX)
_LOCK_ATTEMPTS = 50  # each yields the core once; the lock is held for a few microseconds
_POINTER = struct.Struct("<QQQQQ")  # number of the generation; pid, start, descriptor and namespace
_CRC = struct.Struct("<I")
_POINTER_AT = SUCCESSOR_AT + WORD_BYTES
_UNKNOWN = b"\xff" * 16  # no digest of samples that somebody retains


class Cursor(NamedTuple):
    """How much of a generation is claimed.

    Attributes:
        ragged_bytes: Claimed bytes of the ragged area.
        given_up: Rows that a ragged record replaces, if each sample has a row of its own.
        rows: Claimed rows, if rows are given out one after another.
        flags: What was said or decided for all processes, see `Generation.flag`.
    """

    ragged_bytes: int
    given_up: int
    rows: int
    flags: int


class Generation:
    """One segment of a shared cache.

    Args:
        segment: The segment; the generation owns it from here on.
        plan: Its layout.
        mapping: The segment, read-only; None to map it at the first access.

    Attributes:
        segment: As given.
        plan: As given.
        successor: A view of one item: the number of the next generation, or 0 before there is one.
        followed: The successor's number that this process has dealt with; `NOT_MAPPED` before the mapping.
        entries: The table of all samples, of Python numbers.
        table: The same, `(num_samples,) intp`.
        columns: Reads uniform samples; None if there are none.
        is_full: Whether the system has refused memory for another sample, or the segment itself.
    """

    __slots__ = (
        *("__weakref__", "_cursor", "_memory"),
        *("columns", "entries", "followed", "is_full", "plan", "segment", "successor", "table"),
    )

    def __init__(self, segment: Segment, plan: Layout, mapping: mmap.mmap | None = None) -> None:
        self.segment = segment
        self.plan = plan
        self.successor = self._cursor = memoryview(bytes(WORD_BYTES)).cast("Q")
        self.followed = NOT_MAPPED
        self.columns: ColumnReader | None = None
        self.is_full = False
        self._memory = memoryview(b"")
        self.entries = self._memory.cast("Q")
        self.table = np.empty(0, np.intp)
        if mapping is not None:
            self._use(mapping)
        weakref.finalize(self, segment.close).atexit = False

    def map(self) -> None:
        """Map the segment; if this process cannot do that, it finds nothing cached and stores nothing."""
        try:
            self._use(self.segment.map(writable=False))
        except SegmentError as error:  # for this process only: other processes may have other limits
            log.warning(
                "process %d reads all samples from the dataset, because it cannot map their cache: %s",
                os.getpid(),
                str(error),  # the error itself would keep this frame alive in a log handler
            )
            self.use_nothing()

    def use_nothing(self) -> None:
        """Let this process find nothing cached, and store nothing: the number of the generation is 0."""
        self.is_full = True
        self._use(bytes(TABLE_AT + self.plan.num_samples * ENTRY_BYTES))

    def _use(self, mapping: mmap.mmap | bytes) -> None:
        plan = self.plan
        self._memory = memoryview(mapping)
        self.entries = self._memory[TABLE_AT : TABLE_AT + plan.num_samples * ENTRY_BYTES].cast("Q")
        if plan.spec is not None and not self.is_full:
            self.columns = ColumnReader(plan.spec, plan.columns, plan.rows, mapping)
        self.table = np.frombuffer(self.entries, np.intp)
        self._cursor = self._memory[CURSOR_AT : CURSOR_AT + _CURSOR.size].cast("Q")
        self.successor = self._memory[SUCCESSOR_AT : SUCCESSOR_AT + WORD_BYTES].cast("Q")
        self.followed = 0  # last: other threads check this attribute before they use the others

    # --- properties ---------------------------------------------------------------------------------------

    @property
    def stamp(self) -> Stamp:
        """Which generation of which cache it is."""
        return Stamp.parse(self._memory)

    @property
    def num_cached(self) -> int:
        """How many samples are stored now."""
        return int(np.count_nonzero(self.table)) - int(np.count_nonzero(self.table == NOT_RETAINED))

    @property
    def num_retained(self) -> int:
        """How many samples may be stored."""
        return self.plan.num_samples - int(np.count_nonzero(self.table == NOT_RETAINED))

    @property
    def nbytes(self) -> int:
        """Memory in use now, by all processes together."""
        return os.fstat(self.segment.fd).st_blocks * 512 if self.segment.fd >= 0 else 0

    def missing(self) -> npt.NDArray[np.intp]:
        """Indices of samples that are not stored and fit, ascending; the first ones if not all fit."""
        if self.is_full:
            return np.empty(0, np.intp)
        plan = self.plan
        empty = np.flatnonzero(self.table == EMPTY)
        if plan.is_packed:
            return empty[: self._rows_left(Cursor(*self._cursor))]
        only_rows = plan.spec is not None and plan.spare_bytes < plan.row_bytes
        return empty[empty < plan.rows] if only_rows else empty

    # --- reading ------------------------------------------------------------------------------------------

    def holds(self, index: int) -> bool:
        """Whether a sample is stored now."""
        entry: int = self.entries[index]
        return entry not in (EMPTY, NOT_RETAINED)

    def is_retained(self, index: int) -> bool:
        """Whether a sample may be stored."""
        entry: int = self.entries[index]
        return entry != NOT_RETAINED

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
        return self.columns.gather(entries >> 1 if self.plan.is_packed else indices, allocate)

    # --- writing ------------------------------------------------------------------------------------------

    def put(self, index: int, spec: Spec, values: list[Any]) -> bool:
        """Store a sample; False if it does not fit, is not retained, or another process holds the lock.

        Raises:
            OSError: The system refused the memory.
            MemoryError: This process gets no more memory.
        """
        if self.entries[index] != EMPTY:
            return self.holds(index)
        plan = self.plan
        if plan.spec is None or spec.node != plan.spec.node:
            return self._put_ragged(index, spec, values)
        # Claims only grow, so the cursor can be read without the lock here.
        if not (self._rows_left(Cursor(*self._cursor)) if plan.is_packed else index < plan.rows):
            # Usually the budget is too small: return before the record is built.
            return plan.spare_bytes >= plan.row_bytes and self._put_ragged(index, spec, values)
        parts = [column.pack(value) for column, value in zip(plan.columns, values, strict=True)]
        if any(part is None for part in parts):
            return self._put_ragged(index, spec, values)
        row = self._claim_row(index) if plan.is_packed else index
        if row is None:
            return self.holds(index)
        for column, part in zip(plan.columns, parts, strict=True):
            self._write([part], column.offset + row * column.row_bytes)
        self.publish(index, 2 * row + 1)
        return True

    def _put_ragged(self, index: int, spec: Spec, values: list[Any]) -> bool:
        parts, nbytes = record_parts(spec, values)
        offset = self._claim_bytes(index, round_up(FRAME_BYTES + nbytes, ALIGNMENT_BYTES))
        if offset is None:
            return self.holds(index)
        frame = _FRAME.pack(_FRAME_MAGIC, index, nbytes).ljust(FRAME_BYTES, b"\0")
        self._write([frame, *parts], offset)
        self.publish(index, offset)
        return True

    def _rows_left(self, cursor: Cursor) -> int:
        """How many rows can be claimed, if rows are given out one after another."""
        plan = self.plan
        rows = plan.rows - cursor.rows
        free_bytes = plan.spare_bytes + rows * plan.row_bytes - cursor.ragged_bytes
        if cursor.ragged_bytes:
            free_bytes -= plan.shared_bytes
        return max(0, min(rows, free_bytes // max(1, plan.row_bytes)))

    @contextlib.contextmanager
    def _claiming(self, index: int | None = None) -> Iterator[Cursor | None]:
        """Hold the lock on the cursor, to make room for a sample; gives the cursor.

        None if another process holds the lock, the system refuses it, or the sample was stored meanwhile.
        """
        with locked(self.segment.reopen, attempts=_LOCK_ATTEMPTS, refused=_lock_refused) as has_lock:
            if has_lock and (index is None or self.entries[index] == EMPTY):
                yield Cursor(*_CURSOR.unpack(os.pread(self.segment.fd, _CURSOR.size, CURSOR_AT)))
            else:
                yield None

    def _set(self, cursor: Cursor) -> None:
        """Write the cursor; the caller holds its lock."""
        os.pwrite(self.segment.fd, _CURSOR.pack(*cursor), CURSOR_AT)

    def _claim_row(self, index: int) -> int | None:
        """The number of a row that only this caller may write, or None."""
        with self._claiming(index) as cursor:
            if cursor is None or not self._rows_left(cursor):
                return None
            self._set(cursor._replace(rows=cursor.rows + 1))
            return cursor.rows

    def _claim_bytes(self, index: int, nbytes: int) -> int | None:
        """The offset of ragged space that only this caller may write, or None."""
        plan = self.plan
        with self._claiming(index) as cursor:
            if cursor is None:
                return None
            end = cursor.ragged_bytes + nbytes
            if plan.is_packed:
                given_up = 0
                free_bytes = plan.spare_bytes + (plan.rows - cursor.rows) * plan.row_bytes - plan.shared_bytes
            else:
                given_up = cursor.given_up + (index < plan.rows)
                free_bytes = plan.spare_bytes + given_up * plan.untouched_bytes
            if end <= min(free_bytes, plan.ragged_bytes):
                self._set(cursor._replace(ragged_bytes=end, given_up=given_up))
                return plan.ragged_at + cursor.ragged_bytes
            is_first = self._set_flag(cursor, SHORT)
        if is_first:
            self._log_short(is_budget=end > free_bytes)
        return None

    def _log_short(self, *, is_budget: bool) -> None:
        plan = self.plan
        if is_budget and plan.spec is None:
            log_short(plan.budget_bytes, self.num_cached, plan.num_samples)
            return
        reason = f"larger than the examples, by which {readable_size(plan.ragged_bytes)} were reserved"
        if is_budget:
            reason = (
                f"of other shapes than the examples, and the budget is {readable_size(plan.budget_bytes)}"
            )
        log.warning("cache: some samples are read from the dataset at each access: they are %s", reason)

    def flag(self, flag: int) -> bool:
        """Set a flag that all processes see; True if this call has set it."""
        with self._claiming() as cursor:
            return cursor is not None and self._set_flag(cursor, flag)

    def _set_flag(self, cursor: Cursor, flag: int) -> bool:
        if cursor.flags & flag:
            return False
        self._set(cursor._replace(flags=cursor.flags | flag))
        return True

    @property
    def flags(self) -> int:
        """The flags that are set."""
        return Cursor(*self._cursor).flags

    def publish(self, index: int, entry: int) -> None:
        """Write an entry of the table; the payload must be written before."""
        os.pwrite(self.segment.fd, _ENTRY.pack(entry), TABLE_AT + index * ENTRY_BYTES)

    def _write(self, buffers: Sequence[Any], offset: int) -> None:
        """Write buffers one after another, without joining them, which would take as much memory again."""
        fd = self.segment.fd
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

    # --- the next generation ------------------------------------------------------------------------------

    def retain(self, retained: npt.NDArray[np.bool_], flags: int) -> None:
        """Mark the samples that may be stored in this new, empty generation, which nobody else knows yet.

        Args:
            retained: `(num_samples,) bool`.
            flags: Of the generation before.

        Raises:
            OSError: The system refused the memory for the table.
        """
        table = np.where(retained, EMPTY, NOT_RETAINED)
        self.segment.write(_CURSOR.pack(0, 0, 0, flags), CURSOR_AT)
        self.segment.write(table.astype("<i8").tobytes(), TABLE_AT)

    def widen(self, retained: npt.NDArray[np.bool_], digest: bytes) -> bool:
        """Allow more samples in this generation; the caller holds its lock.

        Args:
            retained: Which samples may be stored, `(num_samples,) bool`.
            digest: Of `retained`.

        Returns:
            False, with nothing changed, if a sample that may be stored now is not in `retained`.

        Raises:
            OSError: The system refused the memory.
        """
        is_out = self.table == NOT_RETAINED
        if (~retained & ~is_out).any():
            return False
        stamp = self.stamp
        stamp._replace(digest=_UNKNOWN).write(self.segment)  # in case this process is killed half-way
        opened = np.flatnonzero(retained & is_out)
        starts = np.flatnonzero(np.diff(opened, prepend=-2) != 1)
        for run in np.split(opened, starts[1:]):
            if len(run):
                self.segment.write(bytes(ENTRY_BYTES * len(run)), TABLE_AT + ENTRY_BYTES * int(run[0]))
        stamp._replace(digest=digest).write(self.segment)
        return True


def _lock_refused(error: OSError) -> None:
    say_once(
        "cache: some samples are read from the dataset at each access: the lock on the cache cannot be "
        f"taken: {error}"
    )


def log_short(budget_bytes: int, num_held: int, num_samples: int, needed_bytes: float | None = None) -> None:
    """Warn that the budget holds a part of the samples only."""
    log.warning(
        "cache: the budget of %s holds only %s of %s samples (%.0f%%)%s: the others are read again at each "
        "access. Give a larger budget=, or let prepare= make the samples smaller",
        readable_size(budget_bytes),
        f"{num_held:,}",
        f"{num_samples:,}",
        100 * num_held / num_samples,
        "" if needed_bytes is None else f", which need about {readable_size(needed_bytes)}",
    )


# --- the way to the next generation ----------------------------------------------------------------------


def digest_of(retained: npt.NDArray[np.bool_]) -> bytes:
    """The digest by which processes compare the samples that they retain.

    Args:
        retained: `(num_samples,) bool`.
    """
    if retained.all():
        return RETAINS_ALL
    return hashlib.blake2b(np.packbits(retained).tobytes(), digest_size=len(RETAINS_ALL)).digest()


def announce(old: Generation, number: int, holder: Entry) -> None:
    """Write to an old generation where its successor is; the caller holds the old generation's lock.

    Args:
        old: The old generation.
        number: The successor's number.
        holder: The process that holds the successor, and its descriptor.

    Raises:
        OSError: The system refused the memory.
    """
    pointer = _POINTER.pack(number, holder.pid, holder.started, holder.fd, holder.namespace)
    old.segment.write(pointer + _CRC.pack(zlib.crc32(pointer)), _POINTER_AT)
    os.pwrite(old.segment.fd, _ENTRY.pack(number), SUCCESSOR_AT)  # last


def attach(old: Generation) -> Generation | None:
    """The newest generation that this process can reach and map; None if there is none after the old one."""
    stamp = old.stamp
    for entry in _holders(old):
        segment = _open(entry, stamp)
        if segment is None:
            continue
        try:
            return Generation(segment, old.plan, segment.map(writable=False))
        except SegmentError as error:  # of this process only: other processes may have other limits
            segment.close()
            log.info("cache: process %d keeps an older part of it: %s", os.getpid(), str(error))
    return None


def attach_to(entry: Entry, cache_id: int) -> Segment:
    """The segment of a cache that another process holds, for a process that had no generation of it.

    Raises:
        SegmentError: The process is gone, or may not be asked, or its descriptor is not this cache.
    """
    segment = _open(entry, Stamp(0, cache_id, RETAINS_ALL))
    if segment is None:
        raise SegmentError(
            f"cannot attach the shared cache at /proc/{entry.pid}/fd/{entry.fd}. "
            "Its owner must be alive, of the same user and in the same PID namespace."
        )
    return segment


def _holders(old: Generation) -> Iterator[Entry]:
    """Processes that may hold a later generation."""
    fingerprint = old.plan.origin.fingerprint
    name = "" if fingerprint is None else fingerprint.name
    raw = os.pread(old.segment.fd, _POINTER.size + _CRC.size, _POINTER_AT)
    pointer = raw[: _POINTER.size]
    if _CRC.unpack_from(raw, _POINTER.size)[0] == zlib.crc32(pointer):
        _, pid, started, fd, namespace = _POINTER.unpack(pointer)
        yield owners.Entry(name, pid, started, fd, namespace)
    if name:
        yield from owners.entries(name)


def _open(entry: Entry, after: Stamp) -> Segment | None:
    """The segment behind an entry, if it is a later generation of the same cache than a stamp's."""
    if not entry.is_alive:
        return None
    try:
        segment = entry.attach()
    except (owners.UnreachableOwnerError, owners.StaleEntryError) as error:
        log.info("cache: process %d does not reach process %d: %s", os.getpid(), entry.pid, str(error))
        return None
    stamp = Stamp.read(segment) if segment.is_sealed and segment.is_own else None
    if stamp is None or stamp.cache_id != after.cache_id or stamp.number <= after.number:
        segment.close()
        return None
    return segment
