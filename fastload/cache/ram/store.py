"""SharedStore: what this user's processes on this machine decode of files, whichever dataset reads them.

The store consists of tables, each in an `Arena` of its own, which processes find through the `registry`. The
number of files is unknown, so a table has levels of 4,096, 32,768, 262,144, ... entries. Rules:

1. A process reads all tables, and appends to the oldest one that has room. It holds what it found, and the
   memory of a table goes with the last process that holds it, never under a reader.
2. The process that opens the store makes tables up to its limit; unwritten ones take no memory. Workers make
   none, because they end too early. One that finds no room says so in the newest table. A record that is
   larger than a table, an eighth of the limit, is not kept.
3. The tables that a process sees stay together within its own limit, so the largest limit of all processes
   holds, and each one watches the free memory of the machine while it fills a table.
4. Nothing is evicted singly. When there is no room, a table goes as a whole: one in which nobody has found
   anything for five minutes, and that no live loader has used in its last epoch, or in this one. So the files
   of a training outlive its validation, and those that changed do not. Each process lets go of it soon.
5. Processes that could see other files under the same names have stores of their own: other users, machines,
   PID and mount namespaces, and root directories.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.cache.ram import registry
from fastload.cache.ram.arena import ENTRY_BYTES, Arena, reserve_bytes, table_end
from fastload.errors import SharedMemoryError
from fastload.memory import segment
from fastload.memory.segment import PAGE_BYTES
from fastload.readers.reasons import FULL
from fastload.system.budget import available_bytes, limit_bytes, parse_memory
from fastload.system.logs import log, say_once

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

_FORMAT = 5  # of tables and records
NAME_PREFIX = "files-"
_NUM_TABLES = 8  # that share the limit
_MIN_TABLE_BYTES = 4 << 20
_FIRST_LEVEL, _LEVEL_GROWTH = 4096, 8
_MEAN_RECORD_BYTES = 256  # the last level takes all smaller ones, too
_ENTRY_BYTES = 10 * ENTRY_BYTES  # of a record in a level of 8 times as many entries, and in those before
_MIN_TABLE_SHARE = 0.25  # of the usual size; a smaller rest of the limit is left
_LOOK_EVERY_S = 0.25
_GROW_WAIT_S = 1.0  # after a vain attempt
_HOLD_EVERY_S = 0.5
_IDLE_S = 300.0
_CLOCK_STEP_NS = 100_000_000  # two changes of a directory that are closer can have the same time


def store_name() -> str:
    """The name of this process's store in the registry; empty if the system does not tell its namespaces."""
    try:
        root, mounts = os.stat("/"), os.readlink("/proc/self/ns/mnt")
    except OSError:
        return ""
    parts = _FORMAT, mounts, root.st_dev, root.st_ino
    return NAME_PREFIX + hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


class Use:
    """What a loader of this process needs: the tables of its last epoch, and of this one, by their inodes."""

    def __init__(self) -> None:
        self.inodes: set[int] = set()
        self.last_inodes: set[int] = set()
        self.began_s = math.inf  # when the epoch that is read now has begun

    def end_epoch(self) -> None:
        """Need no longer what the epoch that has ended has not used."""
        self.last_inodes, self.inodes, self.began_s = self.inodes, set(), math.inf


