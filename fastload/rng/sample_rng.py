"""Set the random generators before each sample: the part of `seeding="sample"` where samples are fetched.

Rules:

1. All pipelines draw from one pair of generators, in the order of their calls. A pipeline with a seed of the
   user's draws from a pair of that seed. So what a sample draws depends neither on the worker nor on the
   pipelines of other samples. A pair is set when a sample first draws from it.
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
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from fastload.rng.entry_points import Place, Source, begin_worker, draw_from
from fastload.rng.generators import LIBRARY_GENERATORS, Search, held_generators, number, pcg64_state
from fastload.rng.keys import STREAM_BYTES, StreamOrigin, index_key, stream_bytes
from fastload.rng.rng_scope import RngScope, put_back

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fastload.rng.entry_points import Pair


class _Current(threading.local):
    """The sample that this thread is fetching."""

    rng: SampleRng | None = None


_current = _Current()


class SampleRng(Source):
    """Sets the generators before each sample of one dataset.

    A collate_fn draws from the same generators, in the state that the last sample of its batch left.

    Args:
        dataset: Searched for generators.
        collate_fn: Searched too.
        with_transforms: Whether what albumentations and MONAI draw is set; False leaves them alone.
        role: Where samples are fetched. In the consumer's own process, `"local"`, generators belong to the
            user: they are taken over for each batch only. In a `"thread"`, the generators of random, numpy
            and torch are not set, because all threads share them.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Any,
        *,
        with_transforms: bool,
        role: Literal["process", "thread", "local"],
    ) -> None:
        super().__init__()
        self.locks = role == "thread"
        self._with_transforms = with_transforms
        self._with_globals = role != "thread"
        held = held_generators(Search(dataset, collate_fn))
        self._held = [one for one in held if one.seed is not None]
        self._shared = [one.generator for one in self._held]
        if self._with_globals:
            self._shared += LIBRARY_GENERATORS
        self._pairs: dict[Any, Pair] = {}  # that this sample draws from, by the user's seed
        self._spare: list[Pair] = []
        self._state = np.random.RandomState(0)
        self._is_state_set = False  # for this sample
        self._stream_bytes = b""
        self._generator: np.random.Generator | None = None  # once requested
        self._outer: tuple[SampleRng | None, Place] = None, Place()
        self._takeover = RngScope(self._shared) if role == "local" else None
        if with_transforms and role != "local":
            begin_worker(self, is_thread=role == "thread")

    def pair(self, pipeline: Any) -> Pair:
        """The generators of a pipeline, for the current sample."""
        seed = vars(pipeline).get("seed")
        if not isinstance(seed, (int, np.integer)):
            seed = None
        pair = self._pairs.get(seed)
        if pair is None:
            pair = (
                self._spare.pop()
                if self._spare
                else (np.random.Generator(np.random.PCG64()), random.Random())
            )
            seeds = self._stream_bytes
            if seed is not None:
                seeds = hashlib.blake2b(seeds + index_key(int(seed)), digest_size=STREAM_BYTES).digest()
            pair[1].seed(number(seeds[24:32]))
            pair[0].bit_generator.state = pcg64_state(number(seeds[32:48]), number(seeds[48:]))
            self._pairs[seed] = pair
        return pair

    def state(self, randomizable: Any) -> np.random.RandomState:
        """The generator of all of MONAI's objects, for the current sample."""
        if not self._is_state_set:
            self._state.seed(number(self._stream_bytes[20:24]))
            self._is_state_set = True
        return self._state

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
            place = Place(self if self._with_transforms else None)
            self._outer = _current.rng, draw_from(place) if self._takeover is not None else Place()
            _current.rng = self
        self._stream_bytes = stream_bytes(origin, index, occurrence)
        self._set_generators()

    def end(self) -> None:
        """End the current sample, and restore the user's generators."""
        if _current.rng is self:
            _current.rng, place = self._outer
            if self._takeover is not None:
                draw_from(place)
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
        for held in self._held:
            held.seed(hashlib.blake2b(seeds + held.stream, digest_size=STREAM_BYTES).digest())
        self._spare += self._pairs.values()
        self._pairs.clear()
        self._is_state_set = False
        self.token += 1  # what the user has seeded for another sample is set again

    def mark(self) -> Callable[[], None]:
        """See the function `mark`."""
        own, pairs, is_state_set = self._generator, dict(self._pairs), self._is_state_set
        generators = [*self._shared, *itertools.chain(*pairs.values()), self._state]
        restores = list(map(put_back, generators if own is None else [*generators, own]))

        def restore() -> None:
            self._generator, self._is_state_set = own, is_state_set
            self._pairs.clear()
            self._pairs.update(pairs)
            for put in restores:
                put()

        return restore

    def sample_rng(self) -> np.random.Generator:
        """See the function `sample_rng`."""
        if self._generator is None:
            words = np.frombuffer(self._stream_bytes, np.uint32)
            self._generator = np.random.Generator(np.random.PCG64(words))
        return self._generator


def sample_rng() -> np.random.Generator:
    """A NumPy Generator for the sample being fetched: call it in `__getitem__` or a transform.

    With ``seeding="sample"`` all calls for one sample return the same Generator, and calls in a `collate_fn`
    return that of the last sample of the batch. Its random stream depends on the seed, the epoch, the index
    and its occurrence, so it is the same for any number of workers, also in threads. Elsewhere
    (``seeding="worker"``, or a direct `dataset[i]`) each call returns a new Generator, seeded by a draw from
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
