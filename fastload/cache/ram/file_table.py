"""FileTable: decoded files in one segment of shared memory, found by keys of 16 bytes.

In the space of the segment (see `arena`):

    words        64 words of 8 bytes: whether the table is retired, what had no room, and when the loaders of
                 each process have used it last (some processes share a word)
    levels       hash tables of 4,096, 16,384, 65,536, ... entries of 8 bytes
    records      the key, and a length; plain values as `marshal` writes them; the array, aligned to 64 bytes

An entry is a tag of 23 bits of the key, and the offset of the record in units of 64 bytes. The number of
files is unknown, so the table grows: when half of a level's entries are taken, the next level, four times as
large, takes the new ones. Nothing moves. Rules:

1. The entry is a hint: the key in the record decides.
2. An entry is taken under the lock on claims, and leads nowhere until its record is written. A writer that
   dies in between leaves the entry and the space, and nothing to repair.
3. Two processes that decode the same file at the same time can both store it. Both records are right.
"""

from __future__ import annotations

import bisect
import contextlib
import marshal
import os
import struct
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastload.cache.ram.arena import (
    CURSOR_AT,
    ENTRY_BYTES,
    TABLE_AT,
    Arena,
    Cursor,
    create_segment,
    read_description,
)
from fastload.errors import CacheMismatchError, SharedMemoryError
from fastload.memory.segment import PAGE_BYTES, round_up
from fastload.readers.decode_cache import Stored
from fastload.readers.identity import is_plain
from fastload.system.locks import flocked
from fastload.system.logs import log, say_once

if TYPE_CHECKING:
    import mmap

    import numpy.typing as npt

    from fastload.memory.segment import Segment

ALIGNMENT_BYTES = 64
RECORD_BYTES = 512  # a table has entries for records of this size on average; smaller ones fill it earlier
MIN_TABLE_BYTES = 1 << 20

_KIND = "files"
_RETIRED, _WANTED_BYTES, _USED_MS = 0, 1, range(8, 64)  # words
_NUM_WORDS, _FIRST_LEVEL, _LEVEL_GROWTH = 64, 4096, 4
_MAX_PROBES = 64
_TAG_SHIFT = 41
_OFFSET_MASK = (1 << _TAG_SHIFT) - 1
_TAKEN = 1  # the offset of an entry whose record is not written yet
_HOME_MASK = (1 << 31) - 1
_ENTRY_COST_BYTES = 64  # of a file in the levels, at most: a new level is touched long before it is full
_TOUCH_EVERY_S = 5.0

_KEY = struct.Struct("<QQ")
_HEAD = struct.Struct("<16sQ")  # key, length of the plain values


# --- records ---------------------------------------------------------------------------------------------


class Record(NamedTuple):
    """An array and its note, as they are stored.

    Attributes:
        key: Their key.
        home: Where its search starts in every level.
        tag: The part of the key that its entry holds.
        buffers: The bytes, one buffer after another.
        nbytes: Their size.
    """

    key: bytes
    home: int
    tag: int
    buffers: tuple[Any, ...]
    nbytes: int


def home_and_tag(key: bytes) -> tuple[int, int]:
    """Where the search for a key starts, and what its entry holds of it."""
    low, high = _KEY.unpack(key)
    return low & _HOME_MASK, high >> _TAG_SHIFT


def encode(key: bytes, array: npt.NDArray[Any], note: Any) -> Record | None:
    """The record of an array and a note; None if they would not come back as they are."""
    if type(array) is not np.ndarray or array.dtype.hasobject or np.dtype(array.dtype.str) != array.dtype:
        return None
    order = "F" if array.flags.fnc else "C"
    if not is_plain(note):
        return None
    text = marshal.dumps((array.dtype.str, array.shape, order, note), 4)
    pixels = np.ascontiguousarray(array.T if order == "F" else array).reshape(-1).view(np.uint8)
    start_bytes = round_up(_HEAD.size + len(text), ALIGNMENT_BYTES)
    start = (_HEAD.pack(key, len(text)) + text).ljust(start_bytes, b"\0")
    nbytes = round_up(start_bytes + pixels.nbytes, ALIGNMENT_BYTES)
    return Record(key, *home_and_tag(key), (start, pixels), nbytes)


def decode(memory: memoryview, offset: int, key: bytes) -> Stored | None:
    """What the record at an offset holds, as views of the memory; None if it is not the record of the key."""
    stored_key, length = _HEAD.unpack_from(memory, offset)
    if stored_key != key:
        return None
    start = offset + _HEAD.size
    try:
        dtype, shape, order, note = marshal.loads(memory[start : start + length])
        array_at = offset + round_up(_HEAD.size + length, ALIGNMENT_BYTES)
        return Stored(np.ndarray(shape, dtype, memory, array_at, order=order), note)
    except Exception:  # noqa: BLE001  # damaged bytes can mean anything
        return None


# --- tables ----------------------------------------------------------------------------------------------


def table_bytes_for(nbytes: int) -> int:
    """The size of a table in which a record of ``nbytes`` has room."""
    return nbytes + _ENTRY_COST_BYTES + _taken_bytes()


