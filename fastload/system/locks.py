"""Advisory locks on open files, and on files that exist only while a process holds them.

flock(2) locks belong to the file description, so they exclude threads of one process too, and no other
descriptor of the file matters. (A lock of fcntl(2) ends when its process closes any descriptor of the file.)
An inherited or duplicated descriptor shares the lock, so open a descriptor for this purpose only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from typing import TYPE_CHECKING

try:
    import fcntl as fcntl
except ImportError:  # Windows: no locks, and no shared memory
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_POLL_S = 0.0001

# Descriptors of lock files, which this process might hold for hours. A forked child closes its copies, or it
# would keep the lock of a parent that was killed.
_lock_fds: set[int] = set()


def _close_copies() -> None:
    for fd in _lock_fds:
        os.close(fd)
    _lock_fds.clear()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_close_copies)

# How lock files are opened: no link is followed, and no open waits for a pipe. Windows lacks these flags.
LOCK_FILE_FLAGS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC"))


def flock_fd(fd: int, *, shared: bool = False, wait_s: float = 0.0) -> bool:
    """Take the lock of an open file, or return False if a different holder keeps it for ``wait_s``.

    A system without locks grants every shared one, which only keeps others from removing a file in use.
    """
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_S)
        except (AttributeError, OSError):
            if not shared:
                raise
            return True
        else:
            return True


@contextlib.contextmanager
def flocked(
    open_file: Callable[[], int],
    *,
    wait_s: float = 0.0,
    failed: Callable[[OSError], object] | None = None,
) -> Iterator[bool]:
    """Hold the exclusive lock on a descriptor opened for it; yields whether the lock was free.

    Args:
        open_file: Opens the descriptor.
        wait_s: How long to wait for a different holder.
        failed: Called if the file cannot be opened or locked; None to raise the error.
    """
    fd, has_lock = -1, False
    try:
        try:
            fd = open_file()
            has_lock = flock_fd(fd, wait_s=wait_s)
        except OSError as error:
            if failed is None:
                raise
            failed(error)
        yield has_lock
    finally:
        if has_lock:
            # Not by close(): a fork in another thread might have copied the descriptor, and with it the lock.
            fcntl.flock(fd, fcntl.LOCK_UN)
        if fd >= 0:
            os.close(fd)


@contextlib.contextmanager
def lock_file(name: str) -> Iterator[bool]:
    """Hold the exclusive lock on a lock file, which is created now and removed at the end.

    The file holds this process's id. Yields whether the lock is held. Forked children do not hold it.

    Args:
        name: The path of the lock file.

    Raises:
        OSError: The file cannot be made, or the file system has no locks.
    """
    if fcntl is None:
        raise OSError(errno.ENOLCK, "this platform has no locks on files")
    while True:
        fd, pid, has_lock = os.open(name, os.O_RDWR | os.O_CREAT | LOCK_FILE_FLAGS, 0o644), os.getpid(), False
        _lock_fds.add(fd)
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                has_lock = True
            if not has_lock:
                yield False
                return
            if not _is_at(fd, name):
                continue  # its holder removed the file after this process had opened it
            try:
                os.ftruncate(fd, 0)  # a killed holder left its id
                os.pwrite(fd, str(pid).encode("ascii"), 0)
                yield True
            finally:
                if os.getpid() == pid and _is_at(fd, name):
                    os.unlink(name)
            return
        finally:
            if os.getpid() == pid:  # a fork of this process, which has closed its copy, can come here too
                if has_lock:
                    fcntl.flock(fd, fcntl.LOCK_UN)  # before close(), for the same reason as in `flocked`
                _lock_fds.discard(fd)
                os.close(fd)


def is_lock_file_held(name: str) -> bool:
    """Whether a process, or a thread of this one, holds a lock file."""
    try:
        fd = os.open(name, os.O_RDONLY | LOCK_FILE_FLAGS)
    except FileNotFoundError:
        return False
    try:
        return not flock_fd(fd, shared=True)
    finally:
        os.close(fd)


def is_lock_file_held_here(name: str) -> bool:
    """Whether a thread of this process holds a lock file."""
    return any(_is_at(fd, name) for fd in _lock_fds.copy())


def _is_at(fd: int, name: str) -> bool:
    """Whether a descriptor is that of the file at a path now."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(name))
    except OSError:  # there is none, or another thread has just closed the descriptor
        return False
