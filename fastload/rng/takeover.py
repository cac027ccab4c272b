"""Let the user's generators draw from the loader's random streams during a batch, in the consumer's process.

`sample_rng` uses this where a dataset is read in the consumer's process, and `local_pipelines` for pipelines
with `rng="worker"`. Rules:

1. After a batch all generators are restored, also after an error. Between batches nothing is taken over, so
   an iterator can be dropped at any time.
2. Takeovers can be nested (a dataset that iterates over a loader) and can overlap (two threads that read one
   dataset). If one ends while a later one of the same object is open, the later one restores the object at
   its end.
3. A forked child begins with none, and takes no lock of its parent.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.rng.pipelines import GENERATOR_ATTRIBUTES
from fastload.rng.seeding import pipeline_streams
from fastload.rng.worker_info import get_worker_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# By id of a generator or of its owner: a function that restores it.
Restores = dict[int, "Callable[[], object]"]


class Takeover(contextlib.AbstractContextManager[None]):
    """A block in which generators draw from different random streams; reusable.

    Args:
        saved: Returns the functions that restore the current state.
        take: Sets the generators. If it raises, nothing has changed.
    """

    def __init__(self, saved: Callable[[], Restores], take: Callable[[], object]) -> None:
        self.thread = 0
        self.is_open = False
        self._saved = saved
        self._take = take
        self._restores: Restores = {}

    def __enter__(self) -> None:
        with _lock:
            self._restores = self._saved()
            self.thread, self.is_open = threading.get_ident(), True
            _open.append(self)
            try:
                self._take()
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *exc_info: object) -> None:
        """Restore everything that no later takeover has."""
        with _lock:
            self.is_open = False
            later: list[Takeover] = []
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
_open: list[Takeover] = []  # the oldest first


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


def saved_generators(generators: Iterable[Any], owners: Iterable[Any]) -> Restores:
    """The functions that restore generators, and the attributes in which owners keep theirs."""
    restores: Restores = {id(generator): put_back(generator) for generator in generators}
    for owner in owners:
        own = {name: value for name, value in vars(owner).items() if name in GENERATOR_ATTRIBUTES}
        restores[id(owner)] = functools.partial(_put_back_attributes, owner, own)
    return restores


def _put_back_attributes(owner: Any, own: dict[str, Any]) -> None:
    for name in GENERATOR_ATTRIBUTES & vars(owner).keys() - own.keys():
        delattr(owner, name)  # what the class provides is visible again
    vars(owner).update(own)


def local_pipelines(dataset: Any, base_seed: int, collate_fn: Any) -> contextlib.AbstractContextManager[None]:
    """The block in which to read and collate a batch without workers, with `rng="worker"`.

    torch seeds nothing in the consumer's process, because the generators there belong to the user. Pipelines
    have their own generators, which the user's seeds do not reach. In this block they draw from random
    streams derived from the loader's base seed: those of worker 0.

    It does nothing if there is no pipeline, or if pipelines already have a random stream: in a worker, and in
    a dataset being read for a loader.
    """
    if "albumentations" not in sys.modules:  # then no pipeline can exist
        return contextlib.nullcontext()
    thread = threading.get_ident()
    if get_worker_info() is not None or any(takeover.thread == thread for takeover in list(_open)):
        return contextlib.nullcontext()
    streams = pipeline_streams(dataset, base_seed, collate_fn)
    if not streams:
        return contextlib.nullcontext()
    transforms = [transform for stream in streams for transform in stream.transforms]
    saved = functools.partial(saved_generators, (), transforms)
    return Takeover(saved, lambda: [stream.take_over() for stream in streams])
