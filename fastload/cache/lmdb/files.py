"""The files of a cache on disk: how they are found and opened, how records are read, and checks for changes.

Rules:

1. Only finished files are opened. Builds never write to them again, so reading takes no lock.
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
import errno
import mmap
import os
import weakref
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fastload.cache.lmdb.format import CURE, read_at, read_end, read_text
from fastload.errors import CacheCorruptError, CacheError, CacheMismatchError
from fastload.system.limits import allows_files, limit_on_files
from fastload.system.os_errors import why_unreadable

if TYPE_CHECKING:
    import numpy.typing as npt

    from fastload.cache.lmdb.description import Plan

SHARD_SUFFIX = ".lmdb"
PARTIAL_SUFFIX = ".partial"  # of the directory of an unfinished build
_FILES_A_SHARD = 2  # its descriptor, and that of its mapping


class OpenFile:
    """An open file and its description; closed with the last reference to it.

    Args:
        fd: A descriptor of the file, which this object closes from here on.
        path: The path by which it was opened first.

    Attributes:
        nbytes: Size of the file.
        plan: The plan of the whole cache.
        shard: Number of the file.
        indices: Indices of the file's samples, including left-out ones.
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
            self._text, self.plan, self.shard, self._table = read_end(fd, path, self.nbytes)
            self._memory = memoryview(_mapped(fd, path, self.nbytes))
        except CacheError:
            raise
        except OSError as error:
            raise _unreadable(path, error) from error
        self.indices = self.plan.indices_of(self.shard)
        self.num_stored = int(np.count_nonzero(self._table.sizes))
        # Which records were compared with their checksums, by position, while the file has this stamp.
        self._verified = stamp, bytearray(len(self.indices))
        weakref.finalize(self, os.close, fd).atexit = False

    @property
    def stored_indices(self) -> npt.NDArray[np.intp]:
        """Indices of the stored samples, ascending."""
        return np.flatnonzero(self._table.sizes) + self.indices.start

    @property
    def left_out_indices(self) -> npt.NDArray[np.intp]:
        """Indices of the left-out samples, ascending."""
        return np.flatnonzero(self._table.sizes == 0) + self.indices.start

    def holds(self, index: int) -> bool:
        """Whether the sample of an index of the file is stored."""
        return bool(self._table.sizes[index - self.indices.start])

    def check(self) -> bytearray:
        """Check that the file has not changed since it was opened.

        Returns:
            For each index of the file, whether its record was compared with its checksum; the caller updates
            it.

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
            index: Of the file.
            verify: Compare it with its checksum even if it was compared before.

        Raises:
            CacheCorruptError: The record is damaged.
            CacheMismatchError: The file was changed while it was open.
        """
        position = index - self.indices.start
        verified = self.check()
        start, nbytes = self._span(position)
        if not nbytes:
            return None
        if verify or not verified[position]:
            return self._compared(verified, position)
        return memoryview(bytes(self._memory[start : start + nbytes]))

    def _span(self, position: int) -> tuple[int, int]:
        return int(self._table.starts[position]), int(self._table.sizes[position])

    def records(self, indices: npt.NDArray[np.intp]) -> list[memoryview] | None:
        """The records of many samples; None if one of them is left out.

        Records that were compared with their checksums before are views of the file's pages; others are
        copies.

        Raises:
            CacheCorruptError: A record is damaged.
            CacheMismatchError: The file was changed while it was open.
        """
        positions = indices - self.indices.start
        verified = self.check()
        sizes = self._table.sizes[positions]
        if not sizes.all():
            return None
        memory = self._memory
        starts = self._table.starts[positions]
        bounds = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
        if np.frombuffer(verified, np.bool_)[positions].all():
            return [memory[start:end] for start, end in bounds]
        return [
            memory[start:end] if verified[position] else self._compared(verified, position)
            for position, (start, end) in zip(positions.tolist(), bounds, strict=True)
        ]

    def _compared(self, verified: bytearray, position: int) -> memoryview:
        """A copy of a record, after it was compared with its checksum."""
        start, nbytes = self._span(position)
        try:
            record = read_at(self._fd, start, nbytes)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if zlib.crc32(record) != self._table.crcs[position]:
            self.check()  # raises if the file was changed since this read began
            index = self.indices.start + position
            raise damaged(self.path, index, CacheCorruptError("its checksum is wrong"))
        verified[position] = True
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


# --- the files of one cache ------------------------------------------------------------------------------


def shard_name(plan: Plan, shard: int) -> str:
    """The name of the file of a shard."""
    return f"{shard:05d}-of-{plan.num_shards:05d}{SHARD_SUFFIX}"


def open_files(path: str) -> tuple[OpenFile, ...]:
    """The file at `path`, or the shards in the directory at `path`, in the order of their indices.

    Raises:
        FileNotFoundError: There is no such file.
        CacheMismatchError: It is not a cache of this format, or its shards do not belong together.
        CacheCorruptError: A file is damaged.
    """
    if os.path.isdir(path):
        names = sorted(name for name in os.listdir(path) if name.endswith(SHARD_SUFFIX))
        paths = [os.path.join(path, name) for name in names]
        if not paths:
            raise CacheMismatchError(
                f"{path} is not a cache: neither a file nor a directory of {SHARD_SUFFIX} files{_hint(path)}"
            )
    else:
        paths = [path]
    try:
        opened = [open_file(file_path) for file_path in paths]
    except (OSError, CacheError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, OSError) and cause.errno == errno.EMFILE:
            raise CacheError(f"{path} cannot be opened: {_too_many(len(paths))}") from cause
        raise
    files = sorted(opened, key=lambda file: file.indices.start)
    plan = files[0].plan
    # The names of the classes are left out: a resumed build writes them again.
    expected = replace(plan, classes=None)
    for number, file in enumerate(files):
        if replace(file.plan, classes=None) != expected:
            raise CacheMismatchError(
                f"{file.path} and {files[0].path} are shards of two caches: remove the shards that do not "
                "belong here"
            )
        if file.shard != number:
            break
    else:
        if len(files) == plan.num_shards:
            return tuple(files)
        number = len(files)
    raise CacheMismatchError(
        f"{path} has {len(files):,} of the {plan.num_shards:,} shards of a cache, and shard {number + 1:,} "
        "is missing, or a different one is there twice. Open the directory of all shards, put back what is "
        "missing, or delete the directory and build it again"
    )


def check_openable(num_shards: int) -> None:
    """Check that this process can open a cache of this many shards.

    Raises:
        CacheError: It cannot.
    """
    if not allows_files(_FILES_A_SHARD * num_shards):
        raise CacheError(f"nothing was built: {_too_many(num_shards)}")


def _too_many(num_shards: int) -> str:
    return (
        f"a cache of {num_shards:,} shards needs {_FILES_A_SHARD * num_shards:,} open files in each process "
        f"that reads it, but {limit_on_files()}: raise the limit, or build the cache with fewer shards"
    )


def _hint(path: str) -> str:
    partial = path + PARTIAL_SUFFIX
    if not os.path.exists(partial):
        return ""
    return f"; an unfinished build lies at {partial}: run the build again to resume it"


def open_file(path: str) -> OpenFile:
    """Open one file of a cache.

    Raises:
        FileNotFoundError: There is no such file.
        CacheMismatchError: It is not a cache of this format.
        CacheCorruptError: It is damaged.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise CacheMismatchError(f"{path} is not a file: a cache is a file or a directory of files")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"there is no cache at {path}{_hint(path)}") from None
    try:
        return OpenFile(fd, path)
    except BaseException:
        os.close(fd)
        raise