def _taken_bytes() -> int:
    """The header, the words, partly used pages, and the first level."""
    return 4 * PAGE_BYTES + _FIRST_LEVEL * ENTRY_BYTES


class _Plan:
    """The offsets and sizes in a table of ``max_bytes``, the same in every process."""

    def __init__(self, max_bytes: int) -> None:
        self.levels: list[tuple[int, int]] = []  # the index of the first entry, the number of entries
        self.max_files: list[int] = []  # when each level, and those before it, are half full
        end, size, files = _NUM_WORDS, _FIRST_LEVEL, 0
        while not self.levels or files < max_bytes // RECORD_BYTES:
            files += size // 2
            self.levels.append((end, size))
            self.max_files.append(files)
            end, size = end + size, size * _LEVEL_GROWTH
        self.num_entries = end
        self.space_at = round_up(TABLE_AT + end * ENTRY_BYTES, PAGE_BYTES)
        self.nbytes = self.space_at + round_up(max_bytes, PAGE_BYTES)
        self.limits = Cursor(max_bytes, files, max_bytes - _taken_bytes())


class FileTable:
    """A segment of decoded files.

    Args:
        segment: A segment that `create` made; the table owns it from here on.
        mapping: The segment, read-only; None to map it now.

    Attributes:
        arena: The segment and its space.
        name: The name of its store.
        max_bytes: The most memory that it takes.
        created_s: When it was made, in seconds since 1970.
        inode: Of the segment; no two segments that are open have the same.
        lacks_memory: Whether the machine had too little memory for what this process wanted to store last.

    Raises:
        CacheMismatchError: The segment is not such a table.
    """

    def __init__(self, segment: Segment, mapping: mmap.mmap | None = None) -> None:
        try:
            fields = read_description(segment)
            if fields.get("kind") != _KIND:
                raise CacheMismatchError("not a table of decoded files")
        except CacheMismatchError:
            segment.close()
            raise
        self.name: str = fields["name"]
        self.max_bytes: int = fields["max_bytes"]
        self.created_s: float = fields["created_s"]
        self.inode = os.fstat(segment.fd).st_ino
        self._plan = _Plan(self.max_bytes)
        self.arena = Arena(segment, self._plan.num_entries, self._plan.limits, mapping)
        self._entries, self._memory = self.arena.entries, self.arena.memory
        self._num_files = self._memory[CURSOR_AT + 8 : CURSOR_AT + 16].cast("q")
        self._levels: tuple[tuple[int, int], ...] = ()  # those in use, the newest first
        self._next_level_files = 0
        self._is_used, self._touch_at_s = False, 0.0
        self.lacks_memory = False

    @classmethod
    def create(cls, max_bytes: int, name: str, reserved_bytes: int) -> FileTable:
        """A new, empty table, smaller than ``max_bytes`` if the system demands it.

        Args:
            max_bytes: The most memory that it takes.
            name: The name of its store.
            reserved_bytes: Memory of the machine that it leaves free while it grows.

        Raises:
            SharedMemoryError: The memory, or a lock, is not available.
        """
        while True:
            fields = {"kind": _KIND, "name": name, "max_bytes": max_bytes, "created_s": time.time()}
            try:
                segment, mapping = create_segment(_Plan(max_bytes).nbytes, fields, sparing=True)
                break
            except SharedMemoryError:
                max_bytes //= 2
                if max_bytes < MIN_TABLE_BYTES:
                    raise
        try:
            with flocked(segment.reopen):
                pass
            table = cls(segment, mapping)
            table.arena.leave_free(reserved_bytes)
            table.arena.publish(_USED_MS[0], int(time.monotonic() * 1000))
        except (OSError, MemoryError) as error:
            segment.close()
            raise SharedMemoryError(f"a new shared segment cannot be locked or written: {error}") from error
        return table

    @property
    def num_files(self) -> int:
        """How many files are stored now."""
        return int(np.count_nonzero((self._used_entries() & _OFFSET_MASK) > _TAKEN))

    def _used_entries(self) -> npt.NDArray[np.intp]:
        self._find_levels()
        end = sum(self._levels[0]) if self._levels else _NUM_WORDS
        return self.arena.table[_NUM_WORDS:end]

    def _find_levels(self) -> None:
        """Look which levels are in use; reading the others would give them memory."""
        starts, files = [1, *self._plan.max_files[:-1]], self._num_files[0]
        number = sum(start <= files for start in starts)
        self._next_level_files = [*starts, sys.maxsize][number]
        self._levels = tuple(reversed(self._plan.levels[:number]))

    # --- reading -----------------------------------------------------------------------------------------

    def get(self, key: bytes, home: int, tag: int) -> Stored | None:
        """What is stored under a key, if anything; its home and tag are those of `home_and_tag`."""
        stored = self._search(key, home, tag)
        self._is_used |= stored is not None
        return stored

    def _search(self, key: bytes, home: int, tag: int) -> Stored | None:
        if self._num_files[0] >= self._next_level_files:
            self._find_levels()
        entries = self._entries
        for first, size in self._levels:
            place = home & (size - 1)
            while entry := entries[first + place]:  # half of the entries of a level are never taken
                if entry >> _TAG_SHIFT == tag:
                    offset = (entry & _OFFSET_MASK) * ALIGNMENT_BYTES
                    # An address that depends on the entry is read after it (see `memory.memory_model`).
                    if offset >= self._plan.space_at and (stored := decode(self._memory, offset, key)):
                        return stored
                place = (place + 1) & (size - 1)
        return None

    # --- writing -----------------------------------------------------------------------------------------

    def has_room(self, nbytes: int) -> bool:
        """Whether a record of ``nbytes`` fits, and will stay."""
        if self.arena.is_full or self.is_retired:
            return False
        cursor, limits = self.arena.cursor, self._plan.limits
        return (
            cursor.used_bytes + nbytes + _ENTRY_COST_BYTES <= limits.used_bytes and cursor.rows < limits.rows
        )

    @property
    def is_short(self) -> bool:
        """Whether something had no room, or its memory was lacking."""
        return bool(self.arena.cursor.is_short)

    @property
    def wanted_bytes(self) -> int:
        """The size of the largest record that had no room."""
        return int(self._entries[_WANTED_BYTES])

    def ask_for_more(self, nbytes: int) -> None:
        """Tell the processes that make tables that a record of ``nbytes`` had no room."""
        if nbytes > self.wanted_bytes:
            self._set_word(_WANTED_BYTES, nbytes)
        if not self.is_short:
            self.arena.expect_short()

    def put(self, record: Record) -> bool:
        """Store a record; False if it does not fit, or another process holds the lock."""
        arena, (key, home, tag, buffers, nbytes) = self.arena, record
        taken: list[int] = []

        def advance(cursor: Cursor) -> Cursor | None:
            if self._search(key, home, tag) is not None:
                return None
            used_bytes = cursor.used_bytes + nbytes + _ENTRY_COST_BYTES
            return Cursor(cursor.ragged_bytes + nbytes, cursor.rows + 1, used_bytes, cursor.is_short)

        def reserve(cursor: Cursor) -> bool:
            index = self._free_entry(cursor.rows, home)
            if index is None:
                return False
            arena.publish(index, tag << _TAG_SHIFT | _TAKEN)
            taken.append(index)
            return True

        try:
            self.lacks_memory = not arena.can_grow(nbytes, _log_stopped)
            if self.lacks_memory:
                self.ask_for_more(nbytes)
                return False
            cursor = arena.claim(advance, lambda: None, reserve)
            if cursor is None:
                return self._search(key, home, tag) is not None
            offset = self._plan.space_at + cursor.ragged_bytes
            arena.write(buffers, offset)
            arena.publish(taken[0], tag << _TAG_SHIFT | offset // ALIGNMENT_BYTES)
            self._is_used = True
        except (OSError, MemoryError) as error:  # a store that cannot grow is slower, but not an error
            arena.is_full = True
            log.warning("cache: a segment of decoded files stops growing: %s", str(error))
            return False
        return True

    def _free_entry(self, num_files: int, home: int) -> int | None:
        """The index of a free entry in the level that the file after ``num_files`` others belongs to."""
        plan = self._plan
        first, size = plan.levels[bisect.bisect_right(plan.max_files, num_files)]
        places = (first + (place & (size - 1)) for place in range(home, home + _MAX_PROBES))
        return next((place for place in places if not self._entries[place]), None)

    # --- the life of a table -----------------------------------------------------------------------------

    def touch(self, now_s: float, owner_pid: int, began_s: float | None) -> None:
        """Note that this process, which reads files, uses the table, if it does; others then let it be.

        Args:
            now_s: Of `time.monotonic`.
            owner_pid: Of the process that owns the loader.
            began_s: When its loaders began to read: what was used since then, they read again. None: they
                have ended, or this is a worker.
        """
        place = _USED_MS[owner_pid % len(_USED_MS)]
        is_kept = began_s is not None and self._entries[place] >= began_s * 1000
        if (self._is_used or is_kept) and now_s >= self._touch_at_s:
            self._touch_at_s, self._is_used = now_s + _TOUCH_EVERY_S, False
            self._set_word(place, int(now_s * 1000))

    def _set_word(self, index: int, value: int) -> None:
        """Change a word that is only a hint; `create` has given them memory."""
        with contextlib.suppress(SharedMemoryError):  # no address space is left for a second mapping
            self.arena.words[TABLE_AT // ENTRY_BYTES + index] = value

    @property
    def used_s(self) -> float:
        """When a loader used the table last, to a few seconds of `time.monotonic`."""
        return float(max(self._entries[_USED_MS.start : _USED_MS.stop])) / 1000

    @property
    def is_retired(self) -> bool:
        """Whether every process should let go of it."""
        return bool(self._entries[_RETIRED])

    def retire(self) -> None:
        """Let every process let go of it; the memory goes with the last one."""
        self._set_word(_RETIRED, 1)


def _log_stopped(_: int) -> None:
    say_once(
        "cache: no more files are remembered until memory becomes free: what is free now is left to the "
        "model, the workers and other caches. The other files are decoded again on every access"
    )
