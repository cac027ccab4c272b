"""The registry of live shared caches: through it, ranks and jobs of one user find each other's memory.

The memory has no name, and lives as long as any process holds it. An entry of the registry says where to
reach the memory. It is an empty file

    DIRECTORY/NAME.PID.STARTED.FD.NAMESPACE

and means: descriptor FD of process PID, which started at tick STARTED, in a PID namespace, is the cache NAME.
To attach, a process opens /proc/PID/fd/FD (proc(5)). Rules:

1. An entry is a hint. A process that follows it checks that the owner still runs, and checks the type of the
   descriptor before opening it: the owner might have reused the number, and opening a pipe or a device would
   change it (see `segment.open_in_process`).
2. An entry is removed by its owner, or by any process that sees that the owner has ended. Other processes
   leave a wrong entry alone, because the owner can register the same number again at any moment. Those of
   another PID namespace (container) are ignored: nobody here can reach the owner. Its owner puts back what a
   cleaner of temporary files has removed, at the end of an epoch.
3. The directory belongs to this user and is closed to all other users; any other directory is rejected. No
   file in it is opened through a symbolic link.
4. Locks are held only while a cache is created, never while samples are decoded. A process waits at most one
   second for a lock, so a stopped process delays other processes by at most that.
5. Without /proc or a usable directory there is no registry. This is not an error: each process makes its own
   cache, and one log line gives the reason.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.cache.ram.arena import SEGMENT_NAME, Arena
from fastload.errors import CacheMismatchError, SharedMemoryError
from fastload.memory.segment import open_in_process
from fastload.system.linux import link_of, pid_namespace, start_time
from fastload.system.locks import flocked
from fastload.system.logs import log, say_once
from fastload.system.ranks import count_ranks_of_host

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from fastload.memory.segment import Segment

DIRECTORY_VARIABLE = "FASTLOAD_RUNTIME_DIR"
_LOCK_NAME = "lock"
_CREATION_WAIT_S = 1.0
_own: dict[Entry, Path] = {}  # entries of this process, and of those that it was forked from, and where
_LINK = f"/memfd:{SEGMENT_NAME} (deleted)"  # target of the link of a cache's descriptor in /proc


@dataclass(frozen=True)
class Entry:
    """One process that holds a cache.

    Attributes:
        name: The name of the cache.
        pid: The process.
        started: Start of the process in clock ticks since boot; distinguishes processes with the same number.
        fd: The cache's descriptor in that process.
        namespace: The inode of the process's PID namespace.
    """

    name: str
    pid: int
    started: int
    fd: int
    namespace: int

    @classmethod
    def parse(cls, file_name: str) -> Entry | None:
        """The entry that a file name encodes, or None if it is not the name of an entry."""
        name, *numbers = file_name.split(".")
        if len(numbers) != 4 or not all(number.isdecimal() for number in numbers):
            return None
        return cls(name, *map(int, numbers))

    @property
    def file_name(self) -> str:
        """The name of the entry's file."""
        return f"{self.name}.{self.pid}.{self.started}.{self.fd}.{self.namespace}"

    def attach(self) -> Segment:
        """The memory behind the entry; the caller owns it, and must check it.

        Raises:
            SharedMemoryError: The process does not let this one open its descriptors, or its descriptor
                refers to another file.
        """
        try:
            return open_in_process(
                self.pid, self.fd, lambda status, link: stat.S_ISREG(status.st_mode) and link == _LINK
            )
        except OSError as error:
            raise SharedMemoryError(
                f"the descriptor of process {self.pid} cannot be opened: {error.strerror}"
            ) from error


def directory() -> Path | None:
    """The directory of this user's registry, created if missing; None, with a log line, if it is unusable.

    FASTLOAD_RUNTIME_DIR overrides it. The default is in /tmp because all sessions and jobs of a user share
    it; they do not share TMPDIR or XDG_RUNTIME_DIR.
    """
    path = Path(os.environ.get(DIRECTORY_VARIABLE) or f"/tmp/fastload-{os.getuid()}")
    problem = "" if pid_namespace() is not None else "it needs /proc, which does not exist"
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            problem = (
                "it is not a private directory of this user (mode 0700): remove it, or set "
                f"{DIRECTORY_VARIABLE}"
            )
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        say_once(f"cache: no registry of shared caches at {path}: {problem}")
        return None
    return path


def entries(name: str | None = None) -> list[Entry]:
    """Entries of live processes, of one cache or of all; those of dead ones are removed."""
    path = directory()
    if path is None:
        return []
    try:
        file_names = sorted(os.listdir(path))
    except OSError as error:  # the directory was just removed, or this process has no descriptor left
        log.info("cache: cannot list the registry at %s: %s", path, error.strerror)
        return []
    live = []
    for file_name in file_names:
        entry = Entry.parse(file_name)
        if entry is None or entry.namespace != pid_namespace() or name not in (None, entry.name):
            continue
        if start_time(entry.pid) == entry.started:
            live.append(entry)
        else:
            _remove(path / file_name)
    return live


