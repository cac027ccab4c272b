"""The measurements of one worker, or of one loader in the consumer's process, in a file that both sides map.

Rules:

1. One process writes a recording; another may read it at any time, also after the writer was killed. Every
   row and entry is complete before the count that publishes it is raised.
2. A recording has a fixed size. When its rows are full, the oldest are overwritten; when its names are full,
   further names are added up as "(other)". The file is sparse: unused parts take no disk space.
3. Times are nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import threading
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

_MAGIC = b"fastload recording 1\0\0\0\0"
_HEADER = struct.Struct("<24s q i i q q")  # magic, pid, loader, worker, rows written, names in use
_COUNTS = struct.Struct("<qq")
_COUNTS_AT = 40
_NAMES_AT = 4096
_NAME = struct.Struct("<16s 176s q q q q q")  # stage, name, count, wall, CPU, bytes, elements
_SUMS = struct.Struct("<qqqqq")
_SUMS_IN_NAME = 192
_MAX_NAMES = 1024
_ROWS_AT = _NAMES_AT + _MAX_NAMES * 256
_ROW = struct.Struct("<q q q q q q q i i")
MAX_ROWS = 1 << 16
_ROW_BYTES = 64
_TOTAL_BYTES = _ROWS_AT + MAX_ROWS * _ROW_BYTES
OTHER = "(other)"
_numbers = itertools.count()  # of the recordings of this process


class Row(NamedTuple):
    """One batch that was made.

    Attributes:
        start_ns: When the work on it began.
        end_ns: When it was collated.
        cpu_ns: CPU time of the thread.
        process_cpu_ns: CPU time of the process in the meantime, with all threads; -1 if not measured.
        queued_ns: How long the thread was ready to run and had no CPU; -1 if the system does not say.
        waited_ns: How long this worker had waited for the batch's indices before `start_ns`.
        num_samples: Its samples; 0 if unknown.
        is_detailed: Whether its stages were measured, too.
    """

    start_ns: int
    end_ns: int
    cpu_ns: int
    process_cpu_ns: int
    queued_ns: int
    waited_ns: int
    reserved: int
    num_samples: int
    is_detailed: int


class Sums(NamedTuple):
    """What was added up under one name.

    Attributes:
        calls: How often it was measured.
        wall_ns: Time in it, without the time in stages that it called.
        cpu_ns: CPU time of the thread, likewise.
        nbytes: Bytes of the results, where they are known.
        num_pixels: Pixels of the results that are images.
    """

    calls: int = 0
    wall_ns: int = 0
    cpu_ns: int = 0
    nbytes: int = 0
    num_pixels: int = 0

    def plus(self, other: Sums) -> Sums:
        """The sums of both."""
        return Sums(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Recording:
    """The writing side; it belongs to one process.

    Args:
        directory: Where the file is made.
        loader: The number of the loader.
        worker: The number of the worker; -1 for the consumer's process.

    Raises:
        OSError: The file cannot be made.
    """

    def __init__(self, directory: str | Path, loader: int, worker: int) -> None:
        path = os.path.join(directory, f"{loader}-{worker}-{os.getpid()}-{next(_numbers)}.rec")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, _TOTAL_BYTES)
            self._map = mmap.mmap(fd, _TOTAL_BYTES)
        finally:
            os.close(fd)
        self._lock = threading.Lock()  # between the thread that works and the one that looks at its lines
        self._places: dict[tuple[str, str], int] = {}
        self._num_rows = 0
        _HEADER.pack_into(self._map, 0, _MAGIC, os.getpid(), loader, worker, 0, 0)

    def add_row(self, row: Row) -> None:
        """Record a batch."""
        with self._lock:
            place = _ROWS_AT + (self._num_rows % MAX_ROWS) * _ROW_BYTES
            _ROW.pack_into(self._map, place, *row)
            self._num_rows += 1
            self._publish()

    def add(self, stage: str, name: str, sums: Sums) -> None:
        """Add to the sums of a name within a stage; thread-safe."""
        with self._lock:
            place = self._places.get((stage, name))
            if place is None:
                place = self._new_name(stage, name)
            _SUMS.pack_into(self._map, place, *Sums(*_SUMS.unpack_from(self._map, place)).plus(sums))

    def _new_name(self, stage: str, name: str) -> int:
        if len(self._places) >= _MAX_NAMES - 32 and name != OTHER:  # the rest is for OTHER of each stage
            place = self._places.get((stage, OTHER))
            return self._new_name(stage, OTHER) if place is None else place
        start = _NAMES_AT + len(self._places) * 256
        _NAME.pack_into(self._map, start, stage.encode(), _fitting(name, 176), 0, 0, 0, 0, 0)
        place = self._places[stage, name] = start + _SUMS_IN_NAME
        self._publish()
        return place

    def _publish(self) -> None:
        _COUNTS.pack_into(self._map, _COUNTS_AT, self._num_rows, len(self._places))

    def close(self) -> None:
        """Unmap the file; it stays for its readers."""
        self._map.close()


def _fitting(text: str, limit: int) -> bytes:
    encoded = text.encode()
    return encoded if len(encoded) <= limit else encoded[:limit].decode(errors="ignore").encode()


class Recorded(NamedTuple):
    """A recording as it was read.

    Attributes:
        loader: The number of the loader.
        worker: The number of the worker; -1: the consumer's process.
        pid: The process that wrote it.
        num_batches: All batches, also those whose rows were overwritten.
        rows: The last `MAX_ROWS` batches, oldest first.
        sums: By stage and name.
    """

    loader: int
    worker: int
    pid: int
    num_batches: int
    rows: list[Row]
    sums: dict[tuple[str, str], Sums]


def read_recording(path: str | Path) -> Recorded | None:
    """Read a recording; None if the file is not one, or was never finished."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size != _TOTAL_BYTES:
            return None
        with mmap.mmap(file.fileno(), _TOTAL_BYTES, access=mmap.ACCESS_READ) as content:
            magic, pid, loader, worker, num_rows, num_names = _HEADER.unpack_from(content, 0)
            if magic != _MAGIC:
                return None
            first = max(0, num_rows - MAX_ROWS)
            rows = [
                Row(*_ROW.unpack_from(content, _ROWS_AT + (number % MAX_ROWS) * _ROW_BYTES))
                for number in range(first, num_rows)
            ]
            sums = {}
            for number in range(num_names):
                stage, name, *values = _NAME.unpack_from(content, _NAMES_AT + number * 256)
                key = stage.rstrip(b"\0").decode(), name.rstrip(b"\0").decode(errors="replace")
                sums[key] = Sums(*values)
    return Recorded(loader, worker, pid, num_rows, rows, sums)
