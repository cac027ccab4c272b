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
import functools
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from fastload.cache.build.writer import writing
from fastload.cache.locks import AS_IT_IS, release, take, try_lock
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
    with writing(path):
        try:
            fd = take(name, check=functools.partial(_check_ours, name))
        except OSError as error:
            if error.errno in _KINDS:
                raise _foreign(name, _KINDS[error.errno]) from None
            if error.errno not in _NO_LOCKS:
                raise
            fd = -1
    if fd is None:
        raise CacheBusyError(f"{path} is being built by {_holder(name)}: wait until it has finished")
    if fd < 0:
        with contextlib.suppress(OSError):
            os.unlink(name)
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
        release(fd, name)


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


def _holder(name: str) -> str:
    try:
        return f"process {int(Path(name).read_text())}"
    except (OSError, ValueError):  # it has ended just now, or has not written its number yet
        return "another process"


def _check_ours(name: str, fd: int) -> None:
    what = _why_not_ours(fd)
    if what is not None:
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
