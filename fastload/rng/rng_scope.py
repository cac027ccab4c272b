"""A block after which generators have the state of before: for datasets read in the consumer's process.

There all generators belong to the user. Between batches no scope is open, so an iterator can be dropped at
any time.
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
    """A block after which generators have the state of before, also after an error; reusable.

    Scopes can be nested (a dataset that iterates over a loader) and can overlap (two threads that read one
    dataset). If one ends while a later one of the same generator is open, the later one restores it.

    Args:
        generators: Of numpy, random or torch.
    """

    def __init__(self, generators: list[Any]) -> None:
        self.is_open = False
        self._generators = generators
        self._restores: dict[int, Callable[[], object]] = {}  # by id of a generator

    def __enter__(self) -> None:
        with _lock:
            self._restores = {id(generator): state_restorer(generator) for generator in self._generators}
            self.is_open = True
            _open_scopes.append(self)

    def __exit__(self, *exc_info: object) -> None:
        with _lock:
            self.is_open = False
            later_scopes: list[RngScope] = []
            if self in _open_scopes:  # False in a child that was forked in the middle
                position = _open_scopes.index(self)
                later_scopes = _open_scopes[position + 1 :]
                del _open_scopes[position]
            for key, restore in self._restores.items():
                later = next((scope for scope in later_scopes if key in scope._restores), None)
                if later is None:
                    restore()
                else:  # it began with numbers of this scope, and must end with the user's
                    later._restores[key] = restore
            self._restores = {}


_lock = threading.RLock()
_open_scopes: list[RngScope] = []  # the oldest first


def _after_fork() -> None:
    """Let the child begin without scopes, and with a lock that no thread of its parent has taken."""
    global _lock
    _lock = threading.RLock()
    _open_scopes.clear()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_after_fork)


def state_restorer(generator: Any) -> Callable[[], object]:
    """A function that restores the current state of a generator."""
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return functools.partial(setattr, bits, "state", bits.state)
    return functools.partial(generator.set_state, generator.get_state())
