"""Resizes: whether the first resizes of a loader's images repeat, learnt once for all of its processes.

What is learnt decides only what is stored: keys are always right. So processes share the counts without a
lock, and a lost update costs a few more images.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np

from fastload.errors import SharedMemoryError
from fastload.memory.segment import Segment, is_for_child

NUM_LEARNT = 64  # resizes that repeat, or that do not, decide
# Of the counts: for each kind the sides of the last result, how many repeated, how many did not, and a state.
_SHAPE = (64, 5)
_UNKNOWN, _RESULTS, _ORIGINALS = range(3)


class Resizes:
    """What the first resizes of images have in common, by kind: masks have another mode, or another filter.

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
    def shared(cls) -> Resizes:
        """Those of all processes of a loader; without shared memory, each of them learns by itself."""
        try:
            return cls(Segment.create(4 * math.prod(_SHAPE), name="fastload-resizes"))
        except SharedMemoryError:
            return cls()

    def __reduce__(self) -> tuple[Any, ...]:
        return Resizes, (self._segment if is_for_child() else None,)

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
        if max(num_equal, num_others) >= NUM_LEARNT:  # and count anew: a dataset can change
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
