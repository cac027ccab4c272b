"""Segments: the files of a directory of decoded files, two each, which one process at a time appends to.

    00000.rows      rows of 64 bytes (see `rows`)
    00000.pixels    records (see `records`), each at a multiple of 64 bytes

Rules:

1. A record is written before its row. So a process that is killed at any point leaves whole rows of whole
   records, and perhaps some bytes that no row names, or a part of a row that the next writer cuts off.
2. Nothing that was written changes, and nothing is read through a mapping: a damaged or truncated file, or a
   mount that fails, ends no process.
3. Each process writes a segment of its own, under the lock of its file of rows. So none waits for another
   one, and jobs that build at the same time build together. A segment whose writer has ended is continued.
4. A part of the disk stays free for other things.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
import weakref
from typing import TYPE_CHECKING, Any

from fastload.cache.disk.records import ALIGNMENT_BYTES
from fastload.cache.disk.rows import PIXELS, ROW_BYTES, Row, header_row
from fastload.memory.segment import round_up
from fastload.system.locks import flock_fd

if TYPE_CHECKING:
    from fastload.cache.disk.records import Record

ROWS_SUFFIX, PIXELS_SUFFIX = ".rows", ".pixels"
NAME = re.compile(rf"\d{{5,}}({re.escape(ROWS_SUFFIX)}|{re.escape(PIXELS_SUFFIX)})")
FREE_SHARE, FREE_MAX_BYTES = 0.05, 20 << 30  # of the disk, that stay free

_LOOK_EVERY_BYTES = 16 << 20  # written, between looks at the free space
_NUM_BUFFERS = 2  # of a thread
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


def names_in(directory: str) -> set[str]:
    """The names of the segments in a directory, without suffixes."""
    return {
        name.removesuffix(ROWS_SUFFIX)
        for name in os.listdir(directory)
        if name.endswith(ROWS_SUFFIX) and NAME.fullmatch(name)
    }


class Segment:
    """A segment that is read.

    Args:
        directory: Where it is.
        name: Its name.

    Attributes:
        path: Of its files, without suffix.
        num_rows: How many rows an `Index` has read.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, directory: str, name: str) -> None:
        self.path = os.path.join(directory, name)
        self.num_rows = 0
        with contextlib.ExitStack() as opened:
            fds = []
            for suffix in (ROWS_SUFFIX, PIXELS_SUFFIX):
                fds.append(os.open(self.path + suffix, os.O_RDONLY | _FLAGS))
                opened.callback(os.close, fds[-1])
            opened.pop_all()
        self._rows, self._pixels = fds
        weakref.finalize(self, _close, fds).atexit = False

    def rows(self, start: int, max_rows: int) -> bytes:
        """The next rows from a number on, of those that are whole."""
        wanted = min(max_rows, os.fstat(self._rows).st_size // ROW_BYTES - start)
        data = os.pread(self._rows, wanted * ROW_BYTES, start * ROW_BYTES) if wanted > 0 else b""
        return data[: len(data) // ROW_BYTES * ROW_BYTES]

    def row(self, number: int) -> Row | None:
        """A row; None if it is damaged."""
        return Row.parse(os.pread(self._rows, ROW_BYTES, number * ROW_BYTES))

    def record(self, offset: int, nbytes: int) -> memoryview:
        """A part of the pixels, in memory of this thread alone, read-only; empty if it is missing."""
        if offset + nbytes > self.pixels_bytes:
            return memoryview(b"")
        memory, at = _buffers.take(nbytes), 0
        while at < nbytes and (count := os.preadv(self._pixels, [memory[at:]], offset + at)):  # up to 2 GB
            at += count
        return memory[:at].toreadonly()

    @property
    def pixels_bytes(self) -> int:
        """Size of the file of pixels."""
        return os.fstat(self._pixels).st_size

    @property
    def nbytes(self) -> int:
        """Size of both files."""
        return self.pixels_bytes + os.fstat(self._rows).st_size


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


class _Buffers(threading.local):
    """Memory to read to, used again once nothing views it: new pages take longer than reading."""

    def __init__(self) -> None:
        self._buffers: list[bytearray] = []

    def take(self, nbytes: int) -> memoryview:
        """Memory that is this caller's as long as a view of it, or of a part of it, exists."""
        free = [buffer for buffer in self._buffers if len(buffer) >= nbytes and _is_unviewed(buffer)]
        buffer = min(free, key=len, default=None)
        if buffer is None:
            buffer = bytearray(nbytes + nbytes // 4 + 1)  # images differ in size
            self._buffers = [*self._buffers, buffer][-_NUM_BUFFERS:]
        return memoryview(buffer)[:nbytes]


def _is_unviewed(buffer: bytearray) -> bool:
    try:
        buffer.pop()
    except BufferError:  # memory that is viewed keeps its size
        return False
    buffer.append(0)
    return True


_buffers = _Buffers()


class SegmentWriter:
    """The segment that this process appends to; threads may share it.

    Args:
        directory: Where it is, or will be.

    Raises:
        OSError: None can be written there.
    """

    def __init__(self, directory: str) -> None:
        _check_free(directory, 0)
        self._rows, self._pixels = fds = _continued(directory) or _created(directory)
        weakref.finalize(self, _close, [*fds]).atexit = False
        self._lock = threading.Lock()
        # Behind a part of a row or a record that an earlier writer left.
        self._rows_end = os.fstat(self._rows).st_size // ROW_BYTES * ROW_BYTES
        os.ftruncate(self._rows, self._rows_end)
        self._pixels_end = round_up(os.fstat(self._pixels).st_size, ALIGNMENT_BYTES)
        self._look_at_bytes = 0
        if not self._rows_end:
            self.add_row(header_row())

    def add(self, key: bytes, record: Record) -> None:
        """Append a record, and its row.

        Raises:
            OSError: It cannot be written.
        """
        with self._lock:
            at = self._pixels_end
            if at + record.nbytes >= self._look_at_bytes:
                _check_free(self._pixels, record.nbytes)
                self._look_at_bytes = at + record.nbytes + _LOOK_EVERY_BYTES
            self._pixels_end = round_up(at + record.nbytes, ALIGNMENT_BYTES)
        _write(self._pixels, [record.head, record.pixels], at)
        self.add_row(Row(key, PIXELS, (at, record.nbytes, record.head_bytes, record.checksum)))

    def add_row(self, row: Row) -> None:
        """Append a row.

        Raises:
            OSError: It cannot be written.
        """
        with self._lock:
            _write(self._rows, [row.to_bytes()], self._rows_end)  # over a part that could not be written
            self._rows_end += ROW_BYTES


def _check_free(place: str | int, nbytes: int) -> None:
    """Raise an OSError if too little of a disk would stay free."""
    disk = os.statvfs(place)
    free_bytes, all_bytes = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    if all_bytes and free_bytes - nbytes < min(all_bytes * FREE_SHARE, FREE_MAX_BYTES):
        raise OSError(errno.ENOSPC, "a twentieth of the disk, or 20 GiB, stays free for other things")


def _write(fd: int, buffers: list[Any], at: int) -> None:
    """Write buffers one after another."""
    left = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    while left:
        written = os.pwritev(fd, left, at)
        at += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]


def _opened(path: str, flags: int) -> tuple[int, int] | None:
    """The files of a segment, the first one locked; None if another process has the lock."""
    rows_fd = os.open(path + ROWS_SUFFIX, os.O_RDWR | flags | _FLAGS, 0o644)
    try:
        try:
            has_lock = flock_fd(rows_fd)
        except OSError:
            if not flags:
                raise
            has_lock = True  # where no file can be locked, nobody continues one
        if has_lock:
            return rows_fd, os.open(path + PIXELS_SUFFIX, os.O_RDWR | flags | _FLAGS, 0o644)
    except OSError:
        os.close(rows_fd)
        raise
    os.close(rows_fd)
    return None


def _continued(directory: str) -> tuple[int, int] | None:
    """A segment that a process of this machine wrote which has ended."""
    header = header_row().to_bytes()
    for name in sorted(names_in(directory)):
        # One of another user, or without its pixels, or on a file system without locks, is left alone.
        with contextlib.suppress(OSError):
            fds = _opened(os.path.join(directory, name), 0)
            if fds is not None and os.pread(fds[0], ROW_BYTES, 0) == header:
                return fds
            _close([*(fds or ())])
    return None


def _created(directory: str) -> tuple[int, int]:
    """A new segment."""
    number = max(map(int, names_in(directory)), default=-1)
    while True:
        number += 1
        with contextlib.suppress(FileExistsError):
            fds = _opened(os.path.join(directory, f"{number:05d}"), os.O_CREAT | os.O_EXCL)
            if fds is not None:
                return fds
