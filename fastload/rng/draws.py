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
import random
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.rng.entry_points import RandomStreams, seeded_by
from fastload.rng.generators import Search
from fastload.rng.states import LIBRARY_GENERATORS, state_of
from fastload.system.cached_property import cached_property

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.rng.entry_points import Pair

_LIBRARY_NAMES = ("random", "torch's default generator", "numpy.random")
_POSITION_AT_START = 624  # of a Mersenne Twister


class DrawWatch(RandomStreams):
    """Watches the generators that a dataset can draw from; pickles as a new watch of the same dataset.

    As random streams, it gives each transform of albumentations and MONAI its own generators,
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
        self._of_transforms: dict[int, tuple[Any, Any]] = {}  # by id: a transform and what it draws from

    def __reduce__(self) -> Any:
        return DrawWatch, (self._dataset,)

    @cached_property
    def generators(self) -> dict[str, Any]:
        """All that are watched by name, except those of transforms."""
        held = {described.path: described.generator for described in Search(self._dataset).seedable}
        return dict(zip(_LIBRARY_NAMES, LIBRARY_GENERATORS, strict=True)) | held

    def access(self, dataset: Any, index: int) -> tuple[Any, dict[str, Any]]:
        """A sample, and the states afterwards of the generators that this access has changed, by name."""
        before = list(map(state_of, self.generators.values()))
        self._of_transforms.clear()
        with seeded_by(self):
            sample = dataset[index]
        states = zip(self.generators, before, map(state_of, self.generators.values()), strict=True)
        changes = {name: new for name, old, new in states if old != new}
        for transform, drawn_from in self._of_transforms.values():
            if self._draws(transform, drawn_from):  # outside of these streams, the next draw would be another
                changes[f"the transform {type(transform).__name__}"] = object()
        return sample, changes

    def read(self, dataset: Any, index: int) -> tuple[Any, list[str]]:
        """A sample, and the names of the generators that it depends on: the next access gives another sample.

        A sample that draws is read again: the first access can draw for what is made once, or wait a random
        time for a store that was busy; and a dataset can seed for each sample. Watches nothing outside of the
        main thread, beside which other threads can draw.
        """
        if threading.current_thread() is not threading.main_thread():
            return dataset[index], []
        sample, changes = self.access(dataset, index)
        if not changes:
            return sample, []
        sample = copy.deepcopy(sample)  # a dataset can reuse its buffer
        with seeded_by(None, self.generators.values()):  # the sample has drawn what it draws without a watch
            _, again = self.access(dataset, index)
        drawn = drawn_by_both(changes, again)
        if drawn and not changes.keys() <= self.generators.keys():
            return dataset[index], drawn  # a transform draws from its own random stream
        return sample, drawn

    def pair(self, pipeline: Any) -> Pair:
        """The generators of one transform."""
        pair: Pair = self._own(
            pipeline, lambda: (np.random.default_rng(self.seed), _CountingRandom(self.seed))
        )
        return pair

    def state(self, randomizable: Any) -> np.random.RandomState:
        """The generator of one of MONAI's objects."""
        state: np.random.RandomState = self._own(randomizable, lambda: np.random.RandomState(self.seed))
        return state

    def _own(self, transform: Any, make: Callable[[], Any]) -> Any:
        if id(transform) not in self._of_transforms:
            self._of_transforms[id(transform)] = transform, make()
        return self._of_transforms[id(transform)][1]

    def _draws(self, transform: Any, drawn_from: Any) -> bool:
        """Whether a transform has drawn more than a coin that decides nothing."""
        if isinstance(drawn_from, np.random.RandomState):
            state = drawn_from.get_state(legacy=False)
            return bool(state["state"]["pos"] != _POSITION_AT_START)
        generator, python = drawn_from
        # albumentations' compositions throw a coin first, at a probability of 1, too.
        always_throws = hasattr(transform, "transforms") and transform.p >= 1
        draws_numpy = state_of(generator) != state_of(np.random.default_rng(self.seed))
        return draws_numpy or bool(python.num_draws > always_throws)


def drawn_by_both(changes: dict[str, Any], again: dict[str, Any]) -> list[str]:
    """What both accesses to a sample drew from; what the dataset seeds each time ends in the same state."""
    return [name for name in changes if name in again and again[name] != changes[name]]


class _CountingRandom(random.Random):
    """Counts its draws; a range of one value draws nothing."""

    num_draws = 0

    def random(self) -> float:
        self.num_draws += 1
        return super().random()

    def getrandbits(self, k: int, /) -> int:
        self.num_draws += 1
        return super().getrandbits(k)

    def uniform(self, a: float, b: float) -> float:
        return a + 0.0 if a == b else super().uniform(a, b)

    def randint(self, a: int, b: int) -> int:
        return a if a == b else super().randint(a, b)
