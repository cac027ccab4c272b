"""Lessons: what the processes of a loader learn together of the images that they decode.

They learn whether first resizes repeat, and whether a cache in RAM is given up. This decides only what is
stored: keys are always right. So processes share the counts without a lock, and a lost update costs a few
more images.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np

from fastload.errors import SharedMemoryError
from fastload.memory.segment import Segment, is_for_child

NUM_LEARNED = 64  # resizes that repeat, or that do not, decide
_NUM_KINDS = 64  # of resizes
# Of the counts: for each kind the sides of the last result, how many repeated, how many did not, and a state;
# and a row that begins with whether the cache is given up.
_SHAPE = (_NUM_KINDS + 1, 5)
_UNKNOWN, _RESULTS, _ORIGINALS = range(3)


class Lessons:
    """What was learned; of resizes by kind, because masks have another mode, or another filter.

    Args:
        segment: The counts, zeros at first; None: they are of this process alone.
    """

    def __init__(self, segment: Segment | None = None) -> None:
        self._segment = segment
        self._counts = np.zeros(_SHAPE, np.int32)
        if segment is not None:
            weakref.finalize(self, segment.close).atexit = False
            memory = segment.map(writable=True)
            self._counts = np.frombuffer(memory, np.int32, math.prod(_SHAPE)).reshape(_SHAPE)

    @classmethod
    def shared(cls) -> Lessons:
        """Those of all processes of a loader; without shared memory, each of them learns by itself."""
        try:
            return cls(Segment.create(4 * math.prod(_SHAPE), name="fastload-lessons"))
        except SharedMemoryError:
            return cls()

    def __reduce__(self) -> tuple[Any, ...]:
        return Lessons, (self._segment if is_for_child() else None,)

    @property
    def has_given_up(self) -> bool:
        """Whether the cache is of no use to the loader: nothing is looked up or stored any more."""
        return bool(self._counts[_NUM_KINDS, 0])

    def give_up(self) -> None:
        """Let the processes of the loader do without the cache from now on."""
        self._counts[_NUM_KINDS, 0] = 1

    def learn(self, kind: int, size: tuple[int, ...]) -> bool | None:
        """Learn from the first resize of an image, which repeats if its shorter or longer side is as before.

        Args:
            kind: Less than 64.
            size: Of the result.

        Returns:
            Whether to store results, and not originals; None: nothing yet.
        """
        row = self._counts[kind]
        shorter, longer, num_equal, num_others, state = row.tolist()
        is_equal = shorter == min(size) or longer == max(size)
        num_equal, num_others = num_equal + is_equal, num_others + (not is_equal)
        if max(num_equal, num_others) >= NUM_LEARNED:  # and count anew: a dataset can change
            state = _RESULTS if num_equal > num_others else _ORIGINALS
            num_equal = num_others = 0
        row[:] = min(size), max(size), num_equal, num_others, state
        return None if state == _UNKNOWN else bool(state == _RESULTS)

    def conclude(self) -> bool:
        """Decide by what was seen: an epoch has ended, and a small dataset would wait for several others.

        Returns:
            Whether images were resized first at all.
        """
        num_equal, num_others, state = self._counts[:, 2:].T
        is_open = (state == _UNKNOWN) & (num_equal + num_others > 0)
        state[is_open] = np.where(num_equal > num_others, _RESULTS, _ORIGINALS)[is_open]
        return bool((state != _UNKNOWN).any())
