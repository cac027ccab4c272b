"""An open file: where its records lie, which of them were verified, and whether it is still the same file.

Rules:

1. Only finished files are opened. No build writes them any more, so reading takes no lock.
2. A file is read through positions that were all checked when it was opened (see `tree`), never through
   LMDB. The checksum of a record is verified at its first read. Damage is an error, never a wrong sample.
3. An open file is a descriptor and a mapping, which a forked child shares with its parent. They stay with
   the file's content when another file takes its place at the path.
4. Each read looks at the file's size and times first, and raises if another program changed the file in
   place. This look cannot find a change that is made after it, in the middle of the read, nor one that the
   file system stamps with the same time as the change before it (times may be some milliseconds coarse).
   Such a read may give the new bytes; and a batch that is read from a file while it is cut short ends the
   process with SIGBUS.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fastload.cache.lmdb.format import VALUE_HEADER_BYTES, check_tree, read_stored, unpack_value
from fastload.cache.lmdb.indices import StoredIndices
from fastload.cache.lmdb.tree import Table, read_table
from fastload.errors import CacheCorruptError, CacheError, CacheMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from fastload.cache.lmdb.format import Stored


class _Known(NamedTuple):
    """What is known of a file's content for as long as it has this stamp.

    Attributes:
        stamp: Size, time of the last change of the content, time of the last change of anything.
        verified: For each position whether its record was compared with its checksum.
    """

    stamp: tuple[int, int, int]
    verified: bytearray


class OpenFile:
    """An open file and what it says of itself; closed when the last reference to it goes.

    Args:
        fd: A descriptor of the file, which this object closes from now on.
        path: By which it was opened.

    Attributes:
        path: By which it was opened first.
        nbytes: Size of the file.
        description: As the file has it.
        indices: Of its samples, those that are left out too.
        stored: Those that are not left out.

    Raises:
        CacheMismatchError: It has another format version.
        CacheCorruptError: The file is damaged.
        CacheError: It cannot be read. After an error the descriptor is still the caller's.
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

    def check(self) -> bytearray:
        """Check that the file is still the one that was opened.

        Returns:
            For each position whether its record was compared with its checksum; to be marked by the caller.

        Raises:
            CacheMismatchError: It was changed.
        """
        known = self._known  # one look: another thread may replace it
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
        # It was touched, or written anew with the same bytes: each record is compared again.
        self._known = _Known(stamp, bytearray(len(known.verified)))
        return self._known.verified

    def _stamp(self) -> tuple[int, int, int]:
        status = os.fstat(self._fd)
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def _has_same_index(self) -> bool:
        try:
            found = read_stored(self._fd, self.path)
            if found.text == self._read.text:
                check_tree(self._fd, self.path, found.place)
        except (CacheCorruptError, CacheMismatchError):
            return False
        return found.text == self._read.text

    def record(self, index: int, *, verify: bool = False) -> memoryview | None:
        """The record of a sample, a private copy; None if the sample is left out.

        Args:
            index: Of the file.
            verify: Compare it with its checksum also if it was compared before.

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

    def glance(self, index: int) -> memoryview:
        """The record of a stored sample as it lies in the file; not compared with its checksum.

        For a look at how it begins, where a comparison would take reading all of it.

        Raises:
            CacheMismatchError: The file was changed while it was open.
        """
        self.check()
        position = self.stored.position(index)
        if position is None:
            raise ValueError(f"sample {index} is left out of {self.path}")
        start, nbytes = int(self._table.starts[position]), int(self._table.sizes[position])
        return self._memory[start + VALUE_HEADER_BYTES : start + nbytes]

    def records(self, indices: npt.NDArray[np.intp]) -> list[memoryview] | None:
        """The records of many samples; None if one of them is left out.

        Records that were compared with their checksums before are views of the file's pages, others copies.

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

        It is read in one piece, which the system can fetch at once from a disk, page by page it could not.
        """
        start, nbytes = int(self._table.starts[position]), int(self._table.sizes[position])
        parts = []
        try:
            while nbytes > 0 and (part := os.pread(self._fd, nbytes, start)):  # gives 2 GB at most
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
    """The file as memory, and where its values lie."""
    with _reading(path):
        try:
            mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except ValueError as error:  # it was cut short just now
            raise CacheCorruptError(f"{path}: {error}") from error
    try:
        table = read_table(mapping, read.place, stored)
    except ValueError as error:
        reason = str(error)
    else:
        mapping.madvise(mmap.MADV_RANDOM)  # samples are shuffled: what lies behind one is not read next
        return mapping, table
    mapping.close()  # the walk's own views of it went with its error
    raise CacheCorruptError(f"{path}: its index is not valid: {reason}. Delete the file and build it again")


def damaged(path: str, index: int, error: Exception) -> CacheCorruptError:
    """The error that tells a user where the damage is and what to do."""
    return CacheCorruptError(
        f"{path}: sample {index}: {error}. The file is damaged: delete it and build it again"
    )


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
    """Raise what the system says as an error of ours that names the file."""
    try:
        yield
    except CacheError:
        raise
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: OSError) -> CacheError:
    return CacheError(f"cannot read the cache {path}: {error}")
