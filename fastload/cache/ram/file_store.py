"""SharedFileStore: the decoded files of this user on this machine, whichever dataset or job reads them.

The store consists of tables, each in a segment of its own (see `file_table`), which processes find through
the `registry`. Rules:

1. A process reads all tables, and appends to the oldest one that has room. It holds what it found, and the
   memory of a table goes with the last process that holds it, never under a reader.
2. The process that opens the store makes tables up to its limit; unwritten ones take no memory. Workers make
   none, because they end too early. One that finds no room says so in the newest table, and how much it
   needs: a value that is larger than a table gets one of its own.
3. The tables that a process sees stay together within its own limit, so the largest limit of all processes
   holds, and each one watches the free memory of the machine while it fills a table.
4. Nothing is evicted singly. When there is no room, a table goes as a whole: one that nobody hit for five
   minutes, and that no live loader of the process that needs the room has used. Each process lets go of it
   soon.
5. Processes that could see other files under the same names have stores of their own: other users, machines,
   PID and mount namespaces, and root directories.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from fastload.cache.ram import registry
from fastload.cache.ram.arena import reserve_bytes
from fastload.cache.ram.file_table import (
    FileTable,
    Record,
    encode,
    home_and_tag,
    table_bytes_for,
)
from fastload.errors import CacheMismatchError, SharedMemoryError
from fastload.memory import segment
from fastload.system.budget import available_bytes, limit_bytes, parse_memory, unused_bytes
from fastload.system.humanize import readable_size
from fastload.system.linux import link_of
from fastload.system.logs import log, say_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from fastload.memory.segment import Segment
    from fastload.readers.decode_cache import Stored

_FORMAT = 2  # of tables and records
NAME_PREFIX = "files-"
_NUM_TABLES = 8  # that share the limit
_MIN_TABLE_BYTES = 64 << 20
_MIN_TABLE_SHARE = 0.25  # of the usual size; a smaller rest of the limit is left
_LOOK_EVERY_S = 0.25
_LOOK_WHEN_FULL_EVERY_S = 0.02
_GROW_WAIT_S = 1.0  # after a vain attempt
_REFUSE_S = 0.1
_HOLD_EVERY_S = 0.5
_IDLE_S = 300.0
_CLOCK_STEP_NS = 100_000_000  # two changes of a directory that are closer can have the same time


def store_name() -> str:
    """The name of this process's store in the registry; empty if the system does not tell its namespaces."""
    try:
        root, mounts = os.stat("/"), os.readlink("/proc/self/ns/mnt")
    except OSError:
        return ""
    parts = _FORMAT, sys.implementation.cache_tag, mounts, root.st_dev, root.st_ino
    return NAME_PREFIX + hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


