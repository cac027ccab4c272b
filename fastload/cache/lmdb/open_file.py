"""An open file of a cache: the places of its records, which records were verified, and checks for changes.

Rules:

1. Only finished files are opened. Builds never write to them again, so reading takes no lock.
2. A file is read through positions that were all checked when it was opened (see `tree`), never through LMDB.
   The first read of a record verifies its checksum. Damage raises an error and never returns a wrong sample.
3. An open file is a descriptor and a mapping, which a forked child shares with its parent. They keep the
   file's content when a different file is moved to the path.
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
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fastload.cache.lmdb.format import CURE, VALUE_HEADER_BYTES, check_tree, read_stored, unpack_value
from fastload.cache.lmdb.indices import StoredIndices
from fastload.cache.lmdb.tree import Table, read_table
from fastload.errors import CacheCorruptError, CacheError, CacheMismatchError
from fastload.system.disk import is_own

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from fastload.cache.lmdb.format import Stored


class _Known(NamedTuple):
    """The facts about a file's content that hold while it has this stamp.

    Attributes:
        stamp: Size, time of the last change of the content, time of the last change of content or metadata.
        verified: For each position, whether its record was compared with its checksum.
    """

    stamp: tuple[int, int, int]
    verified: bytearray


class OpenFile:
    """An open file and its description; closed with the last reference to it.

    Args:
        fd: A descriptor of the file, which this object closes from here on.
        path: Its path.

    Attributes:
        path: The path by which it was opened first.
        nbytes: Size of the file.
        description: The file's own description.
        indices: Indices of the file's samples, including left-out ones.
        stored: Indices of the stored samples.

    Raises:
        CacheMismatchError: The file has a different format version.
        CacheCorruptError: The file is damaged.
        CacheError: The file cannot be read. After an error, the caller still owns the descriptor.
    """

    def __init__(self, fd: int, path: str) -> None:
        self.path = path
        self._fd = fd
        with _reading(path):
            stamp = self._stamp()
            self._read = read_stored(fd, path)
            check_tree(fd, path, self._read.place)
        self.nbytes = stamp[0]
        self.description = self._read.description
        self.indices = self.description.indices
        self.stored = StoredIndices(self.indices, self.description.missing)
        mapping, self._table = _mapped(fd, path, self._read, self.nbytes, self.stored)
        self._memory = memoryview(mapping)
        self._known = _Known(stamp, bytearray(len(self.stored)))
        weakref.finalize(self, os.close, fd).atexit = False

    def is_own(self) -> bool:
        """Whether only this user (or root) can have written it."""
        return is_own(os.fstat(self._fd))

    def check(self) -> bytearray:
        """Check that the file has not changed since it was opened.

        Returns:
            For each position, whether its record was compared with its checksum; the caller updates it.

        Raises:
            CacheMismatchError: It was changed.
        """
        known = self._known  # read once: another thread can replace it
        try:
            stamp = self._stamp()
            if stamp == known.stamp:
                return known.verified
            is_same = stamp[0] == self.nbytes and self._has_same_index()
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if not is_same:
            raise CacheMismatchError(
                f"the file at {self.path} was changed while it was open, by a program that writes into a "
                "file (such as cp) instead of replacing it (such as mv): open the cache again"
            )
        # The file was touched, or rewritten with the same bytes: each record must be verified again.
        self._known = _Known(stamp, bytearray(len(known.verified)))
        return self._known.verified

    def _stamp(self) -> tuple[int, int, int]:
        status = os.fstat(self._fd)
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def _has_same_index(self) -> bool:
        try:
            found = read_stored(self._fd, self.path)
            check_tree(self._fd, self.path, found.place)
        except (CacheCorruptError, CacheMismatchError):
            return False
        return found.text == self._read.text

    def record(self, index: int, *, verify: bool = False) -> memoryview | None:
        """The record of a sample, a private copy; None if the sample is left out.

        Args:
            index: Of the file.
            verify: Compare it with its checksum even if it was compared before.

        Raises:
            CacheCorruptError: The record is damaged.
            CacheMismatchError: The file was changed while it was open.
        """
        position = self.stored.position(index)
        verified = self.check()
        if position is None:
            return None
        if verify or not verified[position]:
            return self._compared(verified, position, index)
        start, nbytes = int(self._table.starts[position]), int(self._table.sizes[position])
        return memoryview(bytes(self._memory[start + VALUE_HEADER_BYTES : start + nbytes]))

    def glance(self, index: int) -> memoryview | None:
        """The record of a sample as it is in the file, not compared; None if the sample is left out.

        For callers that need only its first bytes; a comparison would read all of it.
        """
        position = self.stored.position(index)
        if position is None:
            return None
        start, nbytes = int(self._table.starts[position]), int(self._table.sizes[position])
        return self._memory[start + VALUE_HEADER_BYTES : start + nbytes]

    def records(self, indices: npt.NDArray[np.intp]) -> list[memoryview] | None:
        """The records of many samples; None if one of them is left out.

        Records that were compared with their checksums before are views of the file's pages; others are
        copies.

        Raises:
            CacheCorruptError: A record is damaged.
            CacheMismatchError: The file was changed while it was open.
        """
        positions = self.stored.positions(indices)
        verified = self.check()
        if positions is None:
            return None
        memory = self._memory
        starts = self._table.starts[positions]
        ends = (starts + self._table.sizes[positions]).tolist()
        starts_at = (starts + VALUE_HEADER_BYTES).tolist()
        if np.frombuffer(verified, np.bool_)[positions].all():
            return [memory[start:end] for start, end in zip(starts_at, ends, strict=True)]
        return [
            memory[start:end] if verified[position] else self._compared(verified, position, index)
            for start, end, position, index in zip(
                starts_at, ends, positions.tolist(), indices.tolist(), strict=True
            )
        ]

    def _compared(self, verified: bytearray, position: int, index: int) -> memoryview:
        """A copy of a record, after it was compared with its checksum.

        It is read in one piece, because the system then fetches it from disk at once, not page by page.
        """
        start, nbytes = int(self._table.starts[position]), int(self._table.sizes[position])
        parts = []
        try:
            while nbytes > 0 and (part := os.pread(self._fd, nbytes, start)):  # reads at most 2 GB
                parts.append(part)
                start, nbytes = start + len(part), nbytes - len(part)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        try:
            record = unpack_value(b"".join(parts), index)
        except CacheCorruptError as error:
            self.check()  # raises if the file was changed since this read began
            raise damaged(self.path, index, error) from error
        verified[position] = True
        return record


def _mapped(fd: int, path: str, read: Stored, nbytes: int, stored: StoredIndices) -> tuple[mmap.mmap, Table]:
    """The file as memory, and the places of its values."""
    with _reading(path):
        try:
            mapping = mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ)
        except ValueError as error:  # it was just truncated
            raise CacheCorruptError(f"{path}: {error}") from error
    try:
        table = read_table(mapping, read.place, stored)
    except ValueError as error:
        reason = str(error)
    else:
        with contextlib.suppress(OSError):  # only advice
            mapping.madvise(mmap.MADV_RANDOM)  # samples are shuffled: the next read is elsewhere
        return mapping, table
    mapping.close()  # the views that the walk made were released with its error
    raise CacheCorruptError(f"{path}: its index is not valid: {reason}: {CURE}")


def damaged(path: str, index: int, error: Exception) -> CacheCorruptError:
    """The error that tells the user where the damage is and what to do."""
    return CacheCorruptError(f"{path}: sample {index}: {error}. The file is damaged: {CURE}")


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
    """Raise the system's errors as a CacheError that names the file."""
    try:
        yield
    except CacheError:
        raise
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: OSError) -> CacheError:
    return CacheError(f"cannot read the cache {path}: {error}")