class SharedStore:
    """The `Store` in shared memory by file, as a loader and its workers use it.

    Pickled for a child process, it is a handle of the same tables; pickled otherwise, it is the store of the
    machine where it is unpickled.

    Args:
        max_memory: The limit, as in `parse_memory`.

    Attributes:
        max_bytes: The limit. What processes with a larger limit stored can exceed it.
        reason: Whether it was found or made, and by whom.

    Raises:
        SharedMemoryError: The memory, or a lock, is not available.
        ValueError: `parse_memory` does not accept `max_memory`.
    """

    lasts = False
    salt = None
    full_reason = FULL

    def __init__(self, max_memory: str | float = "auto") -> None:
        self._prepare(max_memory, store_name())
        self._owner_pid = os.getpid()
        with registry.creating():
            self._look(time.monotonic())
            # What the store holds is not free, but it is the store's.
            free_bytes = available_bytes() + self.nbytes
            self.max_bytes = limit_bytes(max_memory, free_bytes)
            self._reserved_bytes = reserve_bytes(max_memory)
            self._table_bytes = max(self.max_bytes // _NUM_TABLES, min(_MIN_TABLE_BYTES, self.max_bytes))
            if not self._name or registry.changed_ns() is None:
                self.reason = "private to this process and its workers, because others could not find it"
            elif self._tables:
                self.reason = f"found, made by process {self._tables[0].pid}"
            else:
                self.reason = "made now, because no running process had one"
            self._make_tables()

    def _prepare(self, max_memory: str | float, name: str) -> None:
        self._max_memory, self._name, self.reason = max_memory, name, ""
        self.max_bytes = self._reserved_bytes = self._table_bytes = 0
        self._owner_pid = 0  # the process that makes tables
        self._uses: weakref.WeakSet[Use] = weakref.WeakSet()  # of live loaders
        self._use: Callable[[], Use | None] = lambda: None  # of the loader that reads now
        self._tables: tuple[Arena, ...] = ()  # the oldest first
        self._changed_ns: int | None = None  # of the registry, when it was looked at
        self._look_at_s = self._grow_at_s = 0.0
        self._is_closed = False
        self._locks: dict[int, threading.RLock] = {}  # by process: a fork can copy a held one

    def __reduce__(self) -> tuple[Any, ...]:
        if not segment.is_for_child():
            return open_store, (self._max_memory,)
        limits = self.max_bytes, self._reserved_bytes, self._table_bytes, self._owner_pid
        return _unpickle, (self._tables, self._max_memory, self._name, limits)

    # --- as every store ----------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Memory in use now, by all processes together."""
        return sum(table.nbytes for table in self._tables)

    @property
    def num_files(self) -> int:
        """How many records are stored now."""
        return sum(table.num_records for table in self._tables)

    def get(self, key: bytes) -> memoryview | None:
        """The record under a key of 16 bytes, if there is one: read-only shared memory."""
        self.look()
        for table in self._tables:
            record = table.find(key)
            if record is not None:
                return record
        return None

    def lend(self, keys: Sequence[bytes], use: Callable[[list[memoryview | None]], Any]) -> Any:
        """Call a function with the records under some keys."""
        return use([self.get(key) for key in keys])

    def put(self, key: bytes, parts: Sequence[Any]) -> bool:
        """Store a record; False if there is no room. Other processes find it at once."""
        nbytes = sum(memoryview(part).nbytes for part in parts)
        if self._append(key, parts, nbytes):
            return True
        if self.is_owner:
            self.poll()
        return self.is_owner and self._append(key, parts, nbytes)

    def _append(self, key: bytes, parts: Sequence[Any], nbytes: int) -> bool:
        for table in self._tables:
            with table.growing():
                if _has_room(table, nbytes) and table.put(key, parts):
                    return True
        fits = nbytes < self._table_bytes  # else no table that is made would have room
        if fits and self._tables and not self.is_short and not self.has_room(nbytes):
            self._tables[-1].set_short()
        return False

    def flush(self) -> None:
        """Others find what was put at once."""

    def holds(self, keys: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Which keys are stored, `(n,) bool`, of keys `(n, 16) uint8`."""
        return np.array([self.get(key.tobytes()) is not None for key in keys], bool)

    def has_room(self, nbytes: int) -> bool:
        """Whether it is worth preparing a record of this size."""
        return any(_has_room(table, nbytes) for table in self._tables)

    @property
    def is_short(self) -> bool:
        """Whether something had no room."""
        return bool(self._tables) and self._tables[-1].is_short

    @property
    def is_auto(self) -> bool:
        """Whether nobody chose the limit."""
        return self._max_memory == "auto"

    def retire_own(self) -> None:
        """Let every process let go of the tables that this one has made."""
        for table in self._tables:
            if table.pid == os.getpid():
                table.retire()
        self._tables = tuple(table for table in self._tables if not table.is_retired)
        self._grow_at_s = 0.0  # there is room now for other loaders

    def close(self) -> None:
        """Let go of all tables; all later reads are misses. Records that were handed out stay valid."""
        with self._lock():
            self._is_closed, self._tables, self._look_at_s = True, (), math.inf

    # --- tables ------------------------------------------------------------------------------------------

    def poll(self, use: Use | None = None) -> None:
        """Look for other processes' tables, and make one if there is no room; call it once a batch.

        The process that calls it owns a loader. Most calls take a microsecond.

        Args:
            use: Of the loader; None: nothing is read meanwhile, and tables are made only for who asks.
        """
        if self._is_closed:
            return
        now_s = time.monotonic()
        if not self.is_owner:  # a fork that goes on by itself
            self._owner_pid, self._uses = os.getpid(), weakref.WeakSet()
            for table in self._tables:
                registry.hold(table)
        if use is not None:
            self._use = weakref.ref(use)
            use.began_s = min(use.began_s, now_s)
            if use not in self._uses:  # it is given the time to use what it finds
                self._uses.add(use)
                for table in self._tables:
                    table.keep(now_s)
        self.look()
        if (not self._tables or self.is_short) and now_s >= self._grow_at_s:
            self._grow(now_s)

    def look(self) -> None:
        """Let go of what was retired, and find what other processes have made; a few times a second."""
        now_s = time.monotonic()
        if now_s >= self._look_at_s:
            self._look(now_s)

    @property
    def is_owner(self) -> bool:
        """Whether this process makes tables."""
        return self._owner_pid == os.getpid()

    def _lock(self) -> threading.RLock:
        return self._locks.setdefault(os.getpid(), threading.RLock())

    def _look(self, now_s: float) -> None:
        """Let go of retired tables, attach to new ones if the registry has changed, and keep those in use."""
        if self._is_closed or not self._lock().acquire(blocking=False):
            return
        try:
            self._look_at_s = now_s + _LOOK_EVERY_S
            tables = {table.inode: table for table in self._tables if not table.is_retired}
            changed_ns = registry.changed_ns() if self._name else None
            if changed_ns is not None and changed_ns != self._changed_ns:
                is_old = time.time_ns() - changed_ns > _CLOCK_STEP_NS
                self._changed_ns = changed_ns if is_old else 0
                registry.put_back()
                for _, table in registry.arenas(self._name, tables):
                    if table.is_retired:
                        table.close()
                        continue
                    tables[table.inode] = table
                    if self.is_owner:
                        registry.hold(table)
            use = self._use()
            needed = {inode for each in self._uses for inode in each.inodes | each.last_inodes}
            for inode, table in tables.items():
                table.touch(now_s)
                if use is not None and table.hit_s >= use.began_s:
                    use.inodes.add(inode)
                if inode in needed:
                    table.keep(now_s)
            self._tables = tuple(sorted(tables.values(), key=lambda table: table.created_s))
        finally:
            self._lock().release()

    def _make_tables(self) -> None:
        """Make tables up to the limit."""
        try:
            while self._lacks_tables:
                wanted_bytes = min(self._room_bytes, self._table_bytes)
                table = _create(self._name, wanted_bytes, self._reserved_bytes)
                table.keep(time.monotonic())
                registry.hold(table)
                self._tables += (table,)
        except SharedMemoryError as error:
            if not self._tables:
                raise
            log.info("cache: no further table of decoded files: %s", str(error))

    @property
    def _room_bytes(self) -> int:
        return self.max_bytes - sum(table.max_bytes for table in self._tables)

    @property
    def _lacks_tables(self) -> bool:
        return self._room_bytes >= self._table_bytes * _MIN_TABLE_SHARE

    def _grow(self, now_s: float) -> None:
        """Make a table unless another process just did; if the limit is reached, in place of others."""
        if not self._lock().acquire(blocking=False):
            return
        self._grow_at_s = now_s + _GROW_WAIT_S
        try:
            with registry.creating(wait_s=0.0) as is_alone:
                self._look(now_s)
                # Without a registry, workers would not find a table that is made now.
                if not is_alone or (self._tables and not self.is_short):
                    return
                for table in sorted(self._tables, key=lambda table: table.used_s):
                    if not self._lacks_tables and now_s - table.used_s > _IDLE_S:
                        table.retire()
                        self._tables = tuple(each for each in self._tables if each is not table)
                num_tables = len(self._tables)
                self._make_tables()
                if len(self._tables) > num_tables:
                    self._grow_at_s = 0.0
        except SharedMemoryError as error:
            log.info("cache: no further table of decoded files: %s", str(error))
        finally:
            self._lock().release()


def _create(name: str, max_bytes: int, reserved_bytes: int) -> Arena:
    """A new, empty table."""
    levels = [_FIRST_LEVEL]
    while levels[-1] < max_bytes // _MEAN_RECORD_BYTES:
        levels.append(levels[-1] * _LEVEL_GROWTH)
    fields = {
        "kind": "files",
        "name": name,
        "levels": levels,
        "records_at": table_end(sum(levels)),
        "room_bytes": max(0, max_bytes - 4 * PAGE_BYTES - _FIRST_LEVEL * ENTRY_BYTES),
        "entry_bytes": _ENTRY_BYTES,
    }
    return Arena.create(fields, max_bytes, reserved_bytes, sparing=True)


def _has_room(table: Arena, nbytes: int) -> bool:
    """Whether a record of ``nbytes`` fits into a table, and will stay."""
    return not table.is_retired and table.allows(nbytes) and table.can_grow(nbytes, _log_stopped)


def _log_stopped(_: int) -> None:
    say_once(
        "cache: no more files are remembered until memory becomes free: what is free now is left to the "
        "model, the workers and other caches. The other files are decoded again on every access"
    )


def _unpickle(
    tables: tuple[Arena, ...], max_memory: str | float, name: str, limits: tuple[int, int, int, int]
) -> SharedStore:
    """The store in a worker process; closed if its limit is 0, because the system has no shared memory."""
    store = SharedStore.__new__(SharedStore)
    store._prepare(max_memory, name)
    store.max_bytes, store._reserved_bytes, store._table_bytes, store._owner_pid = limits
    store._tables = tuple(table for table in tables if not table.is_full)  # which could not be mapped
    if not store.max_bytes:
        store.close()
    return store


def open_store(max_memory: str | float = "auto") -> SharedStore:
    """The store of this user, machine and container; without shared memory, a store that holds nothing.

    Raises:
        ValueError: `parse_memory` does not accept `max_memory`.
    """
    reason = segment.why_unsupported()
    if reason is None:
        try:
            return SharedStore(max_memory)
        except SharedMemoryError as error:
            reason = str(error)
    parse_memory(max_memory)
    say_once(
        f"cache: decoded files are not kept in memory, because shared memory is not available: {reason}. "
        'cache="lmdb:PATH" keeps them on disk'
    )
    return _unpickle((), max_memory, "", (0, 0, 0, 0))


# --- for the command line --------------------------------------------------------------------------------


def hold_store(log_start: Callable[[int, int], object]) -> dict[str, Any]:
    """Hold the store until Ctrl-C.

    Args:
        log_start: Called once with the number of files, and their bytes, at the start.

    Returns:
        The same at the end, and the time, ready for JSON.

    Raises:
        SharedMemoryError: This system has no memory that processes share, or they could not find it.
    """
    if segment.why_unsupported() is not None or registry.changed_ns() is None:
        raise SharedMemoryError("processes share no memory here that others could find later")
    store = SharedStore(_MIN_TABLE_BYTES)
    started_s = time.monotonic()
    with contextlib.closing(store):
        with contextlib.suppress(KeyboardInterrupt):
            log_start(store.num_files, store.nbytes)
            while True:
                time.sleep(_HOLD_EVERY_S)
                store.poll()
        held_s = round(time.monotonic() - started_s, 1)
        return {"num_files": store.num_files, "nbytes": store.nbytes, "held_s": held_s}
