"""Seed the generators that a dataset or a collate_fn holds: a part of `rng="sample"`.

`sample_rng` seeds them before each sample. Rules:

1. Generators draw from different random streams: the stream of a generator depends on the sample and on the
   generator's position among those of the dataset, or among those of the collate_fn.
2. Only generators of numpy, random and torch are seeded whose classes are known, and of torch those on the
   CPU. Unseeded generators get a warning, once each.
"""

from __future__ import annotations

import random
import types
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from fastload.rng.pipelines import Search
from fastload.system.logs import say_once

if TYPE_CHECKING:
    from collections.abc import Callable

# Values of these types are shared by all objects of a class, or their contents cannot be replaced.
FIXED = (type, types.FunctionType, property, staticmethod, classmethod, set, frozenset)


class HeldGenerator(NamedTuple):
    """A generator that a dataset or a collate_fn holds.

    Attributes:
        generator: The generator.
        stream: Bytes that differ between the generators of one job, and are the same in every process.
        seed: A function that seeds it from 64 bytes; None: it cannot be seeded.
        fixed_by: A function, class or set that holds it, so threads cannot get their own; or None.
    """

    generator: Any
    stream: bytes
    seed: Any
    fixed_by: Any


def held_generators(search: Search) -> list[HeldGenerator]:
    """Describe the generators that a search has found."""
    held = []
    for owner, found in ((b"dataset", search.of_dataset), (b"collate_fn", search.of_collate)):
        for number, generator in enumerate(found.generators):
            fixed = (holder for holder in search.holding([generator]).values() if isinstance(holder, FIXED))
            stream = b"%s %d" % (owner, number)
            held.append(HeldGenerator(generator, stream, _seeder(generator), next(fixed, None)))
    return held


def warn_of_unseeded(dataset: Any, collate_fn: Any, *, in_threads: bool) -> None:
    """Warn if the dataset or the collate_fn holds generators that `rng="sample"` does not seed.

    Args:
        dataset: Searched.
        collate_fn: Searched.
        in_threads: Whether workers are threads.
    """
    search = Search(dataset, collate_fn)
    for held in held_generators(search):
        generator = held.generator
        if held.seed is None:
            say_once(
                f'rng="sample" does not seed {search.path(generator)}, {generator!r:.80}: what it draws '
                "depends on the workers. Keep a numpy.random.default_rng(), a random.Random or a "
                "torch.Generator on the CPU instead, or draw from fastload.sample_rng()"
            )
        elif in_threads and held.fixed_by is not None:
            say_once(
                f'rng="sample" does not seed {search.path(generator)}, which all worker threads share: '
                f"{held.fixed_by!r:.80} holds it, so what it draws has no fixed order. Keep it in an "
                "attribute of the dataset, of a transform, or of an object that is the collate_fn; draw from "
                'fastload.sample_rng(); or use worker_type="process"'
            )


def pcg64_state(state: int, increment: int) -> Any:
    """The state of numpy's PCG64 from two numbers of 128 bits."""
    # An odd increment: O'Neill, PCG: A Family of Simple Fast Space-Efficient ... Generators, 2014.
    values = {"state": state, "inc": increment | 1}
    return {"bit_generator": "PCG64", "state": values, "has_uint32": 0, "uinteger": 0}


def _seeder(generator: Any) -> Callable[[bytes], object] | None:
    """A function that seeds a generator from 64 bytes; None if its kind is unknown."""
    if type(generator) is np.random.RandomState:
        is_known = generator.get_state(legacy=False)["bit_generator"] == "MT19937"
        return (lambda seeds: generator.seed(number(seeds[:4]))) if is_known else None
    if type(generator) is random.Random:
        return lambda seeds: generator.seed(number(seeds[:8]))
    if type(generator) is torch.Generator and generator.device.type == "cpu":
        return lambda seeds: generator.manual_seed(number(seeds[:8]))
    bits = getattr(generator, "bit_generator", None)
    kind = type(bits)
    if kind is np.random.PCG64:  # default_rng(); this takes a tenth of the time of the general way below
        return lambda seeds: setattr(bits, "state", pcg64_state(number(seeds[:16]), number(seeds[16:32])))
    if kind in (np.random.MT19937, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64):
        return lambda seeds: setattr(bits, "state", kind(np.frombuffer(seeds, np.uint32)).state)
    return None


def number(data: bytes) -> int:
    """The integer of these bytes."""
    return int.from_bytes(data, "little")
