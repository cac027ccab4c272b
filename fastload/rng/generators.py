"""Seed the generators that a dataset or a collate_fn keeps for itself: a part of `rng="sample"`.

`sample_rng` seeds them before each sample. Rules:

1. Generators draw from different random streams: the stream of a generator depends on the sample and on the
   generator's position among those of the dataset, or among those of the collate_fn.
2. Only generators of numpy, random and torch are seeded whose classes are known, and of torch those on the
   CPU. Generators that are left as they are get a warning, once for each loader.
"""

from __future__ import annotations

import collections
import functools
import random
import types
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from fastload.rng.pipelines import attributes, find_random, with_holders
from fastload.system.logs import say_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastload.rng.pipelines import FoundRandom

# Values of these types are shared by all objects of a class, or their contents cannot be replaced.
FIXED = (type, types.FunctionType, property, staticmethod, classmethod, set, frozenset)

_OWNERS = ("dataset", "collate_fn")
_EMPTY_CELL = types.CellType()


class HeldGenerator(NamedTuple):
    """A generator that a dataset or a collate_fn holds.

    Attributes:
        generator: The generator.
        stream: Bytes that differ between the generators of one job, and are the same in every process.
        path: Where it is held, in words.
        seed: Seeds it from 64 bytes; None: it cannot be seeded.
        fixed_by: A function, class or set that holds it, so that threads cannot get their own; or None.
    """

    generator: Any
    stream: bytes
    path: str
    seed: Callable[[bytes], object] | None
    fixed_by: Any


def held_generators(owners: tuple[Any, ...], found: FoundRandom) -> list[HeldGenerator]:
    """Describe the generators that `find_random(owners)` found.

    Args:
        owners: The dataset and the collate_fn.
        found: The result of the search.
    """
    held = []
    counts: collections.Counter[str] = collections.Counter()
    for generator in found.generators:
        owner, path = _place(generator, owners, found.holders)
        fixed = [h for h in with_holders([generator], found.holders).values() if isinstance(h, FIXED)]
        held.append(
            HeldGenerator(
                generator,
                b"%s %d" % (owner.encode(), counts[owner]),
                path,
                _seeder(generator),
                fixed[0] if fixed else None,
            )
        )
        counts[owner] += 1
    return held


def warn_of_unseeded(dataset: Any, collate_fn: Any, *, in_threads: bool) -> None:
    """Warn if the dataset or the collate_fn holds generators that `rng="sample"` does not seed.

    Args:
        dataset: Searched.
        collate_fn: Searched.
        in_threads: Whether workers are threads.
    """
    owners = (dataset, collate_fn)
    for held in held_generators(owners, find_random(owners)):
        if held.seed is None:
            say_once(
                f'rng="sample" does not seed {held.path}, {_described(held.generator)}: what it draws '
                "depends on the workers. Keep a numpy.random.default_rng(), a random.Random or a "
                "torch.Generator on the CPU instead, or draw from fastload.sample_generator()"
            )
        elif in_threads and held.fixed_by is not None:
            say_once(
                f'rng="sample" does not seed {held.path}, which all worker threads share because it is held '
                f"by {_named(held.fixed_by)}: what it draws has no fixed order. Keep it in an attribute of "
                "the dataset, of a transform, or of an object that is the collate_fn; draw from "
                'fastload.sample_generator(); or use worker_method="process"'
            )


def put_back(generator: Any) -> Callable[[], object]:
    """A function that restores the current state of a generator that can be seeded."""
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return functools.partial(setattr, bits, "state", bits.state)
    return functools.partial(generator.set_state, generator.get_state())


def pcg64_state(state: int, increment: int) -> Any:
    """The state of numpy's PCG64 of two numbers of 128 bits."""
    # An odd increment: O'Neill, PCG: A Family of Simple Fast Space-Efficient ... Generators, 2014.
    values = {"state": state, "inc": increment | 1}
    return {"bit_generator": "PCG64", "state": values, "has_uint32": 0, "uinteger": 0}