class SharedFileStore:
    """The store in shared memory, as a loader and its workers use it.

    Pickled for a child process, it is a handle of the same tables; pickled otherwise, it is the store of the
    machine where it is unpickled.

    Args:
        max_memory: The limit, as in `parse_memory`.

    Attributes:
        max_bytes: The limit. What processes with a larger limit stored can exceed it.

    Raises:
        SharedMemoryError: The memory, or a lock, is not available.
        ValueError: `parse_memory` does not accept `max_memory`.
    """

    def __init__(self, max_memory: str | float = "auto") -> None:
        self._prepare(max_memory, store_name())
        self._own()
        with registry.creating():
            self._look(time.monotonic())
            # What the store holds is not free, but it is the store's.
            free_bytes = available_bytes() + self.nbytes
            self.max_bytes = limit_bytes(max_memory, free_bytes)
            self._reserved_bytes = reserve_bytes(max_memory)
            self._table_bytes = max(self.max_bytes // _NUM_TABLES, min(_MIN_TABLE_BYTES, self.max_bytes))
            self._make_tables()

    def _prepare(self, max_memory: str | float, name: str) -> None:
        self._max_memory, self._name = max_memory, name
        self.max_bytes = self._reserved_bytes = self._table_bytes = 0
        self._owner_pid = 0  # the process that makes tables
        self._began_s: float | None = None  # when the first of its live loaders began to read
        self._tables: tuple[FileTable, ...] = ()  # the oldest first
        self._changed_ns: int | None = None  # of the registry, when it was looked at
        self._looked_s = self._look_at_s = self._grow_at_s = 0.0
        self._is_closed = False
        self._refused = 0, -_REFUSE_S  # the size of what had no room, and when
        self._locks: dict[int, threading.RLock] = {}  # by process: a fork can copy a held one

    def __reduce__(self) -> tuple[Any, ...]:
        if not segment.is_for_child():
            return open_store, (self._max_memory,)
        segments = [table.arena.segment for table in self._tables]
        limits = self.max_bytes, self._reserved_bytes, self._table_bytes, self._owner_pid
        return _unpickle, (segments, self._max_memory, self._name, limits)

    # --- properties --------------------------------------------------------------------------------------

    @property
    def num_files(self) -> int:
        """How many files are stored now."""
        return sum(table.num_files for table in self._tables)

    @property
    def nbytes(self) -> int:
        """Memory in use now, by all processes together."""
        return sum(table.arena.nbytes for table in self._tables)

    def explain(self) -> str:
        """What the store holds, and for whom."""
        pids = sorted({entry.pid for entry in registry.entries(self._name)})
        holders = f", held by process {', '.join(map(str, pids))}" if pids else ""
        more = ", which a process with a larger limit stored" if self.nbytes > self.max_bytes else ""
        return (
            f"shared memory, {self.num_files:,} files in {readable_size(self.nbytes)}{more}; the limit is "
            f"{readable_size(self.max_bytes)}{holders}"
        )

    # --- reading and writing -----------------------------------------------------------------------------

    def get(self, key: bytes) -> Stored | None:
        """What is stored under a key of 16 bytes, if anything; its array is a view of the shared memory."""
        now_s = time.monotonic()
        if now_s >= self._look_at_s:
            self._look(now_s)
        home, tag = home_and_tag(key)
        for table in self._tables:
            stored = table.get(key, home, tag)
            if stored is not None:
                return stored
        return None

    def put(self, key: bytes, array: npt.NDArray[Any], note: Any) -> bool:
        """Store an array and a note of plain values; False if there is no room, or they are not plain."""
        record = encode(key, array, note)
        if record is None or table_bytes_for(record.nbytes) > self.max_bytes:
            return False
        if self._append(record):
            return True
        if self.is_owner:
            self.poll()
        else:
            self._look(time.monotonic(), _LOOK_WHEN_FULL_EVERY_S)
        if self._append(record):
            return True
        if not any(table.has_room(record.nbytes) and not table.lacks_memory for table in self._tables):
            self._refused = record.nbytes, time.monotonic()
        return False

    def has_room(self, nbytes: int) -> bool:
        """Whether it is worth preparing an array of this size: nothing as small was refused a moment ago."""
        refused_bytes, refused_s = self._refused
        is_worth_it = nbytes < refused_bytes or time.monotonic() > refused_s + _REFUSE_S
        return is_worth_it and not self._is_closed

    def _append(self, record: Record) -> bool:
        tables = self._tables
        for table in tables:
            if table.has_room(record.nbytes) and table.put(record):
                return True
        if tables and not tables[-1].has_room(record.nbytes):
            tables[-1].ask_for_more(record.nbytes)
        return False

    @property
    def is_short(self) -> bool:
        """Whether something had no room."""
        return bool(self._tables) and self._tables[-1].is_short

    def forget(self) -> None:
        """Note that this process has no loader now; what only it has used can go, after a while."""
        self._began_s = None

    def close(self) -> None:
        """Let go of all tables; all later reads are misses. Arrays that were handed out stay valid."""
        with self._lock():
            self._is_closed, self._tables, self._look_at_s = True, (), float("inf")

    # --- tables ------------------------------------------------------------------------------------------

    def poll(self, *, is_in_use: bool = True) -> None:
        """Look for other processes' tables, and make one if there is no room; call it once a batch.

        The process that calls it owns a loader. Most calls take a microsecond.

        Args:
            is_in_use: Whether files are read meanwhile. If not, tables are only made if there is none.
        """
        if self._is_closed:
            return
        now_s = time.monotonic()
        if not self.is_owner:  # a fork that goes on by itself
            self._own()
            for table in self._tables:
                self._register(table)
        if is_in_use and self._began_s is None:
            self._began_s = now_s
        if now_s >= self._look_at_s:
            self._look(now_s)
        tables = self._tables
        if (not tables or (is_in_use and tables[-1].is_short)) and now_s >= self._grow_at_s:
            self._grow(now_s)

    @property
    def is_owner(self) -> bool:
        """Whether this process makes tables."""
        return self._owner_pid == os.getpid()

    def _own(self) -> None:
        self._owner_pid, self._began_s = os.getpid(), None

    def _lock(self) -> threading.RLock:
        return self._locks.setdefault(os.getpid(), threading.RLock())

    def _look(self, now_s: float, every_s: float = 0.0) -> None:
        """Let go of retired tables, attach to new ones if the registry has changed, and keep those in use."""
        if self._is_closed or now_s < self._looked_s + every_s or not self._lock().acquire(blocking=False):
            return
        try:
            self._looked_s, self._look_at_s = now_s, now_s + _LOOK_EVERY_S
            tables = [table for table in self._tables if not table.is_retired]
            changed_ns = registry.changed_ns() if self._name else None
            if changed_ns is not None and changed_ns != self._changed_ns:
                is_old = time.time_ns() - changed_ns > _CLOCK_STEP_NS
                self._changed_ns = changed_ns if is_old else 0
                tables += self._attach(tables)
            for table in tables:
                table.touch(now_s, self._owner_pid, self._began_s if self.is_owner else None)
            self._tables = tuple(sorted(tables, key=lambda table: table.created_s))
        finally:
            self._lock().release()

    def _attach(self, tables: list[FileTable]) -> Iterator[FileTable]:
        """The tables of the registry that are not among these."""
        inodes = {table.inode for table in tables}
        for entry in registry.entries(self._name):
            try:
                if os.stat(link_of(entry.fd, entry.pid)).st_ino in inodes:
                    continue
                memory = entry.attach()
            except (OSError, SharedMemoryError):
                continue  # it was closed just now, or its process cannot be reached
            try:
                table = FileTable(memory, memory.map(writable=False, sparing=True))
            except CacheMismatchError:
                continue
            except SharedMemoryError as error:
                memory.close()
                level = logging.WARNING if self.is_owner else logging.INFO
                say_once(f"cache: decoded files of other processes are not used: {error}", level)
                continue
            if table.name == self._name and not table.is_retired and table.inode not in inodes:
                inodes.add(table.inode)
                if self.is_owner:
                    self._register(table)
                yield table

    def _register(self, table: FileTable) -> None:
        entry = registry.register(self._name, table.arena.segment.fd) if self._name else None
        if entry is not None:
            weakref.finalize(table, registry.unregister, entry)

    def _make_tables(self, needed_bytes: int = 0) -> bool:
        """Make tables up to the limit, the first one as large as needed; returns whether any was made."""
        room_bytes, tables = self._room_bytes, list(self._tables)
        next_bytes = max(self._table_bytes, needed_bytes)
        try:
            while room_bytes >= self._table_bytes * _MIN_TABLE_SHARE:
                wanted_bytes, next_bytes = min(room_bytes, next_bytes), self._table_bytes
                table = FileTable.create(wanted_bytes, self._name, self._reserved_bytes)
                self._register(table)
                tables.append(table)
                # One that the system has made smaller is the last one.
                room_bytes -= table.max_bytes if table.max_bytes == wanted_bytes else room_bytes
        except SharedMemoryError as error:
            if not tables:
                raise
            log.info("cache: no further table of decoded files: %s", str(error))
        has_more, self._tables = len(tables) > len(self._tables), tuple(tables)
        return has_more

    @property
    def _room_bytes(self) -> int:
        return self.max_bytes - sum(table.max_bytes for table in self._tables)

    def _grow(self, now_s: float) -> None:
        """Make a table unless another process just did; if the limit is reached, in place of another one."""
        if not self._lock().acquire(blocking=False):
            return
        self._grow_at_s = now_s + _GROW_WAIT_S
        try:
            with registry.creating(wait_s=0.0) as is_alone:
                self._look(now_s)
                # Without a registry, workers would not find a table that is made now.
                if not is_alone or (self._tables and not self._tables[-1].is_short):
                    return
                needed_bytes = self._needed_bytes()
                if (going := self._to_retire(now_s, needed_bytes)) is None:
                    return
                for table in going:
                    table.retire()
                self._tables = tuple(table for table in self._tables if table not in going)
                if self._make_tables(needed_bytes):
                    self._grow_at_s = 0.0
        except SharedMemoryError as error:
            log.info("cache: no further table of decoded files: %s", str(error))
        finally:
            self._lock().release()

    def _needed_bytes(self) -> int:
        """How large a new table should at least be."""
        least_bytes = int(self._table_bytes * _MIN_TABLE_SHARE)
        wanted_bytes = self._tables[-1].wanted_bytes if self._tables else 0
        return max(least_bytes, table_bytes_for(wanted_bytes) if wanted_bytes else 0)

    def _to_retire(self, now_s: float, needed_bytes: int) -> list[FileTable] | None:
        """The tables that go, enough for a new one; None if too few can."""
        going: list[FileTable] = []
        room_bytes = self._room_bytes
        is_tight = bool(self._tables) and unused_bytes() < self._reserved_bytes
        for table in self._candidates(now_s, has_large=needed_bytes > self._table_bytes):
            if room_bytes >= needed_bytes and (going or not is_tight):
                break
            going.append(table)
            room_bytes += table.max_bytes
        return going if room_bytes >= needed_bytes and (going or not is_tight) else None

    def _candidates(self, now_s: float, *, has_large: bool) -> Iterator[FileTable]:
        """The tables that can go, the first one first."""
        tables = sorted(self._tables, key=lambda table: table.used_s)
        empty = [table for table in tables if has_large and not table.arena.cursor.rows]
        yield from empty
        began_s = now_s if self._began_s is None else self._began_s
        for table in tables:
            if table not in empty and now_s - max(table.used_s, began_s) > _IDLE_S:
                yield table


def _unpickle(
    segments: list[Segment], max_memory: str | float, name: str, limits: tuple[int, int, int, int]
) -> SharedFileStore:
    """The store in a worker process; closed if its limit is 0, because the system has no shared memory."""
    store = SharedFileStore.__new__(SharedFileStore)
    store._prepare(max_memory, name)
    store.max_bytes, store._reserved_bytes, store._table_bytes, store._owner_pid = limits
    tables = (FileTable(each) for each in segments if each.fd >= 0)
    store._tables = tuple(table for table in tables if not table.arena.is_full)  # which could not be mapped
    if not store.max_bytes:
        store.close()
    return store


def open_store(max_memory: str | float = "auto") -> SharedFileStore:
    """The store of this user, machine and container; without shared memory, a store that holds nothing.

    Raises:
        ValueError: `parse_memory` does not accept `max_memory`.
    """
    reason = segment.why_unsupported()
    if reason is None:
        try:
            return SharedFileStore(max_memory)
        except SharedMemoryError as error:
            reason = str(error)
    parse_memory(max_memory)
    say_once(
        f"cache: decoded files are not kept in memory, because shared memory is not available: {reason}. "
        'cache="lmdb:PATH" keeps them on disk'
    )
    return _unpickle([], max_memory, "", (0, 0, 0, 0))


# --- for the command line --------------------------------------------------------------------------------


def live_stores() -> list[dict[str, Any]]:
    """The stores of this user that can be reached from this process, ready for JSON.

    Each has its `name`, `is_own` (whether this process would use it), `num_files`, `num_tables`, `nbytes` (in
    use by all processes together), and `owners` (the processes that opened it; their workers hold it too).
    """
    stores: dict[str, dict[str, Any]] = {}
    for name, tables in _live_tables().items():
        stores[name] = {
            "name": name,
            "is_own": name == store_name(),
            "num_files": sum(table.num_files for table in tables.values()),
            "num_tables": len(tables),
            "nbytes": sum(table.arena.nbytes for table in tables.values()),
            "owners": sorted({entry.pid for entry in registry.entries(name)}),
        }
    return list(stores.values())


def retire_store(name: str) -> int:
    """Let all processes let go of a store's tables; returns how many bytes they hold."""
    tables = _live_tables().get(name, {}).values()
    for table in tables:
        table.retire()
    return sum(table.arena.nbytes for table in tables)


def hold_store(limit_s: float | None, log_start: Callable[[int, int], object]) -> dict[str, Any]:
    """Hold the store until Ctrl-C, or until a time is over.

    Args:
        limit_s: The time.
        log_start: Called once with the number of files, and their bytes, at the start.

    Returns:
        The same at the end, and the time, ready for JSON.

    Raises:
        SharedMemoryError: This system has no memory that processes share, or they could not find it.
    """
    if segment.why_unsupported() is not None or registry.changed_ns() is None:
        raise SharedMemoryError("processes share no memory here that others could find later")
    store = SharedFileStore(_MIN_TABLE_BYTES)
    started_s = time.monotonic()
    end_s = math.inf if limit_s is None else started_s + limit_s
    with contextlib.closing(store):
        with contextlib.suppress(KeyboardInterrupt):
            log_start(store.num_files, store.nbytes)
            while (left_s := end_s - time.monotonic()) > 0:
                time.sleep(min(_HOLD_EVERY_S, left_s))
                store.poll(is_in_use=False)
        held_s = round(time.monotonic() - started_s, 1)
        return {"num_files": store.num_files, "nbytes": store.nbytes, "held_s": held_s}


def _live_tables() -> dict[str, dict[int, FileTable]]:
    """All tables that can be reached, by the name of their store and by inode."""
    stores: dict[str, dict[int, FileTable]] = {}
    for entry in registry.entries():
        if entry.name.startswith(NAME_PREFIX):
            try:
                table = FileTable(entry.attach())
            except (OSError, SharedMemoryError, CacheMismatchError):
                continue
            if not table.is_retired:
                stores.setdefault(entry.name, {}).setdefault(table.inode, table)
    return stores
