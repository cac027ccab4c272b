"""Arena: a segment of shared memory that describes itself, and the space in it, claimed under a budget.

What the table means is up to the cache: `shared` stores samples by index, `table` files by key. A segment
has, in order:

    header       magic, format version; crc32 and length of the description
    cursor       at byte 64: how much space is claimed
    reserve      at byte 96: how much memory of the machine stays free; whether growth has stopped there;
                 whether every process should let go of the segment
    description  at byte 128: JSON, ASCII
    table        at 1 MiB, entries of 8 bytes; 0 = nothing is stored
    space        columns of uniform samples, then records one after another, aligned to 64 bytes, each after a
                 frame: its key of 16 bytes, and its length

Rules:

1. Space is claimed and never given back: the memory goes with the last process that holds the segment. The
   claims together never exceed the limits. Before it takes memory, a process asks `can_grow`.
2. Processes read through a PROT_READ mapping. They write with pwrite, which reports missing memory, and then
   publish an entry of the table. A writer that dies in between leaves an empty entry and nothing to repair.
3. The lock on claims is a try-lock, on a file description opened for this purpose: flock does not exclude
   processes that share an inherited one. A process that does not get the lock claims nothing.
4. The descriptor is closed with the object. Views of the memory keep the mapping, and with it the memory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import operator
import os
import struct
import time
import weakref
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastload.cache.records import ALIGNMENT_BYTES
from fastload.errors import CacheMismatchError, SharedMemoryError
from fastload.memory.memory_model import fence
from fastload.memory.segment import PAGE_BYTES, Segment, populate, round_up, with_limit
from fastload.system.budget import AUTO_SHARE, GrowthCheck, available_bytes, limit_bytes, unused_bytes
from fastload.system.humanize import readable_size
from fastload.system.locks import flocked
from fastload.system.logs import log, say_once
from fastload.system.ranks import count_ranks_of_host

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

SEGMENT_NAME = "fastload-cache"
CURSOR_AT = 64
DESCRIPTION_AT = 128
TABLE_AT = 1 << 20  # address space: unwritten pages take no memory
ENTRY_BYTES = 8

_HEADER = struct.Struct("<8sIIQ")  # magic, version; crc32 and length of the description
_MAGIC = b"FLcache\0"
_VERSION = 10
_CURSOR = struct.Struct("<qqqq")
# A user's limit is followed until only this share of the memory that was free is left.
_MIN_RESERVE_SHARE = 0.05
_RESERVE_AT = CURSOR_AT + _CURSOR.size
_RESERVE = struct.Struct("<qqq")
_RETIRED = (1).to_bytes(8, "little")
_FRAME = struct.Struct("<16sQ")
# The lock is held for a few microseconds, or for some time slices of a busy machine.
_LOCK_WAIT_S = 0.1


def claimed_bytes(nbytes: int) -> int:
    """What a record of ``nbytes`` takes of the space."""
    return round_up(_FRAME.size + nbytes, ALIGNMENT_BYTES)


def budget_bytes(max_memory: str | float, *, is_shared: bool) -> int:
    """The limit for a cache in RAM; a private one gets this rank's share of the free memory."""
    free_bytes = available_bytes() // (1 if is_shared else count_ranks_of_host())
    return limit_bytes(max_memory, free_bytes)


def reserve_bytes(max_memory: str | float) -> int:
    """How much memory a cache with this limit, made now, leaves free while it grows."""
    return int(available_bytes() * (1 - AUTO_SHARE if max_memory == "auto" else _MIN_RESERVE_SHARE))


# --- space -----------------------------------------------------------------------------------------------


class Cursor(NamedTuple):
    """How much of an arena is claimed for records, or can be.

    Attributes:
        end_bytes: Where the next record begins.
        num_records: How many there are.
        used_bytes: What they take of the budget.
        is_short: Whether the warning that the space is short was logged, or is unwanted.
    """

    end_bytes: int = 0
    num_records: int = 0
    used_bytes: int = 0
    is_short: int = 0

    def after(self, space_bytes: int, used_bytes: int) -> Cursor:
        """The cursor behind one more record."""
        end_bytes, num_records = self.end_bytes + space_bytes, self.num_records + 1
        return Cursor(end_bytes, num_records, self.used_bytes + used_bytes, self.is_short)


