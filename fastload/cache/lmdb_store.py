"""LmdbStore: records in one LMDB file, which any LMDB program reads.

A file is filled by any number of processes of one machine until it is finished; from then on it never
changes, and is read anywhere. The key b"meta" has a JSON object: `version`, `uuid`, `finished`, and what its
maker adds. All other values are records (see `records`). Rules:

1. Values are copied out under a lock, so no view of the mapping leaves this class, and every environment is
   closed before a fork. A process opens it anew on its next access.
2. LMDB's own locks end when anything closes a descriptor of its lock file, or removes it. So commits take
   turns by flock on a descriptor of the data file, opened for each, and first compare the lock file and the
   number of the last commit. Nothing here opens the lock file.
3. A process keeps a descriptor. A finished file is opened through it; one that is being filled by its path,
   if the file there is still the same one.
4. Nobody who trains waits for another process's commit: records stay pending, and above a share of the free
   memory they are not kept.
5. Commits are not synced. Until they are, a marker beside the file names the boot of the system; after a
   power failure, whatever fails its check is discarded before LMDB reads it.
6. What keeps this process from using the file is one line of log, and `problem`; then nothing is found or
   kept.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
import threading
import time
import weakref
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

import lmdb
import numpy as np

from fastload.cache.lmdb_file import (
    BESIDE,
    BOOT,
    CURE,
    LOCK,
    META_KEY,
    OTHER_SPACE,
    WAIT_S,
    RefusedError,
    boot_id,
    checked_records,
    descriptor_of,
    examined,
    meta_value,
    parse_meta,
    problems_of,
    quiet,
    salt_of,
    why_unopened,
)
from fastload.cache.records import ALIGNMENT_BYTES, LMDB_PLACE
from fastload.errors import CacheCorruptError, CacheError, CacheMismatchError
from fastload.readers.identity import file_system_of, is_local
from fastload.readers.reasons import NOT_KEPT
from fastload.system.budget import available_bytes
from fastload.system.disk import sync_directory, write_new
from fastload.system.limits import resource
from fastload.system.linux import check_disk_caches, pid_namespace
from fastload.system.locks import fcntl, flocked
from fastload.system.logs import log
from fastload.system.os_errors import why_unreadable, why_unwritable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

FREE_SHARE, FREE_MAX_BYTES = 0.05, 20 << 30  # of the disk, that stay free

_BATCH_BYTES, _BATCH_RECORDS = 16 << 20, 64  # pending, from which on a process tries to commit
_PENDING_BYTES, _PENDING_SHARE = 128 << 20, 1 / 16  # at most, of one process; of the free memory, of all
_IDLE_S = 0.5  # after so long, an access tries to commit fewer
_CLOSE_S = 1.0  # that close() waits for a turn
_SYNC_AFTER_S = 60.0  # since the last commit: the system has written all by then, so nobody waits
_POLL_S = 0.001
_RETRY_S = 60.0  # after the disk was full
_MAX_READERS = 2048
_MAP_BYTES = 1 << 40
_LOCK_BYTES = 1 << 20  # more than the lock file takes
_FLOCK = "hhqqi"  # struct flock of fcntl(2)
_SPACES_AT, _NUM_SPACES = 1 << 62, 1 << 32  # bytes, far behind the data, that PID namespaces lock
_PROBLEM, _DAMAGE, _FULL = range(3)  # what is told once


_stores: weakref.WeakValueDictionary[tuple[int, int], LmdbStore] = weakref.WeakValueDictionary()
stores_lock = threading.RLock()  # which forks wait for


def open_store(path: str, create: dict[str, Any] | None = None) -> LmdbStore:
    """The store in a file; this process has one for each file.

    Args:
        path: Absolute.
        create: Fields of `meta` with which a file is made if there is none, or an empty one; its directory
            must exist.

    Raises:
        FileNotFoundError: There is no such file.
        CacheMismatchError: It is something else, or has another format.
        CacheCorruptError: It is damaged.
        CacheError: It cannot be read, or made.
        RefusedError: This process does not use it, although it may be right.
    """
    check_disk_caches(path)
    try:
        if os.path.isdir(path):
            raise CacheMismatchError(
                f"{path} is a directory, but a cache on disk is one file: use a different path, or, if an "
                f"earlier version made it, {CURE}"
            )
        fd = descriptor_of(path, os.O_CREAT if create is not None else 0)
    except OSError as error:
        if create is None and isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise FileNotFoundError(f"there is no cache at {path}") from None
        if create is None:
            raise CacheError(f"cannot read the cache {why_unreadable(error)}") from error
        raise CacheError(f"cannot make the cache {path}: {why_unwritable(error, path)}") from error
    with stores_lock:
        key = (status := os.fstat(fd)).st_dev, status.st_ino
        store = _stores.get(key)
        if store is not None and store.is_overwritten:
            store._refuse("another program has written into it")
            store = None
        if store is None:
            try:
                store = _stores[key] = LmdbStore(path, fd, examined(path, fd, create))
            except BaseException:
                os.close(fd)
                raise
        else:
            os.close(fd)
    return store


def _unpickled(path: str, meta: dict[str, Any]) -> LmdbStore:
    """A pickled store in another process."""
    try:
        store = open_store(path)
        if store.meta.get("uuid") == meta.get("uuid"):
            return store
        problem = f"{path} was replaced by another file"
    except (CacheError, FileNotFoundError) as error:
        problem = str(getattr(error, "reason", error))
    return LmdbStore(path, -1, meta, problem)


# --- a store ----------------------------------------------------------------------------------------------


class LmdbStore:
    """A file of records as this process uses it; pickled, it is opened again. `open_store` makes it.

    Args:
        path: Of the file.
        fd: A descriptor of it, which this object closes; -1 for none.
        meta: What the file says of itself.
        problem: Why this process does not use it.

    Attributes:
        path: As given.
        meta: As given.
        lasts: True: records are read from a disk.
        max_bytes: None: the disk is the limit.
        full_reason: Why something is not kept.
        problem: What keeps this process from reading the file, or from writing to it now.
    """

    lasts = True
    max_bytes = None
    full_reason = NOT_KEPT

    def __init__(self, path: str, fd: int, meta: dict[str, Any], problem: str | None = None) -> None:
        self.path, self.meta, self._fd = path, meta, fd
        self.problem: str | None = None
        self._is_refused = False
        self._env: Any = None
        self._lock_file: tuple[int, int] | None = None  # device and inode, when the environment was opened
        self._lock = threading.RLock()
        self._pending: dict[bytes, bytes] = {}
        self._pending_bytes = self._max_pending_bytes = 0
        self._damaged: set[bytes] = set()  # keys whose records are to be replaced
        self._try_at_s = self._write_at_s = 0.0
        self._told = mmap.mmap(-1, mmap.PAGESIZE)  # shared with forks
        self._space = pid_namespace()
        self._stamp = _stamp(fd)
        weakref.finalize(self, _close, fd).atexit = False
        if problem is not None:
            self._refuse(problem)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.path, self.meta)

    @property
    def salt(self) -> bytes:
        """What the checksums of its records cover before their keys."""
        return salt_of(self.meta)

    @property
    def is_overwritten(self) -> bool:
        """Whether another program has written into a finished file, as far as its size and times tell."""
        if (stamp := _stamp(self._fd)) == self._stamp or not self.meta.get("finished"):
            return False
        if self._stamp is None or stamp is None or stamp[0] != self._stamp[0]:
            return True
        if self.lend([META_KEY], lambda found: bytes(found[0] or b"") == meta_value(self.meta)):
            self._stamp = stamp  # it was touched, or written again as it was
            return False
        return True

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return 0 if self._fd < 0 else os.fstat(self._fd).st_size

    @property
    def num_records(self) -> int:
        """How many are stored, or pending here."""
        with self._lock:
            return (self._tried(lambda env: env.stat()["entries"] - 1) or 0) + len(self._pending)

    # --- reading ------------------------------------------------------------------------------------------

    def get(self, key: bytes) -> memoryview | None:
        """The record under a key, if there is one: memory of the caller's own, aligned as `records` says."""
        with self._lock:
            if self._pending and time.monotonic() >= self._try_at_s:
                self._commit()
            return self._tried(lambda env: self._copied(env, key))  # type: ignore[no-any-return]

    def _copied(self, env: Any, key: bytes) -> memoryview | None:
        with env.begin(buffers=True) as txn:
            value = (None if key in self._damaged else txn.get(key)) or self._pending.get(key)
            if value is None:
                return None
            block = np.empty(len(value) + ALIGNMENT_BYTES, np.uint8)
            start = (LMDB_PLACE - block.__array_interface__["data"][0]) % ALIGNMENT_BYTES
            memory = block[start : start + len(value)]
            memory[:] = np.frombuffer(value, np.uint8)
            # The owner, too: else its views can be made writable.
            block.flags.writeable = memory.flags.writeable = False
            return memory.data

    def lend(self, keys: Sequence[bytes], use: Callable[[list[memoryview | None]], Any]) -> Any:
        """Call a function with the records under some keys, which are valid until it returns."""

        def lent(env: Any) -> Any:
            with env.begin(buffers=True) as txn:
                return use(list(map(txn.get, keys)))

        with self._lock:
            return self._tried(lent)

    def holds(self, keys: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Which keys are stored, `(n,) bool`, of keys `(n, key_bytes) uint8`."""

        def held(env: Any) -> list[bool]:
            with env.begin() as txn, txn.cursor() as cursor:  # which reads no values
                return [
                    (key in self._pending or cursor.set_key(key)) and key not in self._damaged
                    for key in map(bytes, keys)
                ]

        with self._lock:
            return np.array(self._tried(held) or [False] * len(keys), np.bool_)

    def all_keys(self) -> list[bytes]:
        """All keys that are stored."""

        def keys_of(env: Any) -> list[bytes]:
            with env.begin() as txn, txn.cursor() as cursor:
                return [key for key in cursor.iternext(values=False) if key != META_KEY]

        with self._lock:
            return self._tried(keys_of) or []

    def checked(self) -> Iterator[tuple[bytes, int, bool]]:
        """All keys, the bytes of their records, and whether these are intact.

        Raises:
            CacheCorruptError: The tree of the file is damaged.
        """
        is_finished = self.meta["finished"]
        with self._lock, contextlib.nullcontext() if is_finished else flocked(self._turn, wait_s=WAIT_S):
            problems = problems_of(self._fd)
        if problems:
            raise CacheCorruptError(f"{self.path} is damaged ({problems[0]}): {CURE}")
        yield from checked_records(self._opened())

    def _tried(self, work: Callable[[Any], Any]) -> Any:
        """What work on the environment gives; None if it cannot be done. The lock is held."""
        for is_last in (False, True):
            try:
                return work(self._opened())
            except RefusedError as error:
                self._refuse(error.reason)
                return None
            except (lmdb.Error, MemoryError) as error:
                self._close_env()  # its place among the readers was lost, or its map is too small by now
                if is_last:
                    self._tell(
                        _DAMAGE, f"{self.path} cannot be read: {error}: `fastload cache verify` checks it"
                    )
        return None

    # --- writing ------------------------------------------------------------------------------------------

    def has_room(self, nbytes: int) -> bool:
        """Whether a record of this size would be pending now, or nothing has been tried yet."""
        if self._is_refused or self.meta["finished"] or time.monotonic() < self._write_at_s:
            return False
        return not self._pending or self._pending_bytes + nbytes <= self._max_pending_bytes

    def put(self, key: bytes, parts: Sequence[Any]) -> bool:
        """Let a record be stored with the next commit; False if it is not kept."""
        record = b"".join(parts)
        with self._lock:
            if key in self._pending:
                return True
            if not self._max_pending_bytes:  # while another process commits, this one does not open it
                self._limit_pending()
            if self._pending and not self.has_room(len(record)):
                self._commit()
            if not self.has_room(len(record)):
                return False
            _commit_at_end()
            self._pending[key] = record
            self._pending_bytes += len(record)
            most_bytes = min(_BATCH_BYTES, self._max_pending_bytes // 2)
            if self._pending_bytes >= most_bytes or len(self._pending) >= _BATCH_RECORDS:
                self._commit()
            return not self._is_refused

    def discard(self, key: bytes) -> None:
        """Let a damaged record be found no more, and be replaced by the next one under its key."""
        with self._lock:
            self._damaged.add(key)
            self._tell(
                _DAMAGE, f"{self.path} has damaged records, which are replaced: the disk may be failing"
            )

    def flush(self, wait_s: float = WAIT_S) -> bool:
        """Commit what is pending; False if other processes commit for longer than this waits."""
        until_s = time.monotonic() + wait_s
        while self._pending:
            with self._lock:
                self._commit()
            if self._pending:
                if time.monotonic() >= until_s:
                    return False
                time.sleep(_POLL_S)  # without the lock
        return True

    def _commit(self) -> bool:
        """Commit what is pending, if it is this process's turn now. The lock is held."""
        self._try_at_s = time.monotonic() + _IDLE_S
        try:
            with flocked(self._turn) as has_turn:
                if not has_turn:
                    return False
                self._written(self._put_pending)
        except RefusedError as error:
            self._refuse(error.reason)
        except (OSError, lmdb.Error, MemoryError) as error:
            self._write_at_s = time.monotonic() + _RETRY_S
            self.problem = why_unwritable(error, self.path)
            self._tell(
                _FULL,
                f"nothing more is stored at {self.path} until that changes: {self.problem}. What is not "
                "stored is decoded on every access",
            )
        else:
            self.problem = None
            self._limit_pending()
        self._pending.clear()
        self._pending_bytes = 0
        return self.problem is None

    def _turn(self) -> int:
        """A descriptor whose lock is nobody else's, after checks whether the file is still the same one."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise RefusedError(self.path, "it was removed") from None
        status = os.fstat(fd)
        if self._fd >= 0 and os.path.samestat(status, os.fstat(self._fd)) and status.st_nlink == 1:
            return fd
        os.close(fd)
        # By each name, a file has another lock file, and readers are known there alone.
        raise RefusedError(
            self.path, "it has a hard link" if status.st_nlink > 1 else "another file is in its place"
        )

    def _written(self, change: Callable[[Any], None]) -> None:
        """Change the file in a transaction, when it is this process's turn."""
        free_bytes, all_bytes = _disk_bytes(self._fd)
        if free_bytes - self._pending_bytes < min(all_bytes * FREE_SHARE, FREE_MAX_BYTES):
            raise OSError(errno.ENOSPC, "a twentieth of the disk, or 20 GiB, stays free for other things")
        if not os.path.exists(self.path + BOOT):
            write_new(self.path + BOOT, boot_id())
            sync_directory(os.path.dirname(self.path))
        for is_last in (False, True):
            try:
                if _file_at(self.path + LOCK) != self._lock_file:
                    self._close_env()
                env = self._opened()
                with env.begin(write=True) as txn:
                    if txn.id() != env.info()["last_txnid"] + 1:
                        raise lmdb.Error("its lock file was changed by another program")
                    if parse_meta(txn.get(META_KEY))["finished"]:
                        raise RefusedError(self.path, "it was finished by another process")
                    change(txn)
                end = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
                if os.fstat(self._fd).st_size < end:  # LMDB does not write a free page
                    os.truncate(self._fd, end)
                break
            except lmdb.Error:
                self._close_env()
                if is_last:
                    raise

    def _put_pending(self, txn: Any) -> None:
        for key in self._damaged:
            txn.delete(key)
        with txn.cursor() as cursor:
            cursor.putmulti(self._pending.items(), overwrite=False)
        self._damaged.clear()

    def sync(self) -> None:
        """Sync all commits to the disk, and remove the marker, unless a process commits now."""
        with contextlib.suppress(OSError, RefusedError):
            os.stat(self.path + BOOT)
            os.fdatasync(self._fd)  # the most of it, while others read and commit
            with self._lock, flocked(self._turn) as has_turn:
                if has_turn:
                    os.fdatasync(self._fd)
                    os.unlink(self.path + BOOT)

    def finish(self, fields: dict[str, Any] | None = None) -> None:
        """Commit and sync all, and let nobody write to the file any more.

        Args:
            fields: Of `meta`, to be added.

        Raises:
            CacheError: That failed.
        """
        meta = {**self.meta, **(fields or {}), "finished": True}
        self.flush()
        try:
            with self._lock, flocked(self._turn, wait_s=WAIT_S) as has_turn:
                if self.problem or not has_turn:
                    raise RefusedError(self.path, self.problem or "another process is committing")
                self._written(lambda txn: txn.put(META_KEY, meta_value(meta)))
                os.fdatasync(self._fd)
                self._close_env()
                for beside in BESIDE:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(self.path + beside)
                self.meta, self._stamp = meta, _stamp(self._fd)
        except (RefusedError, OSError, lmdb.Error) as error:
            reason = getattr(error, "reason", error)
            raise CacheError(f"cannot finish the cache {self.path}: {reason}") from error

    def close(self) -> None:
        """Commit, unless others do for a second, and close the environment until the next access."""
        self.flush(_CLOSE_S)
        with self._lock:
            self._close_env()
        if self._fd >= 0 and time.time() - os.fstat(self._fd).st_mtime > _SYNC_AFTER_S:
            self.sync()

    # --- the environment of this process ------------------------------------------------------------------

    def _opened(self) -> Any:
        """The environment; the lock is held."""
        if self._env is not None:
            return self._env
        if self._is_refused:
            raise RefusedError(self.path, self.problem or "")
        try:
            if not self.meta["finished"]:
                self._open_live()
            if self.meta["finished"]:
                self._env = quiet(self._fd, readonly=True, max_spare_txns=1)
        except (lmdb.Error, OSError) as error:
            raise RefusedError(self.path, why_unopened(error) or f"LMDB cannot open it: {error}") from error
        return self._env

    def _open_live(self) -> None:
        kind = file_system_of(self.path)
        if not is_local(kind):
            raise RefusedError(
                self.path,
                f"it is not finished, and on a file system of kind {kind or 'unknown'}, perhaps on a "
                "network: fill it on a local disk",
            )
        os.close(self._turn())
        self._claim_space()
        if _disk_bytes(self._fd)[0] < _LOCK_BYTES and not _is_allocated(self.path + LOCK):
            raise RefusedError(self.path, "its disk is full, and LMDB needs a lock file beside it")
        map_bytes, file_bytes = _MAP_BYTES, os.fstat(self._fd).st_size
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            map_bytes = max(file_bytes, min(map_bytes, available_bytes() // 4))
        while self._env is None:
            try:
                self._env = lmdb.open(
                    self.path,
                    map_size=map_bytes,
                    subdir=False,
                    sync=False,
                    readahead=False,
                    max_readers=_MAX_READERS,
                    max_spare_txns=1,
                    mode=0o644,
                )
            except lmdb.MemoryError:
                if map_bytes <= file_bytes:
                    raise
                map_bytes = max(map_bytes // 2, file_bytes)
        self._lock_file = _file_at(self.path + LOCK)
        with self._env.begin() as txn:
            meta = parse_meta(txn.get(META_KEY))
        if meta.get("uuid") != self.meta["uuid"]:
            self._close_env()
            raise RefusedError(self.path, "another file is in its place")
        if meta["finished"]:
            self._close_env()
            self._stamp = _stamp(self._fd)
        self.meta = meta
        self._limit_pending()

    def _limit_pending(self) -> None:
        """Let what is pending in all processes that have the file open take a share of the free memory."""
        num_processes = 1 + (self._env.info()["num_readers"] if self._env else 0)
        self._max_pending_bytes = min(
            _PENDING_BYTES, int(available_bytes() * _PENDING_SHARE) // num_processes
        )

    def _claim_space(self) -> None:
        """Let LMDB's locks be those of one PID namespace: they know processes by their ids."""
        if (space := pid_namespace()) is None or space != self._space:
            raise RefusedError(self.path, OTHER_SPACE)
        lock = fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, _SPACES_AT + space, 1, 0)
        fcntl.fcntl(self._fd, *lock)
        for start, end in ((0, space), (space + 1, _NUM_SPACES)):
            query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, _SPACES_AT + start, end - start, 0)
            if struct.unpack(_FLOCK, fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, query))[0] != fcntl.F_UNLCK:
                raise RefusedError(self.path, OTHER_SPACE)

    def _close_env(self) -> None:
        if self._env is not None:
            env, self._env = self._env, None
            env.close()

    def _refuse(self, reason: str) -> None:
        self._is_refused = True
        self.problem = reason
        self._close_env()
        self._pending.clear()
        self._tell(_PROBLEM, f"{self.path} is not used: {reason}")

    def _tell(self, what: int, text: str) -> None:
        """Log a line, unless this process, or one that it was forked from or with, has done so."""
        if not self._told[what]:
            self._told[what] = 1
            log.warning("cache: %s", text)


def _file_at(path: str) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        return (status := os.stat(path)).st_dev, status.st_ino
    return None


def _is_allocated(path: str) -> bool:
    """Whether a file is on its disk: to write to a hole through a mapping ends the process on a full one."""
    with contextlib.suppress(OSError):
        return os.stat(path).st_blocks > 0
    return False


def _disk_bytes(fd: int) -> tuple[int, int]:
    """How much of the disk of a file is free, and all of it."""
    disk = os.fstatvfs(fd)
    return disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize


def _stamp(fd: int) -> tuple[int, int, int] | None:
    """Size and times of a file."""
    if fd < 0:
        return None
    status = os.fstat(fd)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


# --- the end of a process ---------------------------------------------------------------------------------

_ending: list[int] = []  # the process that will commit at its end


def _commit_at_end() -> None:
    if _ending != [os.getpid()]:
        _ending[:] = [os.getpid()]
        Finalize(None, _commit_all, exitpriority=1)  # also in workers, which run no functions of atexit


def _commit_all() -> None:
    for store in list(_stores.values()):
        store.close()


# --- forks ------------------------------------------------------------------------------------------------

_forking: list[LmdbStore] = []


def _before_fork() -> None:
    """Close all environments, when no thread uses one; commit nothing, which could take long."""
    stores_lock.acquire()
    _forking[:] = _stores.values()
    for store in _forking:
        store._lock.acquire()
        store._close_env()


def _after_fork(*, in_child: bool = False) -> None:
    for store in _forking:
        if in_child:  # the parent commits these
            store._pending.clear()
            store._damaged.clear()
            store._pending_bytes = 0
        store._lock.release()
    _forking.clear()
    stores_lock.release()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=lambda: _after_fork(in_child=True)
    )
