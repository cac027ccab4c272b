"""Table: records under keys of 16 bytes, in one segment of shared memory.

In the space of the segment (see `arena`):

    words     64 words of 8 bytes: when a record was found last, and a loader needed the table last
    levels    hash tables of 4,096, 16,384, 65,536, ... entries of 8 bytes, each at the index that is its size
    records

An entry is a tag of 23 bits of the key, and the offset of the record in units of 64 bytes. The number of
records is unknown, so the table grows: when it holds half as many as a level has entries, the next one takes
the new ones. Nothing moves. Rules:

1. The entry is a hint: the key before the record decides.
2. An entry is taken under the lock on claims, and leads nowhere until its record is written. A writer that
   dies in between leaves the entry and the space, and nothing to repair.
"""

from __future__ import annotations

import contextlib
import struct
import time
from typing import TYPE_CHECKING, Any

from fastload.cache.ram.arena import CURSOR_AT, ENTRY_BYTES, TABLE_AT, Arena, claimed_bytes
from fastload.cache.records import ALIGNMENT_BYTES
from fastload.errors import SharedMemoryError
from fastload.memory.segment import PAGE_BYTES, round_up
from fastload.system.logs import say_once

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_TABLE_BYTES = 1 << 20

KIND = "files"
_HIT_MS, _KEPT_MS = range(2)  # words
_FIRST_LEVEL, _LEVEL_GROWTH = 4096, 4
_MEAN_RECORD_BYTES = 1024  # smaller records fill a table earlier
_MAX_PROBES = 64
_TAG_SHIFT = 41
_OFFSET_MASK = (1 << _TAG_SHIFT) - 1
_HOME_MASK = (1 << 31) - 1
_TAKEN = 1  # the offset of an entry whose record is not written yet
_ENTRY_COST_BYTES = 64  # of a record in the levels, at most: a new level is touched long before it is full
_TOUCH_EVERY_S = 1.0

_KEY = struct.Struct("<QQ")


def home_and_tag(key: bytes) -> tuple[int, int]:
    """Where the search for a key starts in every level, and what its entry holds of it."""
    low, high = _KEY.unpack(key)
    return low & _HOME_MASK, high >> _TAG_SHIFT


def _taken_bytes() -> int:
    """The header, the words, partly used pages, and the first level."""
    return 4 * PAGE_BYTES + _FIRST_LEVEL * ENTRY_BYTES


def _level_after(num_records: int) -> int:
    """The level that takes the next record."""
    size = _FIRST_LEVEL
    while num_records >= size // 2:
        size *= _LEVEL_GROWTH
    return size


