"""Arena: a segment of shared memory that describes itself, and the records in it, stored under a budget.

`shared` stores samples by index in one arena, `store` files by key in several. A segment has, in order:

    header       magic, format version; crc32 and length of the description
    cursor       at byte 64: how much space is claimed, and the number of records
    state        at byte 80: words of 8 bytes, see `_RESERVED` and below
    description  at byte 192: JSON, ASCII
    table        at 1 MiB, levels of entries of 8 bytes; 0 = nothing is stored, else the offset of a record
    space        columns of uniform samples, then records one after another, aligned to 64 bytes, each behind
                 a frame: its key of 16 bytes, its length, and the offset of the record that its entry led to
                 before, or 0

The entry of a key is its number modulo the size of the level. Keys that share an entry form a chain, the
newest first. When there are as many records as a level has entries, the next level takes the new ones, and
nothing moves. Rules:

1. Space is claimed and never given back: the memory goes with the last process that holds the segment. The
   claims together never exceed the limit. Before it takes memory, a process asks `can_grow`.
2. Processes read through a PROT_READ mapping. They write with pwrite, which reports missing memory, and then
   publish an entry of the table. A writer that dies in between leaves nothing to repair. Of two writers that
   publish the same entry at once, one can lose its record: the next access is a miss.
3. The lock on claims is a try-lock, on a file description opened for this purpose: flock does not exclude
   processes that share an inherited one. A process that does not get the lock claims nothing.
4. The descriptor is closed with the object. Views of the memory keep the mapping, and with it the memory.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import struct
import sys
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
DESCRIPTION_AT = 192
TABLE_AT = 1 << 20  # address space: unwritten pages take no memory
ENTRY_BYTES = 8

_HEADER = struct.Struct("<8sIIQ")  # magic, version; crc32 and length of the description
_MAGIC = b"FLcache\0"
_VERSION = 11
_CURSOR = struct.Struct("<qq")
# Words of the state: how much memory of the machine stays free; whether growth has stopped there; whether
# something had no room; whether every process should let go of the segment; when something was found or
# stored last, and when a loader needed the segment last.
_STATE_AT, _NUM_WORDS = CURSOR_AT + _CURSOR.size, 6
_RESERVED, _HAS_STOPPED, _IS_SHORT, _IS_RETIRED, _HIT_MS, _KEPT_MS = range(_NUM_WORDS)
_TOUCH_EVERY_S = 1.0
# A user's limit is followed until only this share of the memory that was free is left.
_MIN_RESERVE_SHARE = 0.05
_FRAME = struct.Struct("<16sQQ")
_MAX_CHAIN = 1000  # far more than records share an entry: damaged memory can lead around
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


def table_end(num_entries: int) -> int:
    """Where columns or records begin behind a table."""
    return round_up(TABLE_AT + num_entries * ENTRY_BYTES, PAGE_BYTES)


def fixed_bytes(fields: dict[str, Any]) -> int:
    """What a segment with this description takes of its limit before anything is stored in it, at most."""
    description_bytes = DESCRIPTION_AT + 512 + len(json.dumps(fields))
    # Two pages, which columns and records use in part.
    return (
        round_up(description_bytes, PAGE_BYTES) + table_end(sum(fields["levels"])) - TABLE_AT + 2 * PAGE_BYTES
    )


class Cursor(NamedTuple):
    """How much of an arena is claimed for records: where the next one begins, and how many there are."""

    end_bytes: int = 0
    num_records: int = 0

    def after(self, nbytes: int) -> Cursor:
        """The cursor behind one more record of ``nbytes``."""
        return Cursor(self.end_bytes + claimed_bytes(nbytes), self.num_records + 1)


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
        num_entries: Of the table, in all its levels.
        inode: Of the segment; no two segments that are open have the same.
        memory: The bytes of the segment, read-only; if it cannot be mapped, those of an empty header.
        entries: The table as Python numbers; zeros that take no memory if it cannot be mapped.
        table: The same, `(num_entries,) intp`.
        is_full: Whether memory for an entry, or for the segment itself, could not be allocated.
        is_hit: Whether this process has found or stored something since `touch`.
    """

    def __init__(self, segment: Segment, fields: dict[str, Any], mapping: mmap.mmap | None = None) -> None:
        self.segment, self.fields = segment, fields
        self.name, self.pid = str(fields["name"]), int(fields["pid"])
        self.created_s, self.max_bytes = float(fields["created_s"]), int(fields["max_bytes"])
        self.num_entries, self._room_bytes = sum(fields["levels"]), int(fields["room_bytes"])
        self._records_at, self._entry_bytes = int(fields["records_at"]), int(fields["entry_bytes"])
        self.inode = 0
        self.is_hit, self._touch_at_s = False, 0.0
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
        self.is_full = mapping is None
        self._table_end = TABLE_AT + self.num_entries * ENTRY_BYTES
        self.memory = memoryview(bytes(DESCRIPTION_AT) if mapping is None else mapping)
        self.table: npt.NDArray[np.intp] = np.broadcast_to(np.intp(0), self.num_entries)
        self.entries: Any = self.table
        if mapping is not None:
            self.entries = self.memory[TABLE_AT : self._table_end].cast("Q")
            self.table = np.frombuffer(self.entries, np.intp)
        self._cursor = self.memory[CURSOR_AT:_STATE_AT].cast("q")
        self._levels: Sequence[tuple[int, int]] = ()  # that lead to records, as of `_levels_of`
        self._level_end = 0  # how many records they can lead to
        self._state = self.memory[_STATE_AT : _STATE_AT + _NUM_WORDS * 8].cast("q")
        self._growth = GrowthCheck(unused_bytes)  # the mapping has taken its address space already
        self._lock_wait_s = _LOCK_WAIT_S
        self._writable: tuple[mmap.mmap, memoryview] | None = None  # up to the end of the table
        self._allocated: set[int] = set()  # pages of the table that a store cannot lack memory for

    @classmethod
    def create(
        cls, fields: dict[str, Any], max_bytes: int, reserved_bytes: int, *, sparing: bool = False
    ) -> Arena:
        """A new sealed segment.

        Args:
            fields: The description: `name`, `kind`; `levels`, their sizes, ascending; `records_at` and
                `room_bytes`, where the records lie and what they can take, each with `entry_bytes` for the
                table; and what the cache needs; JSON.
            max_bytes: The most memory that it takes; most of it takes none yet.
            reserved_bytes: Memory of the machine that it leaves free while it grows.
            sparing: As of `Segment.map`.

        Raises:
            SharedMemoryError: The memory could not be allocated, or the system does not allow to lock it, as
                records need it.
        """
        fields = {**fields, "id": os.urandom(8).hex(), "pid": os.getpid(), "created_s": time.time()}
        fields["max_bytes"] = max_bytes
        text = json.dumps(fields).encode("ascii")
        if DESCRIPTION_AT + len(text) > TABLE_AT:
            raise SharedMemoryError(f"the structure of a sample takes {readable_size(len(text))}")
        nbytes = fields["records_at"] + fields["room_bytes"] + ALIGNMENT_BYTES
        segment = Segment.create(nbytes, name=SEGMENT_NAME, sealed=True)
        try:
            mapping = segment.map(writable=False, sparing=sparing)
            segment.write(text, DESCRIPTION_AT)
            segment.write(reserved_bytes.to_bytes(8, "little"), _STATE_AT)
            # Last: a segment without a header is not a cache.
            segment.write(_HEADER.pack(_MAGIC, _VERSION, zlib.crc32(text), len(text)))
            if not fields.get("columns"):  # which nobody claims
                with flocked(segment.reopen):
                    pass
        except (SharedMemoryError, OSError) as error:
            segment.close()
            raise SharedMemoryError(f"cannot write to a new shared segment, or lock it: {error}") from error
        return cls(segment, fields, mapping)

    @classmethod
    def attach(cls, segment: Segment) -> Arena:
        """The arena in a segment of another process, which is closed if this fails.

        Raises:
            CacheMismatchError: The segment is not a cache of this format version, or its size could change.
            SharedMemoryError: It would take most of the address space that is left.
        """
        try:
            return cls(segment, _read_description(segment), segment.map(writable=False, sparing=True))
        except (CacheMismatchError, SharedMemoryError):
            segment.close()
            raise

    def close(self) -> None:
        """Release the segment; views of its memory stay valid, and nothing is found or stored any more."""
        if self.unregister is not None:
            self.unregister()
        self.segment.close()
        self._use(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return Arena, (self.segment, self.fields)  # as a segment is pickled

    @property
    def nbytes(self) -> int:
        """Memory in use now, by all processes together."""
        return os.fstat(self.segment.fd).st_blocks * 512 if self.segment.fd >= 0 else 0

    @property
    def num_records(self) -> int:
        """How many records are stored now."""
        return self._cursor[1]

    # --- room ---------------------------------------------------------------------------------------------

    def allows(self, nbytes: int) -> bool:
        """Whether a record of ``nbytes`` is within the limit."""
        return self._is_within(Cursor(*self._cursor).after(nbytes))

    def _is_within(self, cursor: Cursor) -> bool:
        return cursor.end_bytes + cursor.num_records * self._entry_bytes <= self._room_bytes

    def can_grow(self, nbytes: int, on_stop: Callable[[int], object]) -> bool:
        """Whether the machine has memory for ``nbytes`` more, beside what the cache leaves free.

        Args:
            nbytes: The size of the next sample.
            on_stop: Called with the free bytes when there are too few for the first time in any process.

        Raises:
            OSError: The system has no memory left.
        """
        if self.is_full or self._growth.allows(self.nbytes, nbytes, self._state[_RESERVED]):
            return not self.is_full
        if not self._state[_HAS_STOPPED]:  # without a lock: at worst, two processes say it
            self._set(_HAS_STOPPED, 1)
            on_stop(self._growth.free_bytes)
        return False

    @property
    def is_short(self) -> bool:
        """Whether something had no room."""
        return bool(self._state[_IS_SHORT])

    def set_short(self) -> None:
        """Let all processes know that something had no room."""
        self._set(_IS_SHORT, 1)

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

    # --- the life of a segment ----------------------------------------------------------------------------

    @property
    def is_retired(self) -> bool:
        """Whether every process should let go of it."""
        return bool(self._state[_IS_RETIRED])

    def retire(self) -> None:
        """Let every process let go of it; the memory goes with the last one."""
        self._set(_IS_RETIRED, 1)

    def touch(self, now_s: float) -> None:
        """Note that this process has found or stored something since it was called last, if it has."""
        if self.is_hit and now_s >= self._touch_at_s:
            self._touch_at_s, self.is_hit = now_s + _TOUCH_EVERY_S, False
            self._set(_HIT_MS, int(now_s * 1000))

    def keep(self, now_s: float) -> None:
        """Note that a loader needs it, though it may read others now."""
        self._set(_KEPT_MS, int(now_s * 1000))

    @property
    def hit_s(self) -> float:
        """When something was found or stored last, to a few seconds of `time.monotonic`."""
        return self._state[_HIT_MS] / 1000

    @property
    def used_s(self) -> float:
        """When it was hit or kept last."""
        return max(self.hit_s, self._state[_KEPT_MS] / 1000)

    def _set(self, word: int, value: int) -> None:
        """Change a word of the state, which is only a hint."""
        with contextlib.suppress(SharedMemoryError):  # no address space is left for a second mapping
            self._words()[1][_STATE_AT // ENTRY_BYTES + word] = value

    # --- records ------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> memoryview | None:
        """The record under a key of 16 bytes; None if there is none."""
        num_records = self._cursor[1]
        if num_records > self._level_end:
            self._levels = levels = self._levels_of(num_records)
            is_last = sum(levels[0]) == self.num_entries
            self._level_end = sys.maxsize if is_last else levels[0][1]
        memory, entries, number, left = self.memory, self.entries, int.from_bytes(key, "little"), _MAX_CHAIN
        for start, size in self._levels:
            at = entries[start + number % size]
            while at and left and self._records_at < at <= len(memory):
                # An address that depends on the entry is read after it (see `memory.memory_model`).
                stored_key, nbytes, before = _FRAME.unpack_from(memory, at - _FRAME.size)
                if stored_key == key:
                    self.is_hit = True
                    return memory[at : at + nbytes]
                at, left = before, left - 1
        return None

    def _levels_of(self, num_records: int) -> list[tuple[int, int]]:
        """Start and size of the levels that so many records take, the newest first.

        Reading the others would give them memory.
        """
        sizes = self.fields["levels"]
        levels = list(zip(itertools.accumulate(sizes, initial=0), sizes, strict=False))
        return levels[sum(size < num_records for size in sizes[:-1]) :: -1]

    def put(self, key: bytes, parts: Sequence[Any]) -> bool:
        """Store a record, unless it is stored; False if there is no room, or another process holds the lock.

        Args:
            key: Of 16 bytes.
            parts: The record.

        Raises:
            OSError: The system has no memory left.
        """
        nbytes = sum(memoryview(part).nbytes for part in parts)
        with self._locked() as cursor:
            if cursor is None or self.find(key) is not None:
                return cursor is not None
            after = cursor.after(nbytes)
            if not self._is_within(after):
                return False
            self.segment.write(_CURSOR.pack(*after), CURSOR_AT)
        start, size = self._levels_of(after.num_records)[0]
        index = start + int.from_bytes(key, "little") % size
        at = self._records_at + cursor.end_bytes + ALIGNMENT_BYTES
        self.write(parts, at)
        # Last: others can have published the same entry meanwhile.
        self.segment.write(_FRAME.pack(key, nbytes, self.entries[index]), at - _FRAME.size)
        self.publish(index, at)
        self.is_hit = True
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Cursor | None]:
        """The cursor, which only this caller changes meanwhile; None: others hold the lock."""
        with flocked(self.segment.reopen, wait_s=self._lock_wait_s, failed=_lock_denied) as has_lock:
            self._lock_wait_s = _LOCK_WAIT_S if has_lock else 0.0  # its holder may have been stopped
            text = os.pread(self.segment.fd, _CURSOR.size, CURSOR_AT) if has_lock else b""
            yield Cursor(*_CURSOR.unpack(text)) if has_lock else None

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

    def _words(self) -> tuple[mmap.mmap, memoryview]:
        if self._writable is None:
            pages = self.segment.map(writable=True, nbytes=self._table_end)
            self._writable = pages, memoryview(pages).cast("Q")
        return self._writable


def _read_description(segment: Segment) -> dict[str, Any]:
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
