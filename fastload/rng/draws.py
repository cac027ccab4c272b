"""Sees which random generators an access to a dataset draws from: their states before and after it differ.

Results do not tell: a draw among few values often gives the same value twice. Rules:

1. Watched are the generators of `random`, numpy and torch, those that the dataset holds, and those of
   albumentations' and MONAI's transforms. Others are not seen, such as `os.urandom`.
2. A draw that decides nothing is none: the coin of a transform that always runs, a range of one value.
3. An access that seeds a generator itself draws the same numbers each time: the generator's state afterwards
   does not depend on its state before.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import random
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.rng.entry_points import RandomSource, seeded_by
from fastload.rng.generators import LIBRARY_GENERATORS, Search
from fastload.rng.rng_scope import RngScope

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.rng.entry_points import Pair

_LIBRARY_NAMES = ("random", "numpy.random", "torch's default generator")
_MAX_UNCONFIRMED = 3
_TWISTER = ctypes.c_char * (624 * 4 + 4)  # the words and the position of a Mersenne Twister
_POSITION_AT_START = 624


class DrawWatch(RandomSource):
    """Watches the generators that a dataset can draw from; pickles as a new watch of the same dataset.

    As a source of random numbers, it gives each transform of albumentations and MONAI its own generators,
    which count what is drawn. All of them start from the same seed, so that under two well-chosen seeds the
    first coins of all transforms differ.

    Args:
        dataset: Searched for generators when it is first accessed.

    Attributes:
        seed: Of the generators of transforms, at each access.
    """

    groups = False

    def __init__(self, dataset: Any) -> None:
        super().__init__()
        self.seed = 0
        self._dataset = dataset
        self._num_unconfirmed: Counter[str] = Counter()
        self._confirmed: set[str] = set()
        self._pairs: dict[int, tuple[Any, np.random.Generator, _CountingRandom]] = {}  # by id of a transform
        self._legacy: dict[int, tuple[Any, np.random.RandomState]] = {}

    def __reduce__(self) -> Any:
        return DrawWatch, (self._dataset,)

    @functools.cached_property
    def generators(self) -> list[Any]:
        """All that are watched, except those of transforms."""
        return [*LIBRARY_GENERATORS, *(described.generator for described in self._held)]

    @functools.cached_property
    def _held(self) -> list[Any]:
        return Search(self._dataset).seedable

    @functools.cached_property
    def _readers(self) -> dict[str, Callable[[], Any]]:
        """Functions that return the states of the generators, by their names."""
        names = (*_LIBRARY_NAMES, *(described.path for described in self._held))
        return dict(zip(names, map(_state_reader, self.generators), strict=True))

    def access(self, dataset: Any, index: int) -> tuple[Any, dict[str, Any]]:
        """A sample, and the states afterwards of the generators that this access has changed, by name."""
        readers = self._readers
        before = [read() for read in readers.values()]
        self._pairs.clear()
        self._legacy.clear()
        with seeded_by(self):
            sample = dataset[index]
        states = zip(readers, before, [read() for read in readers.values()], strict=True)
        changes = {name: new for name, old, new in states if old != new}
        if self._pairs or self._legacy:
            changes |= self._draws_of_transforms()
        return sample, changes

    def read(self, dataset: Any, index: int) -> tuple[Any, list[str]]:
        """A sample, and the names of the generators that it depends on: the next access gives another sample.

        Watches nothing outside of the main thread, beside which other threads can draw.
        """
        if threading.current_thread() is not threading.main_thread():
            return dataset[index], []
        sample, changes = self.access(dataset, index)
        if not changes:
            return sample, []
        drawn = sorted(self._confirmed & changes.keys())
        if not drawn:
            sample = copy.deepcopy(sample)  # a dataset can reuse its buffer
            drawn = self._confirm(dataset, index, changes)
        if drawn and not changes.keys() <= self._readers.keys():
            return dataset[index], drawn  # a transform draws from its own random stream
        return sample, drawn

    def _confirm(self, dataset: Any, index: int, changes: dict[str, Any]) -> list[str]:
        """Read a sample again: which generators does each access draw from, not the first one alone?

        The first access can import a module, or wait a random time for a store that was busy.
        """
        with RngScope(self.generators):  # the sample has drawn what it draws without a watch
            _, again = self.access(dataset, index)
        drawn = [name for name in changes if name in again and again[name] != changes[name]]
        self._confirmed.update(drawn)
        for name in changes.keys() - drawn:
            self._num_unconfirmed[name] += 1
            if self._num_unconfirmed[name] == _MAX_UNCONFIRMED:  # the dataset seeds it for each sample
                self._readers.pop(name, None)
        return drawn

    def pair(self, pipeline: Any) -> Pair:
        """The generators of one transform."""
        if id(pipeline) not in self._pairs:
            pair = np.random.default_rng(self.seed), _CountingRandom(self.seed)
            self._pairs[id(pipeline)] = pipeline, *pair
        return self._pairs[id(pipeline)][1:]

    def state(self, randomizable: Any) -> np.random.RandomState:
        """The generator of one of MONAI's objects."""
        if id(randomizable) not in self._legacy:
            self._legacy[id(randomizable)] = randomizable, np.random.RandomState(self.seed)
        return self._legacy[id(randomizable)][1]

    def _draws_of_transforms(self) -> dict[str, object]:
        drawn = []
        start = np.random.default_rng(self.seed).bit_generator.state
        for transform, generator, python in self._pairs.values():
            draws_coin = python.num_floats == 1 and not python.num_integers and _always_runs(transform)
            draws_python = python.num_floats + python.num_integers > 0 and not draws_coin
            if draws_python or generator.bit_generator.state != start:
                drawn.append(transform)
        for transform, legacy in self._legacy.values():
            state = legacy.get_state(legacy=False)
            position, has_gauss = state["state"]["pos"], state["has_gauss"]
            draws_coin = (
                position == 2 and not has_gauss and _always_runs(transform)
            )  # a float takes two words
            if position != _POSITION_AT_START and not draws_coin:
                drawn.append(transform)
        # A new object: outside of this source, the next access would draw other numbers.
        return {f"the transform {type(transform).__name__}": object() for transform in drawn}