def changed_ns() -> int | None:
    """When an entry was added or removed last, as the clock of files counts; None without a registry."""
    path = directory()
    try:
        return None if path is None else path.stat().st_mtime_ns
    except OSError:  # just removed
        return None


def hold(arena: Arena) -> bool:
    """Let processes find an arena under its name, until it is closed or dropped; False without a registry."""
    entry = register(arena.name, arena.segment.fd) if arena.name else None
    if entry is not None:
        arena.unregister = weakref.finalize(arena, unregister, entry)
    return entry is not None


def arenas(name: str | None = None, known: Container[int] = ()) -> Iterator[tuple[Entry, Arena]]:
    """What live processes hold under a name, or all of it, by entries; the caller closes the arenas.

    What this process cannot reach, or not map, is left out, with one line of log.

    Args:
        name: The name.
        known: Inodes of segments that are left out.
    """
    for entry in entries(name):
        try:
            if known and os.stat(link_of(entry.fd, entry.pid)).st_ino in known:
                continue
            arena = Arena.attach(entry.attach())
            if arena.name != entry.name:
                arena.close()
                raise CacheMismatchError("the descriptor now refers to another cache")
        except (OSError, SharedMemoryError, CacheMismatchError) as error:
            is_unmapped = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ENOMEM
            level = logging.WARNING if is_unmapped or count_ranks_of_host() > 1 else logging.INFO
            say_once(
                f"cache: process {entry.pid} holds {entry.name}, but it cannot be shared: {error}", level
            )
            continue
        yield entry, arena


def live() -> list[dict[str, Any]]:
    """The caches in RAM that this process can reach, the oldest first, ready for JSON.

    Each has its `kind` (`"samples"` or `"files"`), `name`, `num_cached`, `num_samples` (None of files),
    `nbytes` (in use by all processes together), `max_bytes`, `created_s` (seconds since 1970), `users` (the
    processes that opened it; their workers hold it, too), and `label`, `key` and `parts` of a fingerprint.
    """
    found: dict[str, dict[str, Any]] = {}
    seen: set[int] = set()
    for _, arena in arenas(known=seen):
        if not arena.is_retired:
            seen.add(arena.inode)
            is_by_sample = arena.fields["kind"] == "samples"
            fingerprint = arena.fields.get("fingerprint") or {}
            about = found.setdefault(
                arena.name,
                {
                    "kind": arena.fields["kind"],
                    "name": arena.name,
                    **{name: fingerprint.get(name) for name in ("label", "key", "parts")},
                    "num_samples": arena.num_entries if is_by_sample else None,
                    **dict.fromkeys(("num_cached", "nbytes", "max_bytes"), 0),
                    "created_s": arena.created_s,
                },
            )
            num_cached = int(np.count_nonzero(arena.table)) if is_by_sample else arena.num_records
            about["num_cached"] += num_cached
            about["nbytes"] += arena.nbytes
            about["max_bytes"] += arena.max_bytes
        arena.close()
    holders = entries()
    for name, about in found.items():
        about["users"] = sorted({entry.pid for entry in holders if entry.name == name})
    return sorted(found.values(), key=lambda about: float(about["created_s"]))


def entry_of(name: str, fd: int) -> Entry | None:
    """The entry that names a descriptor of this process; None without /proc."""
    namespace, pid = pid_namespace(), os.getpid()
    return None if namespace is None else Entry(name, pid, start_time(pid) or 0, fd, namespace)


def register(name: str, fd: int) -> Entry | None:
    """Register that this process holds a cache; None if there is no registry."""
    entry = entry_of(name, fd)
    return entry if entry is not None and _add(entry) else None


def put_back() -> None:
    """Put the entries of this process back that something has removed."""
    for entry, path in list(_own.items()):
        if entry.pid == os.getpid() and path == directory():
            _add(entry)


def _add(entry: Entry) -> bool:
    path = directory()
    if path is None:
        return False
    try:
        os.close(_open(path / entry.file_name))
    except OSError as error:  # a full or read-only disk: other processes will not find this cache
        log.info("cache: not registered at %s, so other jobs make their own: %s", path, error.strerror)
        return False
    _own[entry] = path
    return True


def unregister(entry: Entry) -> None:
    """Remove an entry; does nothing in a fork of the process that made it."""
    path = _own.pop(entry, None)
    if path is not None and entry.pid == os.getpid():
        _remove(path / entry.file_name)


@contextlib.contextmanager
def creating(wait_s: float | None = None) -> Iterator[bool]:
    """Hold the user's lock on the creation of caches; yields False if it is not free in time (a second)."""
    wait_s = _CREATION_WAIT_S if wait_s is None else wait_s
    path = directory()
    if path is None:
        yield False
        return

    def failed(error: OSError) -> None:
        log.info("cache: cannot lock the registry at %s: %s", path, error.strerror)

    with flocked(lambda: _open(path / _LOCK_NAME), wait_s=wait_s, failed=failed) as has_lock:
        yield has_lock


def _open(path: Path) -> int:
    """A descriptor of a file in the registry, which is created if missing."""
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # already gone, or a read-only disk, where a wrong entry does no harm
        path.unlink()
