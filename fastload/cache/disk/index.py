"""Index: where the rows of a key are, in all segments of a directory; each process has its own.

The rows on disk are only appended to, so a process reads each one once. It keeps 16 bytes of a row: the first
word of its key, and its place. New rows come into a dict, and are sorted when there are many; sorted runs are
merged when the last one is no longer small beside the one before.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import numpy as np

from fastload.cache.disk.rows import KEY, PIXELS, ROW_BYTES, Row, are_right, is_header
from fastload.cache.disk.segments import Segment, names_in
from fastload.system.logs import say_once

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

_SEGMENT_SHIFT = 40  # of a place: the number of the segment, and that of the row
_ROW_MASK = (1 << _SEGMENT_SHIFT) - 1
_MAX_RECENT = 4096
_MERGE_BELOW = 4  # a run that is longer than the next one by this factor stays
_CHUNK_ROWS = 1 << 16

Run = tuple["npt.NDArray[np.uint64]", "npt.NDArray[np.int64]"]


class Index:
    """The rows in a directory, as far as they were read.

    Args:
        directory: Where the segments are.

    Attributes:
        segments: Those that were found, in the order of their numbers in places.
        num_pixels: How many rows of pixels were read.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.segments: list[Segment] = []
        self.num_pixels = 0
        self._names: set[str] = set()
        self._recent: dict[int, list[int]] = {}  # places, by the first word of the key
        self._num_recent = 0
        self._runs: tuple[Run, ...] = ()
        self._locks: dict[int, threading.Lock] = {}  # by process: a fork can copy a held one

    def find(self, key: bytes, kind: int) -> Iterator[tuple[Segment, int, Row]]:
        """The rows of a key, the newest first: each one's segment, number and content."""
        word = KEY.unpack(key)[0]
        for place in self._places(word):
            segment, number = self.segments[place >> _SEGMENT_SHIFT], place & _ROW_MASK
            row = segment.row(number)
            if row is not None and row.key == key and row.kind == kind:
                yield segment, number, row

    def _places(self, word: int) -> Iterator[int]:
        # Read before the runs: rows move from the dict to the runs.
        yield from reversed(self._recent.get(word, ()))
        wanted = np.uint64(word)
        for words, places in reversed(self._runs):
            at = int(words.searchsorted(wanted))
            if at < len(words) and words[at] == wanted:
                end = int(words.searchsorted(wanted, "right"))
                yield from reversed(places[at:end].tolist())

    def refresh(self) -> bool:
        """Read the rows that were appended since; False if another thread is doing so."""
        lock = self._locks.setdefault(os.getpid(), threading.Lock())
        if not lock.acquire(blocking=False):
            return False
        try:
            self._open_new_segments()
            found = [
                run for number, segment in enumerate(self.segments) for run in self._read(number, segment)
            ]
            if found:
                words, places = zip(*found, strict=True)
                self._add(np.concatenate(words), np.concatenate(places))
            return True
        finally:
            lock.release()

    def _open_new_segments(self) -> None:
        try:
            names = names_in(self._directory) - self._names
        except OSError:  # it was removed; what is open can still be read
            return
        for name in sorted(names):
            try:
                segment = Segment(self._directory, name)
                start = segment.row(0)
            except OSError:  # it is just being made, or removed
                continue
            if is_header(start):
                self.segments.append(segment)
            elif segment.pixels_bytes:
                say_once(f"cache: {segment.path}.rows is damaged, or of another release: it is not read")
            else:
                continue  # its writer has just begun
            self._names.add(name)

    def _read(self, number: int, segment: Segment) -> Iterator[Run]:
        """The rows of a segment that were not read."""
        while data := segment.rows(segment.num_rows, _CHUNK_ROWS):
            rows = np.frombuffer(data, "<u8").reshape(-1, ROW_BYTES // 8)
            places = np.arange(len(rows), dtype=np.int64) + (number << _SEGMENT_SHIFT | segment.num_rows)
            segment.num_rows += len(rows)
            is_right = are_right(rows)
            self.num_pixels += int(np.count_nonzero(rows[is_right, 2] == PIXELS))
            yield rows[is_right, 0], places[is_right]

    def _add(self, words: npt.NDArray[np.uint64], places: npt.NDArray[np.int64]) -> None:
        if len(words) > _MAX_RECENT:
            self._add_run(words, places)
            return
        for word, place in zip(words.tolist(), places.tolist(), strict=True):
            self._recent.setdefault(word, []).append(place)
        self._num_recent += len(words)
        if self._num_recent > _MAX_RECENT:
            recent = [(word, place) for word, places in self._recent.items() for place in places]
            table = np.array(recent, np.uint64)
            self._add_run(table[:, 0], table[:, 1].astype(np.int64))
            self._recent, self._num_recent = {}, 0

    def _add_run(self, words: npt.NDArray[np.uint64], places: npt.NDArray[np.int64]) -> None:
        runs = [*self._runs]
        while runs and len(runs[-1][0]) < _MERGE_BELOW * len(words):
            before = runs.pop()
            words, places = np.concatenate([before[0], words]), np.concatenate([before[1], places])
        order = np.argsort(words, kind="stable")  # the oldest first among equals
        self._runs = (*runs, (words[order], places[order]))
