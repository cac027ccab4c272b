"""Set the random generators before each sample: the part of `rng="sample"` where samples are fetched.

Rules:

1. Pipelines are searched once, not for each sample, and all share one pair of generators (see `seeding`, rule
   2). So the cost of a sample does not depend on the number of pipelines.
2. A sample draws the same numbers from a cache as from its source: `mark` restores the generators.
3. In the parent all generators belong to the user: they are restored after each batch.
4. In worker threads the generators of random, numpy and torch are shared, and therefore left unchanged.
5. Each generator that the dataset or the collate_fn holds is seeded from its own random stream (see
   `generators`).
"""

from __future__ import annotations

import hashlib
import itertools
import random
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.rng.generators import held_generators, number, pcg64_state
from fastload.rng.pipelines import LIBRARY_GENERATORS, Search, attributes, parts_of
from fastload.rng.sample_streams import STREAM_BYTES, StreamOrigin, index_key, stream_bytes
from fastload.rng.seeding import give_state
from fastload.rng.takeover import Takeover, put_back, saved_generators

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class _Current(threading.local):
    """The sample that this thread is fetching."""

    rng: SampleRng | None = None


_current = _Current()


class SampleRng:
    """Sets the generators before each sample of one dataset.

    A collate_fn draws from the same generators, in the state that the last sample of its batch left.

    Args:
        dataset: Searched for generators, albumentations pipelines, and objects with MONAI's
            `set_random_state`.
        collate_fn: Searched too.
        with_pipelines: Whether pipelines and MONAI's objects are set; False leaves them alone.
        is_guest: Whether generators and pipelines belong to the user, in the consumer's process: they are
            taken over for each batch only.
        with_globals: Whether what all threads share is set: the generators of random, numpy and torch, and
            generators that a function, a class or a set holds.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Any,
        *,
        with_pipelines: bool,
        is_guest: bool,
        with_globals: bool = True,
    ) -> None:
        search = Search(dataset, collate_fn)
        found = (search.of_dataset, search.of_collate) if with_pipelines else ()
        pipelines = [pipeline for part in found for pipeline in part.pipelines]
        self._randomizables = [randomizable for part in found for randomizable in part.randomizables]
        self._held = [
            held
            for held in held_generators(search)
            if held.seed is not None and (with_globals or held.fixed_by is None)
        ]
        self._shared = [
            *(LIBRARY_GENERATORS if with_globals else ()),
            *(held.generator for held in self._held),
        ]
        self._transforms = parts_of(pipelines)
        self._salt = b"".join(_user_seed(pipeline) for pipeline in pipelines)
        self._with_globals = with_globals
        self._bits = np.random.PCG64(0)
        self._pair = (np.random.Generator(self._bits), random.Random(0))
        self._state = np.random.RandomState(0)
        self._stream_bytes = b""
        self._generator: np.random.Generator | None = None  # once requested
        self._outer: SampleRng | None = None
        self._takeover: Takeover | None = None
        if is_guest:
            owners = self._transforms + self._randomizables
            self._takeover = Takeover(lambda: saved_generators(self._shared, owners), self._take_over)
        else:
            self._take_over()

    def seeded(
        self, get: Callable[[Any], Any], indices: Iterable[Any], origin: StreamOrigin
    ) -> Callable[[Any], Any]:
        """Wrap ``get`` to set the generators first; call it once for each of ``indices``, in order."""
        drawn = zip(indices, origin.occurrences or itertools.repeat(0))  # noqa: B905  # repeat has no end

        def seeded_get(position: Any) -> Any:
            index, occurrence = next(drawn)
            self.begin(origin, index, occurrence)
            return get(position)

        return seeded_get

    def begin(self, origin: StreamOrigin, index: Any, occurrence: int) -> None:
        """Set all generators for the sample of this index."""
        if self._takeover is not None and not self._takeover.is_open:
            self._takeover.__enter__()
        if _current.rng is not self:
            # A dataset being read for a sample can itself iterate over a loader.
            self._outer, _current.rng = _current.rng, self
        self._stream_bytes = stream_bytes(origin, index, occurrence)
        self._set_generators()

    def end(self) -> None:
        """End the current sample, and restore the user's generators."""
        if _current.rng is self:
            _current.rng = self._outer
        if self._takeover is not None:
            self._takeover.__exit__()

    def _set_generators(self) -> None:
        """Set all generators for the current sample, from the first draw on."""
        seeds = self._stream_bytes
        self._generator = None
        if self._with_globals:
            random.seed(number(seeds[:8]))
            np.random.seed(number(seeds[8:12]))
            torch.default_generator.manual_seed(number(seeds[12:20]))
        if self._randomizables:
            self._state.seed(number(seeds[20:24]))
        for held in self._held:
            held.seed(hashlib.blake2b(seeds + held.stream, digest_size=STREAM_BYTES).digest())
        if self._transforms:
            if self._salt:
                seeds = hashlib.blake2b(seeds + self._salt, digest_size=STREAM_BYTES).digest()
            self._pair[1].seed(number(seeds[24:32]))
            self._bits.state = pcg64_state(number(seeds[32:48]), number(seeds[48:]))

    def mark(self) -> Callable[[], None]:
        """See the function `mark`."""
        own = self._generator
        generators = [*self._shared, *self._pair, self._state, *([] if own is None else [own])]
        restores = list(map(put_back, generators))

        def restore() -> None:
            self._generator = own
            for put in restores:
                put()

        return restore

    def sample_rng(self) -> np.random.Generator:
        """See the function `sample_rng`."""
        if self._generator is None:
            words = np.frombuffer(self._stream_bytes, np.uint32)
            self._generator = np.random.Generator(np.random.PCG64(words))
        return self._generator

    def _take_over(self) -> None:
        for transform in self._transforms:
            transform.set_random_state(*self._pair)
        give_state(self._randomizables, self._state)


def sample_rng() -> np.random.Generator:
    """A NumPy Generator for the sample being fetched: call it in `__getitem__` or a transform.

    With ``rng="sample"`` all calls for one sample return the same Generator, and calls in a `collate_fn`
    return that of the last sample of the batch. Its random stream depends on the seed, the epoch, the index
    and its occurrence, so it is the same for any number of workers, also in threads. Elsewhere
    (``rng="worker"``, or a direct `dataset[i]`) each call returns a new Generator, seeded by a draw from
    torch's default generator. Do not keep it beyond the sample.
    """
    rng = _current.rng
    if rng is not None:
        return rng.sample_rng()
    return np.random.default_rng(int(torch.empty((), dtype=torch.int64).random_().item()))


def mark() -> Callable[[], None]:
    """A function that restores the current state of the generators, if a sample is being fetched.

    Use it around user code that a different process can skip for this sample, such as reading the source
    behind a cache. It takes 100 microseconds.
    """
    rng = _current.rng
    return (lambda: None) if rng is None else rng.mark()


def _user_seed(pipeline: Any) -> bytes:
    """The user's seed of Compose, to be mixed in."""
    seed = attributes(pipeline).get("seed")
    return index_key(int(seed)) if isinstance(seed, (int, np.integer)) else b""
