"""Sets the random generators before each sample: the part of `seeding="sample"` where samples are fetched.

All pipelines draw from one pair of generators, in the order of their calls; a pipeline with a seed of the
user's draws from a pair of that seed. So what a sample draws depends neither on the worker nor on the
pipelines of other samples. Each generator that the dataset or the collate_fn holds is seeded from its own
random stream (see `generators`).
"""

from __future__ import annotations

import hashlib
import itertools
import random
import struct
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.utils.data import IterableDataset, MapDataPipe, Subset

from fastload.rng.entry_points import RandomStreams, current_streams, seeded_by, set_worker_streams
from fastload.rng.generators import Search, number, pcg64_state
from fastload.rng.keys import STREAM_BYTES, BatchKey, SampleKey, index_bytes
from fastload.rng.states import LIBRARY_GENERATORS, restorer
from fastload.system.torch_private import has_own_methods

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fastload.rng.entry_points import Pair

_SEEDS = struct.Struct("<QIQ")  # of random, numpy and torch: the first 20 bytes of a digest


class SampleSeeder(RandomStreams):
    """Sets the generators before each sample of one dataset.

    A collate_fn draws from the same generators, in the state that the last sample of its batch left.

    Args:
        dataset: Searched for generators.
        collate_fn: Searched too.
        role: Where samples are fetched. In the consumer's own process, `"local"`, generators belong to the
            user: they are restored after each batch. In a `"thread"`, the generators of random, numpy and
            torch, which all threads share, are left alone.
    """

    adds_worker_seed = False  # else pixels would depend on whether there are workers

    def __init__(
        self,
        dataset: Any,
        collate_fn: Any,
        *,
        role: Literal["process", "thread", "local"],
    ) -> None:
        super().__init__()
        self.locks = role == "thread"
        self._seedable = Search(dataset, collate_fn).seedable
        self._shared = [described.generator for described in self._seedable]
        # Of random, torch and numpy: the order of `begin`.
        self._seed_libraries: tuple[Callable[[int], object], ...] = ()
        if role != "thread":
            self._shared += LIBRARY_GENERATORS
            self._seed_libraries = random.seed, torch.default_generator.manual_seed, np.random.seed
        # By the user's seed: the pairs of this sample, each of which is set when it is first drawn from.
        self._pairs: dict[Any, Pair] = {}
        self._spare: list[Pair] = []
        self._state = np.random.RandomState(0)
        self._is_state_set = False  # for this sample
        self._digest = b""  # of the sample's key
        self._generator: np.random.Generator | None = None  # once requested
        self.is_seeded = False  # while samples of a batch are fetched
        self._block = seeded_by(self, self._shared) if role == "local" else None
        if role != "local":
            set_worker_streams(self, is_thread=role == "thread")

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
            seeds = self._digest
            if seed is not None:
                seeds = hashlib.blake2b(seeds + index_bytes(int(seed)), digest_size=STREAM_BYTES).digest()
            pair[1].seed(number(seeds[24:32]))
            pair[0].bit_generator.state = pcg64_state(number(seeds[32:48]), number(seeds[48:]))
            self._pairs[seed] = pair
        return pair

    def state(self, randomizable: Any) -> np.random.RandomState:
        """The generator of all transforms that keep a RandomState, for the current sample."""
        if not self._is_state_set:
            self._state.seed(number(self._digest[20:24]))
            self._is_state_set = True
        return self._state

    def seeded(
        self, get: Callable[[Any], Any], key: BatchKey, indices: Iterable[Any]
    ) -> Callable[[Any], Any]:
        """Wrap ``get`` to set the generators first; call it once for each of ``indices``, in order."""
        keys = key.of_samples(indices)

        def seeded_get(position: Any) -> Any:
            self.begin(next(keys))
            return get(position)

        return seeded_get

    def begin(self, key: SampleKey) -> None:
        """Set all generators for the sample of this key."""
        if self._block is not None and not self._block.is_open:
            self._block.__enter__()
        self.is_seeded = True
        self._digest = digest = key.digest()
        self._generator = None
        python_seed, numpy_seed, torch_seed = _SEEDS.unpack_from(digest)
        seeds = (python_seed, torch_seed, numpy_seed)
        for seed_library, library_seed in zip(self._seed_libraries, seeds, strict=False):
            seed_library(library_seed)
        for described in self._seedable:
            stream = hashlib.blake2b(digest + described.stream, digest_size=STREAM_BYTES)
            described.seed(stream.digest())
        self._spare += self._pairs.values()
        self._pairs.clear()
        self._is_state_set = False
        self.token += 1  # what the user has seeded for another sample is set again

    def end(self) -> None:
        """End the current sample, and restore the user's generators."""
        self.is_seeded = False
        if self._block is not None:
            self._block.__exit__()

    def save_generators(self) -> Callable[[], None]:
        """See the function `save_generators`."""
        own, pairs, is_state_set = self._generator, dict(self._pairs), self._is_state_set
        generators = [*self._shared, *itertools.chain(*pairs.values()), self._state]
        restores = list(map(restorer, generators if own is None else [*generators, own]))

        def restore() -> None:
            self._generator, self._is_state_set = own, is_state_set
            self._pairs.clear()
            self._pairs.update(pairs)
            for restore_generator in restores:
                restore_generator()

        return restore

    def sample_rng(self) -> np.random.Generator:
        """See the function `sample_rng`."""
        if self._generator is None:
            self._generator = np.random.Generator(np.random.PCG64(np.frombuffer(self._digest, np.uint32)))
        return self._generator


