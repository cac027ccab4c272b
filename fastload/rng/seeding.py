"""Seed workers: random, numpy and torch with torch's own values, and every albumentations pipeline.

Rules:
1. The libraries get exactly torch's values, so seeding them twice changes nothing.
2. Pipelines are seeded with ``set_random_state`` and one shared pair of generators. ``set_random_seed`` would
   give every transform its own random stream with the same seed: two flips with p=0.5 would always agree.
3. Pipelines of AlbumentationsX seed themselves, in worker processes from torch's seeds. They are seeded here
   in worker threads only, where they do not see their worker.
4. The random streams of the dataset's pipelines are the same for any collate_fn: pipelines that only the
   collate_fn holds are numbered after them.
"""

from __future__ import annotations

import operator
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import get_worker_info as torch_worker_info
from torch.utils.data._utils.worker import _generate_state

from fastload.rng.pipelines import Search, attributes, parts_of, seeds_itself
from fastload.rng.worker_info import get_worker_info

if TYPE_CHECKING:
    from collections.abc import Callable

_WORD_BITS = 32  # the word size of numpy's SeedSequence


# --- the libraries ---------------------------------------------------------------------------------------


def seed_libraries(base_seed: int, worker_id: int) -> int:
    """Seed random, torch and numpy exactly as torch's own worker does.

    Args:
        base_seed: The seed that the loader drew when the iterator was made.
        worker_id: 0 to num_workers - 1.

    Returns:
        The worker's seed, ``base_seed + worker_id``.
    """
    seed = base_seed + worker_id
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(_generate_state(base_seed, worker_id))
    return seed


def seed_everything(seed: int) -> torch.Generator:
    """Seed random, numpy and torch in this process; return a generator for the loader.

    ``loader = DataLoader(dataset, shuffle=True, generator=seed_everything(1))`` draws its order and its
    workers' seeds from its own random stream, which dropout and other loaders do not change.

    Args:
        seed: From 0 to 2**63 - 1; numpy gets its low 32 bits.

    Raises:
        TypeError: The seed is not an int.
        ValueError: The seed is out of range.
    """
    number = operator.index(seed)
    if not 0 <= number < 1 << 63:
        raise ValueError(f"seed should be from 0 to 2**63 - 1, but got {number}")
    random.seed(number)
    np.random.seed(number % (1 << _WORD_BITS))
    torch.manual_seed(number)
    return torch.Generator().manual_seed(number)


# --- the pipelines ---------------------------------------------------------------------------------------


def seed_albumentations(dataset: Any, seed: int, collate_fn: Any = None) -> int:
    """Give each albumentations pipeline its own random stream, drawn from ``seed``: for use in a worker.

    The objects with MONAI's `set_random_state` that only the collate_fn holds share one random stream. Those
    of the dataset keep their state, as in torch: MONAI's own worker_init_fn seeds them. In a worker process,
    pipelines that seed themselves are left alone.

    Args:
        dataset: The dataset, which is searched for pipelines; or one pipeline.
        seed: The worker's seed.
        collate_fn: Searched for further pipelines.

    Returns:
        How many pipelines were seeded.
    """
    search = Search(dataset, collate_fn)
    streams = _streams(search, seed)
    if torch_worker_info() is not None:
        streams = [stream for stream in streams if not seeds_itself(stream.transforms[0])]
    for stream in streams:
        stream.take_over()
    randomizables = search.of_collate.randomizables
    if randomizables:
        num_pipelines = len(search.of_dataset.pipelines) + len(search.of_collate.pipelines)
        sequence = np.random.SeedSequence([*_words(seed), num_pipelines])
        give_state(randomizables, np.random.RandomState(np.random.MT19937(sequence)))
    return len(streams)


def give_state(randomizables: list[Any], state: np.random.RandomState) -> None:
    """Let objects with MONAI's `set_random_state` draw from this state."""
    for randomizable in randomizables:
        randomizable.set_random_state(state=state)
    for randomizable in randomizables:
        randomizable.R = state  # a composition has given its parts other states