class Table:
    """A segment of records.

    Args:
        arena: A segment that `create` made, and its space.

    Attributes:
        arena: As given.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._entries = arena.entries
        self._num_records = arena.memory[CURSOR_AT + 8 : CURSOR_AT + 16].cast("q")
        self._levels: tuple[int, ...] = ()  # those in use, the newest first
        self._next_level_at = 1  # records
        self._is_hit, self._touch_at_s = False, 0.0

    @classmethod
    def create(cls, max_bytes: int, name: str, reserved_bytes: int) -> Table:
        """A new, empty table, smaller than ``max_bytes`` if the system demands it.

        Args:
            max_bytes: The most memory that it takes.
            name: The name of its store.
            reserved_bytes: Memory of the machine that it leaves free while it grows.

        Raises:
            SharedMemoryError: The memory, or a lock, is not available.
        """
        arena = Arena.create(
            name,
            max_bytes,
            _plan,
            min_bytes=min(max_bytes, MIN_TABLE_BYTES),
            reserved_bytes=reserved_bytes,
            sparing=True,
        )
        arena.check_lock()
        arena.publish(_KEPT_MS, int(time.monotonic() * 1000))
        return cls(arena)

    @property
    def num_records(self) -> int:
        """How many records are stored now."""
        return self.arena.cursor.num_records

    def _find_levels(self) -> None:
        """Look which levels are in use; reading the others would give them memory."""
        levels, num_records = [], self._num_records[0]
        if num_records:
            last, level = _level_after(num_records - 1), _FIRST_LEVEL
            while level <= last:
                levels.append(level)
                level *= _LEVEL_GROWTH
        self._levels = tuple(reversed(levels))
        self._next_level_at = levels[-1] // 2 + 1 if levels else 1

    # --- reading -----------------------------------------------------------------------------------------

    def get(self, key: bytes, home: int, tag: int) -> memoryview | None:
        """The record under a key, if there is one; its home and tag are those of `home_and_tag`."""
        record = self._search(key, home, tag)
        self._is_hit |= record is not None
        return record

    def _search(self, key: bytes, home: int, tag: int) -> memoryview | None:
        if self._num_records[0] >= self._next_level_at:
            self._find_levels()
        entries = self._entries
        for level in self._levels:
            place = home & (level - 1)
            while entry := entries[level + place]:  # half of the entries of a level are never taken
                if entry >> _TAG_SHIFT == tag:
                    # An address that depends on the entry is read after it (see `memory.memory_model`).
                    record = self.arena.record((entry & _OFFSET_MASK) * ALIGNMENT_BYTES, key)
                    if record is not None:
                        return record
                place = (place + 1) & (level - 1)
        return None

    # --- writing -----------------------------------------------------------------------------------------

    def has_room(self, nbytes: int) -> bool:
        """Whether a record of ``nbytes`` fits, and will stay."""
        arena, space_bytes = self.arena, claimed_bytes(nbytes)
        if arena.is_full or arena.is_retired:
            return False
        after = arena.cursor.after(space_bytes, space_bytes + _ENTRY_COST_BYTES)
        return arena.allows(after) and arena.can_grow(space_bytes, _log_stopped)

    @property
    def is_short(self) -> bool:
        """Whether something had no room."""
        return bool(self.arena.cursor.is_short)

    def put(self, key: bytes, parts: Sequence[Any], nbytes: int) -> bool:
        """Store a record of ``nbytes``; False if it does not fit, or another process holds the lock."""
        (home, tag), space_bytes = home_and_tag(key), claimed_bytes(nbytes)

        def slot(num_records: int) -> int | None:
            if self._search(key, home, tag) is not None:
                return None
            level = _level_after(num_records)
            places = (level + (place & (level - 1)) for place in range(home, home + _MAX_PROBES))
            return next((place for place in places if not self._entries[place]), -1)

        def entry_of(at: int) -> int:
            return tag << _TAG_SHIFT | at // ALIGNMENT_BYTES

        with self.arena.growing():
            used_bytes = space_bytes + _ENTRY_COST_BYTES
            is_stored = self.arena.store(key, parts, used_bytes, slot, entry_of, entry_of(0) | _TAKEN)
            self._is_hit |= is_stored
            return is_stored
        return False

    # --- the life of a table -----------------------------------------------------------------------------

    def touch(self, now_s: float) -> None:
        """Note that this process has found or stored something since it was called last, if it has."""
        if self._is_hit and now_s >= self._touch_at_s:
            self._touch_at_s, self._is_hit = now_s + _TOUCH_EVERY_S, False
            self._set_word(_HIT_MS, int(now_s * 1000))

    def keep(self, now_s: float) -> None:
        """Note that a loader needs the table, though it may read others now."""
        self._set_word(_KEPT_MS, int(now_s * 1000))

    @property
    def hit_s(self) -> float:
        """When a record was found or stored last, to a few seconds of `time.monotonic`."""
        return float(self._entries[_HIT_MS]) / 1000

    @property
    def used_s(self) -> float:
        """When the table was hit or kept last."""
        return max(self.hit_s, float(self._entries[_KEPT_MS]) / 1000)

    def _set_word(self, index: int, value: int) -> None:
        """Change a word that is only a hint; `create` has given them memory."""
        with contextlib.suppress(SharedMemoryError):  # no address space is left for a second mapping
            self.arena.words[TABLE_AT // ENTRY_BYTES + index] = value


def _plan(max_bytes: int) -> dict[str, Any]:
    last = _level_after(max_bytes // _MEAN_RECORD_BYTES)
    return {
        "kind": KIND,
        "num_entries": 2 * last,
        "records_at": round_up(TABLE_AT + 2 * last * ENTRY_BYTES, PAGE_BYTES),
        "limits": (max_bytes, last // 2, max_bytes - _taken_bytes()),
    }


def _log_stopped(_: int) -> None:
    say_once(
        "cache: no more files are remembered until memory becomes free: what is free now is left to the "
        "model, the workers and other caches. The other files are decoded again on every access"
    )