class _CountingRandom(random.Random):
    """Counts its draws; a range of one value draws nothing."""

    num_floats = 0
    num_integers = 0

    def random(self) -> float:
        self.num_floats += 1
        return super().random()

    def getrandbits(self, k: int, /) -> int:
        self.num_integers += 1
        return super().getrandbits(k)

    def uniform(self, a: float, b: float) -> float:
        return a + 0.0 if a == b else super().uniform(a, b)

    def randint(self, a: int, b: int) -> int:
        return a if a == b else super().randint(a, b)


def _always_runs(transform: Any) -> bool:
    """Whether the one number that a transform drew was a coin that decides nothing.

    albumentations' compositions and MONAI's transforms throw it at a probability of 1, too.
    """
    probability = getattr(transform, "prob", None)
    if probability is None and hasattr(transform, "transforms"):
        probability = getattr(transform, "p", None)
    return isinstance(probability, (int, float)) and probability >= 1


# --- states ----------------------------------------------------------------------------------------------


def _state_reader(generator: Any) -> Callable[[], Any]:
    """A function that returns the state of a generator, to be compared only.

    Every sample that is cached needs six states. The memory of numpy's Mersenne Twister, whose address numpy
    gives, is copied in 0.2 microseconds; its attribute `state` takes 40.
    """
    if isinstance(generator, random.Random):
        return generator.getstate
    if isinstance(generator, torch.Generator):
        return lambda: generator.get_state().numpy().tobytes()
    is_legacy = isinstance(generator, np.random.RandomState)
    bits = generator._bit_generator if is_legacy else generator.bit_generator
    if type(bits) is np.random.MT19937 and _knows_layout_of_numpy():
        memory = _TWISTER.from_address(bits.ctypes.state_address)
        return lambda: (bits, memory.raw)  # which owns the memory
    return lambda: repr(bits.state)


@functools.cache
def _knows_layout_of_numpy() -> bool:
    """Whether numpy's Mersenne Twister keeps its state where its releases are known to keep it."""
    bits = np.random.MT19937(1)
    numbers = np.frombuffer(_TWISTER.from_address(bits.ctypes.state_address).raw, np.uint32).tolist()
    state = bits.state["state"]
    return bool(numbers == [*state["key"].tolist(), state["pos"]])
