"""The file of a cache on disk: how it is opened, how records are read, and checks for changes.

Rules:

1. Only a finished file is opened. Builds never write to it again, so reading takes no lock.
2. A file is read through positions that were all checked when it was opened (see `format`), never through
   LMDB. The first read of a record verifies its checksum. Damage raises an error and never returns a wrong
   sample.
3. An open file is a descriptor and a mapping, which a forked child shares with its parent. They keep the
   file's content when another file is moved to the path.
4. Each read first checks the file's size and times, and raises if another program changed the file in place.
   This check cannot find a change during the read, or a change with the same time stamp as the previous one
   (file systems can count time in steps of some milliseconds). Such a read can return the new bytes. If a
   file is truncated while a batch is read from it, SIGBUS kills the process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
import zlib
from typing import TYPE_CHECKING

import numpy as np

from fastload.cache.lmdb.format import CURE, read_at, read_end, read_text
from fastload.errors import CacheCorruptError, CacheError, CacheMismatchError
from fastload.system.os_errors import why_unreadable

if TYPE_CHECKING:
    import numpy.typing as npt


PARTIAL_SUFFIX = ".partial"  # of the file of an unfinished build


class OpenFile:
    """An open file and its description; closed with the last reference to it.

    Args:
        fd: A descriptor of the file, which this object closes from here on.
        path: The path by which it was opened first.

    Attributes:
        nbytes: Size of the file.
        plan: The plan of the cache.
        num_stored: Number of stored samples.

    Raises:
        CacheMismatchError: The file has a different format version.
        CacheCorruptError: The file is damaged.
        CacheError: The file cannot be read. After an error, the caller still owns the descriptor.
    """

    def __init__(self, fd: int, path: str) -> None:
        self.path = path
        self._fd = fd
        try:
            stamp = self._stamp()
            self.nbytes = stamp[0]
            self._text, self.plan, self._table = read_end(fd, path, self.nbytes)
            self._memory = memoryview(_mapped(fd, path, self.nbytes))
        except CacheError:
            raise
        except OSError as error:
            raise _unreadable(path, error) from error
        self.num_stored = int(np.count_nonzero(self._table.sizes))
        # Which records were compared with their checksums, by position, while the file has this stamp.
        self._verified = stamp, bytearray(self.plan.num_samples)
        weakref.finalize(self, os.close, fd).atexit = False

    @property
    def stored_indices(self) -> npt.NDArray[np.intp]:
        """Indices of the stored samples, ascending."""
        return np.flatnonzero(self._table.sizes)

    def holds(self, index: int) -> bool:
        """Whether the sample of an index is stored."""
        return bool(self._table.sizes[index])

    def check(self) -> bytearray:
        """Check that the file has not changed since it was opened.

        Returns:
            For each index, whether its record was compared with its checksum; the caller updates it.

        Raises:
            CacheMismatchError: It was changed.
        """
        old_stamp, verified = self._verified  # read once: another thread can replace them
        try:
            stamp = self._stamp()
            if stamp == old_stamp:
                return verified
            is_same = stamp[0] == self.nbytes and self._has_same_text()
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if not is_same:
            raise CacheMismatchError(
                f"the file at {self.path} was changed while it was open, by a program that writes into a "
                "file (such as cp) instead of replacing it (such as mv): open the cache again"
            )
        # The file was touched, or rewritten with the same bytes: each record must be verified again.
        verified = bytearray(len(verified))
        self._verified = stamp, verified
        return verified

    def _stamp(self) -> tuple[int, int, int]:
        """Size, time of the last change of the content, time of the last change of content or metadata."""
        status = os.fstat(self._fd)
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def _has_same_text(self) -> bool:
        try:
            return read_text(self._fd, self.path, self.nbytes) == self._text
        except CacheCorruptError:
            return False

    def record(self, index: int, *, verify: bool = False) -> memoryview | None:
        """The record of a sample, a private copy; None if the sample is left out.

        Args:
            index: Of the sample.
            verify: Compare it with its checksum even if it was compared before.

        Raises:
            CacheCorruptError: The record is damaged.
            CacheMismatchError: The file was changed while it was open.
        """
        verified = self.check()
        start, nbytes = self._span(index)
        if not nbytes:
            return None
        if verify or not verified[index]:
            return self._compared(verified, index)
        return memoryview(bytes(self._memory[start : start + nbytes]))

    def _span(self, index: int) -> tuple[int, int]:
        return int(self._table.starts[index]), int(self._table.sizes[index])

    def records(self, indices: npt.NDArray[np.intp]) -> list[memoryview] | None:
        """The records of many samples; None if one of them is left out.

        Records that were compared with their checksums before are views of the file's pages; others are
        copies.

        Raises:
            CacheCorruptError: A record is damaged.
            CacheMismatchError: The file was changed while it was open.
        """
        verified = self.check()
        sizes = self._table.sizes[indices]
        if not sizes.all():
            return None
        memory = self._memory
        starts = self._table.starts[indices]
        bounds = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
        if np.frombuffer(verified, np.bool_)[indices].all():
            return [memory[start:end] for start, end in bounds]
        return [
            memory[start:end] if verified[index] else self._compared(verified, index)
            for index, (start, end) in zip(indices.tolist(), bounds, strict=True)
        ]

    def _compared(self, verified: bytearray, index: int) -> memoryview:
        """A copy of a record, after it was compared with its checksum."""
        start, nbytes = self._span(index)
        try:
            record = read_at(self._fd, start, nbytes)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if zlib.crc32(record) != self._table.crcs[index]:
            self.check()  # raises if the file was changed since this read began
            raise damaged(self.path, index, CacheCorruptError("its checksum is wrong"))
        verified[index] = True
        return memoryview(record)


def _mapped(fd: int, path: str, nbytes: int) -> mmap.mmap:
    """The file as memory."""
    try:
        mapping = mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ)
    except ValueError as error:  # it was just truncated
        raise CacheCorruptError(f"{path}: {error}") from error
    with contextlib.suppress(OSError):  # only advice
        mapping.madvise(mmap.MADV_RANDOM)  # samples are shuffled: the next read is elsewhere
    return mapping


def damaged(path: str, index: int, error: Exception) -> CacheCorruptError:
    """The error that tells the user where the damage is and what to do."""
    return CacheCorruptError(f"{path}: sample {index}: {error}. The file is damaged: {CURE}")


def _unreadable(path: str, error: OSError) -> CacheError:
    return CacheError(f"cannot read the cache {path}: {why_unreadable(error)}")


def open_file(path: str) -> OpenFile:
    """Open the file of a cache.

    Raises:
        FileNotFoundError: There is no such file.
        CacheMismatchError: It is not a cache of this format.
        CacheCorruptError: It is damaged.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise CacheMismatchError(
            f"{path} is not a file, but a cache of samples is one: use a different path. If it is a cache of "
            "a format before 4, which could be a directory, remove it, and build the cache again"
        )
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        partial = path + PARTIAL_SUFFIX
        hint = f"; {partial} is left of a build: run it again" if os.path.exists(partial) else ""
        raise FileNotFoundError(f"there is no cache at {path}{hint}") from None
    try:
        return OpenFile(fd, path)
    except BaseException:
        os.close(fd)
        raise