def _current_seeder() -> SampleSeeder | None:
    """That of the sample that this thread is fetching."""
    streams = current_streams()
    return streams if isinstance(streams, SampleSeeder) and streams.is_seeded else None


def sample_rng() -> np.random.Generator:
    """A NumPy Generator for the sample being fetched: call it in `__getitem__` or a transform.

    With ``seeding="sample"`` all calls for one sample return the same Generator, and calls in a `collate_fn`
    return that of the last sample of the batch. Its random stream depends on the seed, the epoch, the index
    and its occurrence, so it is the same for any number of workers, also in threads. Elsewhere
    (``seeding="worker"``, or a direct `dataset[i]`) each call returns a new Generator, seeded by a draw from
    torch's default generator. Do not keep it beyond the sample.
    """
    seeder = _current_seeder()
    if seeder is not None:
        return seeder.sample_rng()
    return np.random.default_rng(int(torch.empty((), dtype=torch.int64).random_().item()))


def save_generators() -> Callable[[], None]:
    """A function that restores the current state of the generators, if a sample is being fetched.

    Call it before user code that another process may skip for this sample, such as reading the source behind
    a cache: a sample draws the same numbers from the cache as from its source. It takes 100 microseconds.
    """
    seeder = _current_seeder()
    return (lambda: None) if seeder is None else seeder.save_generators()


def check_dataset(dataset: Any, *, auto_collation: bool) -> None:
    """Check that samples of this dataset are fetched one by one, by their indices.

    Raises:
        ValueError: The dataset is iterable-style, or fetches many samples at once.
    """
    if isinstance(dataset, (IterableDataset, MapDataPipe)):
        raise ValueError(
            f'seeding="sample" derives random streams from indices, but a {type(dataset).__name__} '
            'has none: use a map-style dataset, or seeding="worker"'
        )
    inner = dataset
    while isinstance(inner, Subset) and _is_plain_subset(type(inner)) and has_own_methods(inner, Subset):
        inner = inner.dataset  # torch's Subset.__getitems__ reads sample after sample, as fastload does
    if auto_collation and getattr(inner, "__getitems__", None):
        raise ValueError(
            f'seeding="sample" seeds before each sample, but {type(inner).__name__}.__getitems__ fetches '
            "many at once: remove that method, wrap the dataset in one without it, such as "
            'fastload.CachedDataset(dataset, cache=None), or use seeding="worker"'
        )


def _is_plain_subset(cls: type[Subset[Any]]) -> bool:
    return cls.__getitem__ is Subset.__getitem__ and cls.__getitems__ is Subset.__getitems__
