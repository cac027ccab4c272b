"""The lock for one builder a destination: DEST.lock, a file that holds the number of the builder's process.

Taken by `build` and `inventory` in the parent. Rules:

1. The lock is flock(2)'s, and goes with the process that holds it; the file says only which process that is.
   It is removed when the lock is given back.
2. Others may have put something there. Only a regular file of one name, which is empty or holds a decimal
   number, is a lock of ours. Everything else is an error, and stays as it is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from typing import TYPE_CHECKING

from fastload.cache.build.writer import writing
from fastload.cache.locks import try_lock
from fastload.errors import CacheBusyError, CacheError

if TYPE_CHECKING:
    from collections.abc import Iterator

SUFFIX = ".lock"
_MOST_DIGITS = 20
# What stands there is opened only as it is: no link is followed, no pipe waited for.
_AS_IT_IS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_KINDS = {errno.ELOOP: "a symbolic link", errno.EISDIR: "a directory", errno.ENXIO: "a socket or a device"}


class BuildLock:
    """The exclusive lock on a destination; workers that inherit it let go of it.

    Args:
        fd: Of the lock file, locked.
    """

    def __init__(self, fd: int) -> None:
        self._pid = os.getpid()
        self._fd = fd
        status = os.fstat(fd)
        self._file = status.st_dev, status.st_ino

    def leave_in_worker(self) -> None:
        """Close what a fork copied: a worker that outlives a killed builder must not keep others out."""
        if os.getpid() == self._pid or self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):  # a worker that was not forked has no such descriptor
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) == self._file:
                os.close(fd)


@contextlib.contextmanager
def only_builder(path: str) -> Iterator[BuildLock]:
    """Hold PATH.lock, which is removed at the end; never waits.

    Raises:
        CacheBusyError: Another builder holds it.
        CacheError: The lock file cannot be made, or something else has its name.
    """
    name = f"{path}{SUFFIX}"
    fd = _locked(path, name)
    try:
        with writing(path):
            number = str(os.getpid()).encode("ascii")
            os.pwrite(fd, number, 0)
            os.ftruncate(fd, len(number))  # a builder that was killed may have had a longer number
        yield BuildLock(fd)
    finally:
        if _is_at(fd, name):
            os.unlink(name)
        os.close(fd)


def is_being_built(path: str) -> bool:
    """Whether a builder holds the lock on a destination now."""
    try:
        fd = os.open(f"{path}{SUFFIX}", os.O_RDONLY | _AS_IT_IS)
    except OSError as error:
        if error.errno == errno.ENOENT or error.errno in _KINDS:
            return False
        raise
    try:
        return _why_not_ours(fd) is None and not try_lock(fd)
    finally:
        os.close(fd)


def _locked(path: str, name: str) -> int:
    """A descriptor of the lock file, locked."""
    while True:
        with writing(path):
            fd = _opened(name)
        try:
            if not try_lock(fd):
                holder = os.pread(fd, _MOST_DIGITS, 0).decode("ascii")
                builder = f"process {holder}" if holder else "another process"
                raise CacheBusyError(f"{path} is being built by {builder}: wait until it has finished")
            if _is_at(fd, name):  # else its holder removed it between our open and our lock
                taken, fd = fd, -1
                return taken
        finally:
            if fd >= 0:
                os.close(fd)


def _opened(name: str) -> int:
    """A descriptor of the lock file, made if there is none."""
    while True:
        with contextlib.suppress(FileExistsError):
            return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _AS_IT_IS, 0o644)
        try:
            fd = os.open(name, os.O_RDWR | _AS_IT_IS)
        except FileNotFoundError:
            continue  # its holder removed it between the two
        except OSError as error:
            if error.errno in _KINDS:
                raise _foreign(name, _KINDS[error.errno]) from None
            raise
        what = _why_not_ours(fd)
        if what is None:
            return fd
        os.close(fd)
        raise _foreign(name, what)


def _foreign(name: str, what: str) -> CacheError:
    return CacheError(
        f"{name} is no lock of fastload's, but {what}, and was left as it is: move it away, or give the "
        "cache another path"
    )


def _why_not_ours(fd: int) -> str | None:
    """What an open file is, if it is no lock file of ours."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        return "a pipe or a device"
    if status.st_nlink > 1:
        return "a file that has other names too"
    if not re.fullmatch(rb"\d*", os.pread(fd, _MOST_DIGITS + 1, 0)) or status.st_size > _MOST_DIGITS:
        return "a file with other content"
    return None


def _is_at(fd: int, name: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(name))
    except FileNotFoundError:
        return False
