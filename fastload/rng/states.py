"""The states of generators of random, numpy and torch: compared, and restored."""

from __future__ import annotations

import ctypes
import functools
import pickle
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

# random.random(), torch.rand() and np.random.rand() draw from these.
LIBRARY_GENERATORS = (random._inst, torch.default_generator, np.random.mtrand._rand)

_TWISTER = ctypes.c_char * (624 * 4 + 4)  # the words and the position of a Mersenne Twister
_STEP = 52  # of the 624 words, 12 and the position are compared: a draw changes the position, or all words


def state_of(generator: Any) -> Any:
    """The state of a generator, to be compared only."""
    if isinstance(generator, random.Random):
        _, words, gauss = generator.getstate()
        return words[::_STEP], gauss
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.RandomState):
        return pickle.dumps(generator.get_state(legacy=False))
    return pickle.dumps(generator.bit_generator.state)


def state_reader(generator: Any) -> Callable[[], Any]:
    """A function that returns the state of a generator, to be compared only, for many calls.

    To ask numpy's Mersenne Twister for its state twice takes 150 microseconds, more than to read and store a
    small image. Its memory, whose address numpy gives, is copied in 0.2.
    """
    is_legacy = isinstance(generator, np.random.RandomState)
    bits = generator._bit_generator if is_legacy else getattr(generator, "bit_generator", None)
    if type(bits) is not np.random.MT19937 or not _knows_layout_of_numpy():
        return functools.partial(state_of, generator)
    memory = _TWISTER.from_address(bits.ctypes.state_address)
    return lambda: (bits, memory.raw)  # which owns the memory


@functools.cache
def _knows_layout_of_numpy() -> bool:
    """Whether numpy's Mersenne Twister keeps its state where its releases are known to keep it."""
    bits = np.random.MT19937(1)
    numbers = np.frombuffer(_TWISTER.from_address(bits.ctypes.state_address).raw, np.uint32).tolist()
    state = bits.state["state"]
    return bool(numbers == [*state["key"].tolist(), state["pos"]])


def restorer(generator: Any) -> Callable[[], object]:
    """A function that restores the current state of a generator."""
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return functools.partial(setattr, bits, "state", bits.state)
    return functools.partial(generator.set_state, generator.get_state())
