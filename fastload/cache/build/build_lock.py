"""The lock that allows one builder per destination: DEST.lock, a file with the builder's process number.

`build` and `inventory` take it in the parent; a build of single shards takes none. Rules:

1. The lock is flock(2)'s, and ends with the process that holds it; the file's content only names that
   process. The file is removed when the lock is released.
2. Another program may have created a file with this name. Only a regular file with a single name, empty or
   with a decimal number in it, is a lock of fastload. Any other file is an error, and is not changed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from typing import TYPE_CHECKING

from fastload.cache.build.writer import writing
from fastload.cache.locks import AS_IT_IS, is_at, try_lock
from fastload.errors import CacheBusyError, CacheError
from fastload.system.logs import log

if TYPE_CHECKING:
    from collections.abc import Iterator

SUFFIX = ".lock"
_MOST_DIGITS = 20
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
_KINDS = {errno.ELOOP: "a symbolic link", errno.EISDIR: "a directory", errno.ENXIO: "a socket or a device"}


class BuildLock:
    """The exclusive lock on a destination; workers that inherit it close their copy.

    Args:
        fd: The locked lock file.
    """

    def __init__(self, fd: int) -> None:
        self._pid = os.getpid()
        self._fd = fd
        status = os.fstat(fd)
        self._file = status.st_dev, status.st_ino

    def leave_in_worker(self) -> None:
        """Close the inherited descriptor: a worker that outlives a killed builder must not block others."""
        if os.getpid() == self._pid or self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):  # a worker that was not forked does not have this descriptor
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) == self._file:
                os.close(fd)


@contextlib.contextmanager
def only_builder(path: str) -> Iterator[BuildLock | None]:
    """Hold PATH.lock and remove it at the end; never waits.

    On a file system without locks nothing is locked, and a log line says so: the files of a build are safe
    without a lock (see `unfinished`).

    Raises:
        CacheBusyError: Another builder holds it.
        CacheError: The lock file cannot be made, or another file has its name.
    """
    name = f"{path}{SUFFIX}"
    fd = _locked(path, name)
    if fd is None:
        log.info("%s: not locked, because this file system does not have locks", path)
        yield None
        return
    try:
        with writing(path):
            number = str(os.getpid()).encode("ascii")
            os.pwrite(fd, number, 0)
            os.ftruncate(fd, len(number))  # the number of a killed builder may have been longer
        yield BuildLock(fd)
    finally:
        if is_at(fd, name):
            os.unlink(name)
        os.close(fd)


def is_being_built(path: str) -> bool:
    """Whether a builder holds the lock on a destination now."""
    try:
        fd = os.open(f"{path}{SUFFIX}", os.O_RDONLY | AS_IT_IS)
    except OSError as error:
        if error.errno == errno.ENOENT or error.errno in _KINDS:
            return False
        raise
    try:
        return _why_not_ours(fd) is None and not try_lock(fd)
    finally:
        os.close(fd)


def _locked(path: str, name: str) -> int | None:
    """A descriptor of the lock file, locked; None on a file system without locks."""
    while True:
        with writing(path):
            fd = _opened(name)
        try:
            try:
                is_taken = try_lock(fd)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                with contextlib.suppress(OSError):
                    os.unlink(name)
                return None
            if not is_taken:
                holder = os.pread(fd, _MOST_DIGITS, 0).decode("ascii")
                builder = f"process {holder}" if holder else "another process"
                raise CacheBusyError(f"{path} is being built by {builder}: wait until it has finished")
            if is_at(fd, name):  # else its holder removed it after we opened it
                taken, fd = fd, -1
                return taken
        finally:
            if fd >= 0:
                os.close(fd)


def _opened(name: str) -> int:
    """A descriptor of the lock file, which is created if missing."""
    while True:
        with contextlib.suppress(FileExistsError):
            return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | AS_IT_IS, 0o644)
        try:
            fd = os.open(name, os.O_RDWR | AS_IT_IS)
        except FileNotFoundError:
            continue  # its holder removed it between the two calls
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
        f"{name} is not a lock of fastload, but {what}, and was not changed: move it away, or give the "
        "cache another path"
    )


def _why_not_ours(fd: int) -> str | None:
    """The kind of an open file, if it is not a lock file of fastload."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        return "a pipe or a device"
    if status.st_nlink > 1:
        return "a file with several names (hard links)"
    if not re.fullmatch(rb"\d*", os.pread(fd, _MOST_DIGITS + 1, 0)) or status.st_size > _MOST_DIGITS:
        return "a file with other content"
    return None