class PipelineStream(NamedTuple):
    """The random stream of one pipeline: all its transforms share one pair of generators.

    Attributes:
        transforms: The pipeline, and then its parts.
        generator: Of the pair.
        py_random: Of the pair.
    """

    transforms: list[Any]
    generator: np.random.Generator
    py_random: random.Random

    def take_over(self) -> None:
        """Let all transforms draw from the pair, in its current state."""
        # A Compose passes the pair on to its children, but not to transforms in other attributes.
        for transform in self.transforms:
            transform.set_random_state(self.generator, self.py_random)


def pipeline_streams(dataset: Any, seed: int, collate_fn: Any = None) -> list[PipelineStream]:
    """A random stream for each albumentations pipeline of both; the pipelines are not changed.

    Pipelines that seed themselves get no stream. A stream depends on ``seed``, on the pipeline's position in
    `find_pipelines`, and on the user's seed of Compose, if any. Positions in the collate_fn follow those in
    the dataset.

    Returns:
        The streams, in the order in which they should take over.
    """
    streams = _streams(Search(dataset, collate_fn), seed)
    return [stream for stream in streams if not seeds_itself(stream.transforms[0])]


def _streams(search: Search, seed: int) -> list[PipelineStream]:
    of_dataset = search.of_dataset.pipelines
    streams = [
        PipelineStream(parts_of([pipeline]), *_generators(seed, ordinal, attributes(pipeline).get("seed")))
        for ordinal, pipeline in enumerate([*of_dataset, *search.of_collate.pipelines])
    ]
    # The dataset's take over last: a Compose of the collate_fn passes its generators on to all of its parts,
    # and one of them can be a pipeline of the dataset.
    return streams[len(of_dataset) :] + streams[: len(of_dataset)]


def _generators(seed: int, ordinal: int, user_seed: Any) -> tuple[np.random.Generator, random.Random]:
    words = [*_words(seed), ordinal]
    if isinstance(user_seed, (int, np.integer)):  # the types that albumentations accepts as a seed
        # The 1 distinguishes seed=0 from no seed: SeedSequence ignores trailing zeros.
        words += [1, *_words(int(user_seed))]
    for_numpy, for_python = np.random.SeedSequence(words).spawn(2)
    state = for_python.generate_state(4, np.uint32).tobytes()
    return np.random.default_rng(for_numpy), random.Random(int.from_bytes(state, "little"))


def _words(seed: int) -> list[int]:
    """The low and the high 32-bit word; torch's seeds are 64 bits wide."""
    mask = (1 << _WORD_BITS) - 1
    return [seed & mask, (seed >> _WORD_BITS) & mask]


# --- worker_init_fn --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SeedWorker:
    """A ``worker_init_fn`` that seeds random, numpy, torch and every albumentations pipeline of the dataset.

    It does not seed the pipelines of a `collate_fn`, because torch tells a worker_init_fn only the dataset.
    fastload's loader seeds them itself (``seed_albumentations=True``). For torch's loader, also keep the
    `collate_fn` in an attribute of the dataset.

    Example:
        ``DataLoader(dataset, num_workers=4, worker_init_fn=seed_worker)``, with torch's or fastload's loader.
    """

    functions: tuple[Callable[[int], Any], ...] = ()
    # For fastload's loader, which knows it: its pipelines are seeded too.
    _collate_fn: Any = field(default=None, repr=False, hash=False)

    def __call__(self, worker_id: int) -> None:
        """Seed this worker, then call the functions that `then` has added.

        Raises:
            RuntimeError: This is not a loader's worker.
        """
        info = get_worker_info()
        if info is None:
            raise RuntimeError(
                "seed_worker seeds the worker process that calls it, but this is not a worker: pass it to "
                "the loader, as DataLoader(..., num_workers=2, worker_init_fn=fastload.seed_worker)"
            )
        seed = info.seed
        if info.method == "process":  # threads share the libraries' generators with all other threads
            seed = seed_libraries(torch.initial_seed() - worker_id, worker_id)
        seed_albumentations(info.dataset, seed, self._collate_fn)
        for function in self.functions:
            function(worker_id)

    def then(self, function: Callable[[int], Any]) -> SeedWorker:
        """A ``worker_init_fn`` that seeds first and calls ``function(worker_id)`` last; can be chained.

        Raises:
            TypeError: ``function`` is not callable.
        """
        if not callable(function):
            raise TypeError(f"then() expects a function of the worker's id, got {function!r}")
        return replace(self, functions=(*self.functions, function))


seed_worker = SeedWorker()
