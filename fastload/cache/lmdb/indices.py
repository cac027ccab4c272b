"""Maps the indices of a file to the positions of its stored samples.

Left-out samples are kept as runs, and can far outnumber the stored ones: no function here takes memory or
time in proportion to their number.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

_AT_ONCE = 4096


class StoredIndices:
    """The indices of a file without the left-out ones; position p holds the p-th of them.

    Args:
        indices: Indices of the file.
        missing: Runs of left-out indices, ascending and apart, within `indices`: first index and number.
    """

    def __init__(self, indices: range, missing: Sequence[tuple[int, int]]) -> None:
        self._start = indices.start
        runs = np.array(missing, np.int64).reshape(-1, 2)
        self._left_out = np.concatenate(([0], np.cumsum(runs[:, 1])))  # indices before run k
        self._ends = runs.sum(1)  # ends of the runs
        self._end_list: list[int] = self._ends.tolist()
        self._first_list: list[int] = runs[:, 0].tolist()
        # A run lies before the position that follows it.
        self._positions = runs[:, 0] - self._start - self._left_out[:-1]
        self._count = indices.stop - indices.start - int(self._left_out[-1])

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for first in range(0, self._count, _AT_ONCE):
            yield from self.between(first, min(first + _AT_ONCE, self._count)).tolist()

    @property
    def is_complete(self) -> bool:
        """Whether no index is left out."""
        return not self._end_list

    def position(self, index: int) -> int | None:
        """The position of an index of the file; None if the index is left out."""
        if not self._end_list:
            return index - self._start
        run = bisect_right(self._end_list, index)  # the first run that ends after the index
        if run < len(self._end_list) and index >= self._first_list[run]:
            return None
        return index - self._start - int(self._left_out[run])

    def positions(self, indices: npt.NDArray[np.intp]) -> npt.NDArray[np.int64] | None:
        """The positions of indices of the file, `(n,)`; None if one of the indices is left out."""
        if not self._end_list:
            return indices - self._start
        positions = indices - self._start - self._left_out[np.searchsorted(self._ends, indices, "right")]
        return positions if np.array_equal(self._at(positions), indices) else None

    def between(self, first: int, stop: int) -> npt.NDArray[np.int64]:
        """The indices at positions `first <= position < stop`, ascending."""
        return self._at(np.arange(first, stop))

    def _at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        before = np.searchsorted(self._positions, positions, "right")
        at: npt.NDArray[np.int64] = positions + self._start + self._left_out[before]
        return at