class Arena:
    """A segment, mapped in this process; without a descriptor, it holds and stores nothing.

    Args:
        segment: The segment; the arena owns it from here on.
        fields: Its description.
        mapping: The segment, read-only; None to map it now.

    Attributes:
        fields: As given.
        name: Under which processes find it; empty if it is private.
        pid: The process that made it.
        created_s: When it was made, in seconds since 1970.
        max_bytes: The most memory that it takes.
        inode: Of the segment; no two segments that are open have the same.
        memory: The bytes of the segment, read-only; if it cannot be mapped, those of an empty header.
        entries: The table as Python numbers; zeros that take no memory if it cannot be mapped.
        table: The same, `(num_entries,) intp`.
        is_full: Whether memory for an entry, or for the segment itself, could not be allocated.
    """

    def __init__(self, segment: Segment, fields: dict[str, Any], mapping: mmap.mmap | None = None) -> None:
        self.segment, self.fields = segment, fields
        self.name, self.pid = str(fields["name"]), int(fields["pid"])
        self.created_s, self.max_bytes = float(fields["created_s"]), int(fields["max_bytes"])
        self._records_at, self._limits = int(fields["records_at"]), Cursor(*fields["limits"])
        self.inode = 0
        self.unregister: Callable[[], object] | None = None  # takes it out of the registry
        if segment.fd >= 0:
            self.inode = os.fstat(segment.fd).st_ino
            weakref.finalize(self, segment.close).atexit = False
            try:
                mapping = mapping or segment.map(writable=False)
            except SharedMemoryError as error:  # for this process only: others can have other limits
                reason = with_limit(error.__cause__) if isinstance(error.__cause__, OSError) else error
                say_once(
                    f"process {os.getpid()} reads all samples from the dataset, because it cannot map their "
                    f"cache: {reason}"
                )
        self._use(mapping)

    def _use(self, mapping: mmap.mmap | None) -> None:
        """Read the segment through a mapping; nothing, if there is none."""
        num_entries = self.fields["num_entries"]
        self.is_full = mapping is None
        self._table_end = TABLE_AT + num_entries * ENTRY_BYTES
        self.memory = memoryview(bytes(DESCRIPTION_AT) if mapping is None else mapping)
        self.table: npt.NDArray[np.intp] = np.broadcast_to(np.intp(0), num_entries)
        self.entries: Any = self.table
        if mapping is not None:
            self.entries = self.memory[TABLE_AT : self._table_end].cast("Q")
            self.table = np.frombuffer(self.entries, np.intp)
        self._cursor = self.memory[CURSOR_AT : CURSOR_AT + _CURSOR.size].cast("q")
        self._reserve = self.memory[_RESERVE_AT : _RESERVE_AT + _RESERVE.size].cast("q")
        self._growth = GrowthCheck(unused_bytes)  # the mapping has taken its address space already
        self._lock_wait_s = _LOCK_WAIT_S
        self._writable: tuple[mmap.mmap, memoryview] | None = None  # up to the end of the table
        self._allocated: set[int] = set()  # pages of the table that a store cannot lack memory for

    @classmethod
    def create(
        cls,
        name: str,
        max_bytes: int,
        plan: Callable[[int], dict[str, Any]],
        *,
        min_bytes: int,
        reserved_bytes: int,
        sparing: bool = False,
    ) -> Arena:
        """A new sealed segment, smaller than ``max_bytes`` if the system demands it.

        Args:
            name: Under which processes find it.
            max_bytes: The most memory that it takes; most of it takes none yet.
            plan: The description for a limit: `kind`, `num_entries`, `records_at`, and what can be claimed as
                `limits`; JSON.
            min_bytes: The smallest limit.
            reserved_bytes: Memory of the machine that it leaves free while it grows.
            sparing: As of `Segment.map`.

        Raises:
            SharedMemoryError: The memory could not be allocated.
        """
        wanted_bytes, reason = max_bytes, ""
        while True:
            fields = {"name": name, "pid": os.getpid(), "created_s": time.time(), "max_bytes": max_bytes}
            fields |= {"id": os.urandom(8).hex(), **plan(max_bytes)}
            try:
                segment, mapping = _create_segment(fields, sparing=sparing)
                break
            except SharedMemoryError as error:
                reason = reason or str(error)
                max_bytes //= 2
                if max_bytes < min_bytes:
                    raise
        if reason:
            level = logging.INFO if fields.get("columns", sparing) else logging.WARNING
            sizes = readable_size(max_bytes), readable_size(wanted_bytes)
            log.log(level, "cache: it has a segment of %s instead of %s: %s", *sizes, reason)
        arena = cls(segment, fields, mapping)
        arena.leave_free(reserved_bytes)
        return arena

    @classmethod
    def attach(cls, segment: Segment) -> Arena:
        """The arena in a segment of another process, which is closed if this fails.

        Raises:
            CacheMismatchError: The segment is not a cache of this format version, or its size could change.
            SharedMemoryError: It would take most of the address space that is left.
        """
        try:
            return cls(segment, read_description(segment), segment.map(writable=False, sparing=True))
        except (CacheMismatchError, SharedMemoryError):
            segment.close()
            raise

    def close(self) -> None:
        """Release the segment; views of its memory stay valid, and nothing is found or stored any more."""
        if self.unregister is not None:
            self.unregister()
        self.segment.close()
        self._use(None)

    def check_lock(self) -> None:
        """Check that space can be claimed.

        Raises:
            SharedMemoryError: The system does not allow it; the arena was closed.
        """
        try:
            with flocked(self.segment.reopen):
                pass
        except OSError as error:
            self.close()
            raise SharedMemoryError(f"the system does not allow locks on shared memory: {error}") from error

    @property
    def nbytes(self) -> int:
        """Memory in use now, by all processes together."""
        return os.fstat(self.segment.fd).st_blocks * 512 if self.segment.fd >= 0 else 0

    @property
    def cursor(self) -> Cursor:
        """About how much is claimed now; without the lock, the figures can be of different moments."""
        return Cursor(*self._cursor)

    def leave_free(self, reserved_bytes: int, *, has_stopped: bool = False) -> None:
        """Set how much memory of the machine the cache leaves free while it grows, in all processes."""
        self.segment.write(_RESERVE.pack(reserved_bytes, has_stopped, False)[: -len(_RETIRED)], _RESERVE_AT)

    def can_grow(self, nbytes: int, on_stop: Callable[[int], object]) -> bool:
        """Whether the machine has memory for ``nbytes`` more, beside what the cache leaves free.

        Args:
            nbytes: The size of the next sample.
            on_stop: Called with the free bytes when there are too few for the first time in any process.

        Raises:
            OSError: The system has no memory left.
        """
        reserved_bytes = self._reserve[0]
        if self._growth.allows(self.nbytes, nbytes, reserved_bytes):
            return True
        if not self._reserve[1]:  # without a lock: at worst, two processes say it
            self.leave_free(reserved_bytes, has_stopped=True)
            on_stop(self._growth.free_bytes)
        return False

    @contextlib.contextmanager
    def locked(self) -> Iterator[Cursor | None]:
        """The cursor, which only `move` by this caller changes meanwhile; None: others hold the lock."""
        with flocked(self.segment.reopen, wait_s=self._lock_wait_s, failed=_lock_denied) as has_lock:
            self._lock_wait_s = _LOCK_WAIT_S if has_lock else 0.0  # its holder may have been stopped
            yield (
                Cursor(*_CURSOR.unpack(os.pread(self.segment.fd, _CURSOR.size, CURSOR_AT)))
                if has_lock
                else None
            )

    def move(self, cursor: Cursor) -> None:
        """Claim the space before a cursor; only under the lock."""
        self.segment.write(_CURSOR.pack(*cursor), CURSOR_AT)

    def allows(self, cursor: Cursor) -> bool:
        """Whether a cursor is within the limits."""
        return all(map(operator.le, cursor[:3], self._limits))

    def expect_short(self) -> None:
        """Let no process warn that the space is short."""
        with self.locked() as cursor:
            if cursor is not None:
                self.move(cursor._replace(is_short=1))

    @property
    def is_retired(self) -> bool:
        """Whether every process should let go of it."""
        return bool(self._reserve[2])

    def retire(self) -> None:
        """Let every process let go of it; the memory goes with the last one."""
        with contextlib.suppress(OSError):
            self.segment.write(_RETIRED, _RESERVE_AT + _RESERVE.size - len(_RETIRED))

    @contextlib.contextmanager
    def growing(self) -> Iterator[None]:
        """A block that stores something; an arena that cannot grow is slower, but not an error."""
        try:
            yield
        except (OSError, MemoryError) as error:
            self.is_full = True
            log.warning(
                "the cache stops growing at %s of %s, the rest is read from the dataset: %s",
                readable_size(self.nbytes),
                readable_size(self.max_bytes),
                str(error),  # the error itself would keep this frame alive in a log handler
            )

    def store(
        self,
        key: bytes,
        parts: Sequence[Any],
        used_bytes: int,
        slot: Callable[[int], int | None],
        entry_of: Callable[[int], int] = int,
        taken: int = 0,
        ran_short: Callable[[], None] | None = None,
    ) -> bool:
        """Claim space, write a record, and publish its entry.

        Args:
            key: Of 16 bytes.
            parts: The record.
            used_bytes: What it takes of the budget.
            slot: Gives the entry for a record, by the number of records; -1 if there is none, and None if the
                record is stored. Called under the lock.
            entry_of: Makes the entry of the record's offset.
            taken: The entry while the record is written.
            ran_short: Called in the first process that finds no room.

        Returns:
            False if there is no room, or another process holds the lock.

        Raises:
            OSError: The system has no memory left.
        """
        nbytes = sum(memoryview(part).nbytes for part in parts)
        with self.locked() as cursor:
            if cursor is None or (index := slot(cursor.num_records)) is None:
                return cursor is not None
            after = cursor.after(claimed_bytes(nbytes), used_bytes)
            if index < 0 or not self.allows(after):
                self.move(cursor._replace(is_short=1))
                if ran_short is not None and not cursor.is_short:
                    ran_short()
                return False
            if taken:
                self.publish(index, taken)
            self.move(after)
        at = self._records_at + cursor.end_bytes + ALIGNMENT_BYTES
        self.write([_FRAME.pack(key, nbytes), *parts], at - _FRAME.size)
        self.publish(index, entry_of(at))
        return True

    def record(self, at: int, key: bytes) -> memoryview | None:
        """The record of a key, at the offset to which an entry leads; None if it is not there."""
        if not self._records_at < at <= len(self.memory):
            return None
        stored_key, nbytes = _FRAME.unpack_from(self.memory, at - _FRAME.size)
        return self.memory[at : at + nbytes] if stored_key == key else None

    def write(self, buffers: Sequence[Any], offset: int) -> None:
        """Write buffers one after another; joining them would take as much memory again.

        Raises:
            OSError: The system has no memory left.
        """
        for buffer in buffers:
            view = memoryview(buffer)
            if view.nbytes:
                self.segment.write(view.cast("B"), offset)
            offset += view.nbytes

    def publish(self, index: int, entry: int) -> None:
        """Show an entry of the table to all processes, at once and after the payload written before.

        Raises:
            SharedMemoryError: There is no memory for the table, or it cannot be mapped.
        """
        pages, words = self._words()
        place = TABLE_AT // ENTRY_BYTES + index
        page = place * ENTRY_BYTES // PAGE_BYTES
        if page not in self._allocated:
            populate(pages, page * PAGE_BYTES, PAGE_BYTES)  # raises here, where a store would be a SIGBUS
            self._allocated.add(page)
        # Two phases: the payload, which `write` has stored, then the entry that leads to it. The fence keeps
        # this order on processors that reorder stores. The entry is one aligned store of 8 bytes, so no
        # reader sees half of it. Readers need no fence, because they compute the address of the payload from
        # the entry (see `memory.memory_model`).
        fence()
        words[place] = entry

    @property
    def words(self) -> memoryview:
        """The header and the table as words of 8 bytes that this process can write.

        A store to a page that has no memory yet can end the process with a SIGBUS.

        Raises:
            SharedMemoryError: They cannot be mapped.
        """
        return self._words()[1]

    def _words(self) -> tuple[mmap.mmap, memoryview]:
        if self._writable is None:
            pages = self.segment.map(writable=True, nbytes=self._table_end)
            self._writable = pages, memoryview(pages).cast("Q")
        return self._writable


