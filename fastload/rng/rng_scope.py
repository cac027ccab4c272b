"""Set the user's generators for a batch, and restore them after it, in the consumer's process.

`sample_rng` uses this where a dataset is read in the consumer's process. Rules:

1. After a batch all generators are restored, also after an error. Between batches nothing is taken over, so
   an iterator can be dropped at any time.
2. Takeovers can be nested (a dataset that iterates over a loader) and can overlap (two threads that read one
   dataset). If one ends while a later one of the same generator is open, the later one restores it.
3. A forked child begins with none, and takes no lock of its parent.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable


class RngScope(contextlib.AbstractContextManager[None]):
    """A block after which generators have the state of before; reusable.

    Args:
        generators: Of numpy, random or torch.
    """

    def __init__(self, generators: list[Any]) -> None:
        self.is_open = False
        self._generators = generators
        self._restores: dict[int, Callable[[], object]] = {}  # by id of a generator

    def __enter__(self) -> None:
        with _lock:
            self._restores = {id(generator): put_back(generator) for generator in self._generators}
            self.is_open = True
            _open.append(self)

    def __exit__(self, *exc_info: object) -> None:
        """Restore everything that no later takeover has."""
        with _lock:
            self.is_open = False
            later: list[RngScope] = []
            if self in _open:  # False in a child that was forked in the middle
                position = _open.index(self)
                later = _open[position + 1 :]
                del _open[position]
            for key, restore in self._restores.items():
                heir = next((takeover for takeover in later if key in takeover._restores), None)
                if heir is None:
                    restore()
                else:
                    heir._restores[key] = restore
            self._restores = {}


_lock = threading.RLock()
_open: list[RngScope] = []  # the oldest first


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    _open.clear()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_after_fork)


def put_back(generator: Any) -> Callable[[], object]:
    """A function that restores the current state of a generator."""
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return functools.partial(setattr, bits, "state", bits.state)
    return functools.partial(generator.set_state, generator.get_state())
