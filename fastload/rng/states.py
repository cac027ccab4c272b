"""The states of generators of random, numpy and torch: compared, and restored."""

from __future__ import annotations

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

_STEP = 52  # of the 624 words, 12 and the position are compared: a draw changes the position, or all words


def state_of(generator: Any) -> Any:
    """The state of a generator, to be compared only; that of `numpy.random` takes 70 microseconds."""
    if isinstance(generator, random.Random):
        _, words, gauss = generator.getstate()
        return words[::_STEP], gauss
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.RandomState):
        return pickle.dumps(generator.get_state(legacy=False))
    return pickle.dumps(generator.bit_generator.state)


def restorer(generator: Any) -> Callable[[], object]:
    """A function that restores the current state of a generator."""
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return functools.partial(setattr, bits, "state", bits.state)
    return functools.partial(generator.set_state, generator.get_state())