def _create_segment(fields: dict[str, Any], *, sparing: bool) -> tuple[Segment, mmap.mmap]:
    text = json.dumps(fields).encode("ascii")
    if DESCRIPTION_AT + len(text) > TABLE_AT:
        raise SharedMemoryError(f"the structure of a sample takes {readable_size(len(text))}")
    nbytes = fields["records_at"] + fields["limits"][0] + ALIGNMENT_BYTES
    segment = Segment.create(nbytes, name=SEGMENT_NAME, sealed=True)
    try:
        mapping = segment.map(writable=False, sparing=sparing)
        segment.write(text, DESCRIPTION_AT)
        # Last: a segment without a header is not a cache.
        segment.write(_HEADER.pack(_MAGIC, _VERSION, zlib.crc32(text), len(text)))
    except (SharedMemoryError, OSError) as error:
        segment.close()
        raise SharedMemoryError(f"cannot write to a new shared segment: {error}") from error
    return segment, mapping


def read_description(segment: Segment) -> dict[str, Any]:
    """The description in a segment.

    Raises:
        CacheMismatchError: The segment is not a cache of this format version, or its size could change.
    """
    if not segment.is_sealed or not segment.is_own:
        raise CacheMismatchError("not a shared cache: its size could change, or it belongs to another user")
    magic, version, crc, length = _HEADER.unpack(os.pread(segment.fd, _HEADER.size, 0))
    if magic != _MAGIC or version != _VERSION:
        raise CacheMismatchError(
            f"not a shared cache of format {_VERSION}, which this release of fastload uses: it starts with "
            f"{magic!r} and {version}"
        )
    text = os.pread(segment.fd, min(length, TABLE_AT), DESCRIPTION_AT)
    if zlib.crc32(text) != crc:
        raise CacheMismatchError("not a shared cache: its description is damaged")
    fields: dict[str, Any] = json.loads(text)
    return fields


def _lock_denied(error: OSError) -> None:
    say_once(
        "cache: some samples are read from the dataset on every access: the lock on the cache cannot be "
        f"taken: {error}"
    )
