"""Advisory locks on open files, and on files that exist only while a process holds them.

flock(2) locks belong to the file description. An inherited or duplicated descriptor shares its lock, so open
a descriptor for this purpose only. Locks of fcntl(2) belong to the process, and a forked child has none.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from fastload.system.posix import fcntl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Flags for opening a lock file: no link is followed, and opening never waits for a pipe. Windows lacks these
# flags, each of which is a bit of its own.
AS_IT_IS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC"))


def try_lock(fd: int, *, attempts: int = 1) -> bool:
    """Take the exclusive lock, or return False if another holder has it; yields the core between attempts."""
    for attempt in range(attempts):
        if attempt:
            os.sched_yield()
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        return True
    return False


def share_lock(fd: int) -> bool:
    """Take the shared lock, or return False if another holder has the exclusive one.

    On a system without locks there is nothing to take.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (AttributeError, OSError):
        return True
    return True


def unlock(fd: int) -> None:
    """Release the lock, for every copy of the descriptor."""
    fcntl.flock(fd, fcntl.LOCK_UN)


@contextlib.contextmanager
def held(name: str, *, waits: bool = False, by_process: bool = False) -> Iterator[bool]:
    """Hold the exclusive lock on a lock file, which is made now and removed at the end.

    Gives whether the lock is held; it always is with `waits`. The arguments are those of `take`.
    """
    fd = take(name, waits=waits, by_process=by_process)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            release(fd, name)


def take(
    name: str,
    *,
    waits: bool = False,
    by_process: bool = False,
    check: Callable[[int], object] = lambda _: None,
) -> int | None:
    """A descriptor with the exclusive lock on a lock file, which is made now; None if another holder has it.

    Args:
        name: The path of the lock file.
        waits: Wait for another holder.
        by_process: Forked children do not hold the lock, and threads of one process do not exclude each
            other.
        check: Raises for the descriptor of a file that is not a lock file, before it is locked.

    Raises:
        OSError: The file cannot be made, or the file system has no locks.
    """
    lock = fcntl.lockf if by_process else fcntl.flock
    while True:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | AS_IT_IS, 0o644)
        try:
            check(fd)
            try:
                lock(fd, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            except (BlockingIOError, PermissionError):  # fcntl(2) may give either
                return None
            if is_at(fd, name):  # else its holder removed the file after this process had opened it
                taken, fd = fd, -1
                return taken
        finally:
            if fd >= 0:
                os.close(fd)


def release(fd: int, name: str) -> None:
    """Remove a lock file and release its lock; another file that has its name now stays."""
    if is_at(fd, name):
        os.unlink(name)
    os.close(fd)


def is_at(fd: int, name: str) -> bool:
    """Whether a descriptor is that of the file at a path now."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(name))
    except FileNotFoundError:
        return False