# --- how a generator is seeded -----------------------------------------------------------------------------


def _seeder(generator: Any) -> Callable[[bytes], object] | None:
    if type(generator) is np.random.Generator:
        return _seeder_of_bits(generator.bit_generator)
    if type(generator) is np.random.RandomState and _is_mt19937(generator):
        return lambda seeds: generator.seed(_number(seeds[:4]))
    if type(generator) is random.Random:
        return lambda seeds: generator.seed(_number(seeds[:8]))
    if type(generator) is torch.Generator and generator.device.type == "cpu":
        return lambda seeds: generator.manual_seed(_number(seeds[:8]))
    return None


def _seeder_of_bits(bits: Any) -> Callable[[bytes], object] | None:
    kind = type(bits)
    if kind is np.random.PCG64:  # default_rng()

        def seed_pcg64(seeds: bytes) -> None:
            bits.state = pcg64_state(_number(seeds[:16]), _number(seeds[16:32]))

        return seed_pcg64
    if kind is np.random.MT19937:
        state = np.random.RandomState(bits)  # shares the bits; a SeedSequence would take 160 microseconds
        return lambda seeds: state.seed(_number(seeds[:4]))
    if kind in (np.random.PCG64DXSM, np.random.Philox, np.random.SFC64):

        def seed_bits(seeds: bytes) -> None:
            bits.state = kind(np.frombuffer(seeds, np.uint32)).state

        return seed_bits
    return None


def _is_mt19937(state: np.random.RandomState) -> bool:
    return bool(state.get_state(legacy=False)["bit_generator"] == "MT19937")


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")


# --- where a generator is held -----------------------------------------------------------------------------


def _place(value: Any, owners: tuple[Any, ...], holders: dict[int, list[Any]]) -> tuple[str, str]:
    """The owner's name, and the path from there."""
    path = ""
    while (holder := holders[id(value)][0]) is not owners:
        path, value = _step(holder, value) + path, holder
    owner = next(name for name, own in zip(_OWNERS, owners, strict=True) if own is value)
    return owner, owner + path


def _step(holder: Any, value: Any) -> str:
    return next((step for step, part in _steps(holder) if part is value), "")


def _steps(holder: Any) -> Iterator[tuple[str, Any]]:
    """The parts of an object as the search visits them, and how a path names them."""
    if isinstance(holder, dict):
        for key, part in dict.items(holder):
            yield f"[{key!r:.40}]" if type(key) in (str, int) else "[...]", part
    elif isinstance(holder, (list, tuple, collections.deque)):
        for number, part in enumerate(holder):
            yield f"[{number}]", part
    elif isinstance(holder, types.FunctionType):
        names = holder.__code__.co_freevars
        for name, cell in zip(names, holder.__closure__ or (), strict=True):
            if cell != _EMPTY_CELL:
                yield f".{name}", cell.cell_contents
        yield from ((f".{name}", part) for name, part in holder.__globals__.items())
    elif isinstance(holder, functools.partial):
        yield from ((".args", holder.args), (".keywords", holder.keywords), (".func", holder.func))
    elif isinstance(holder, types.MethodType):
        yield ".__self__", holder.__self__
    parts = vars(holder) if isinstance(holder, type) else attributes(holder)
    yield from ((f".{name}", part) for name, part in parts.items())


def _described(generator: Any) -> str:
    kind = type(generator)
    text = f"a {kind.__module__}.{kind.__qualname__}"
    if isinstance(generator, np.random.Generator):
        text += f" of {type(generator.bit_generator).__name__}"
    if isinstance(generator, np.random.RandomState):
        text += f" of {generator.get_state(legacy=False)['bit_generator']}"
    if isinstance(generator, torch.Generator):
        text += f" on {generator.device}"
    return text


def _named(fixed: Any) -> str:
    if isinstance(fixed, type):
        return f"the class {fixed.__qualname__}"
    if isinstance(fixed, types.FunctionType):
        return f"the function {fixed.__qualname__}"
    return f"a {type(fixed).__name__}"
