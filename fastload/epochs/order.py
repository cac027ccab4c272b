"""What determines the order of a loader: its samplers and generators, and the rank that it reads for.

A sampler or generator is named by its place: the path of the attribute of the loader that holds it.
"""

from __future__ import annotations

import contextlib
import operator
import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler

from fastload.batch.dataset_state import keeps_state
from fastload.errors import ResumeError
from fastload.system.notes import add_note
from fastload.system.ranks import process_group
from fastload.system.torch_private import index_sampler, is_iterable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.utils.data import DataLoader

DEFAULT = "default"  # the place of torch's own generator
_EPOCH = ".epoch"  # ends the key of a sampler's epoch: DistributedSampler's order depends on it


class Order:
    """The samplers and generators of a loader.

    Attributes:
        samplers: The loader's samplers, each once, with those inside its batch samplers, by place.
        generators: The generators of the loader and of its samplers, and torch's own, by place.
        keys: The keys of `sampler_states`.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.samplers: dict[str, Any] = {}
        self.generators = {DEFAULT: torch.default_generator}
        seen = {id(None), id(torch.default_generator)}
        left = [("loader", loader), ("batch_sampler", loader.batch_sampler), ("sampler", loader.sampler)]
        for place, owner in left:
            if id(owner) in seen:
                continue
            seen.add(id(owner))
            if owner is not loader:
                self.samplers[place] = owner
                # Batch samplers can be nested: Accelerate wraps the loader's own.
                if owner is loader.batch_sampler or isinstance(owner, BatchSampler):
                    names = ("sampler", "batch_sampler")
                    left += [(f"{place}.{name}", getattr(owner, name, None)) for name in names]
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator) and id(generator) not in seen:
                seen.add(id(generator))
                self.generators[place] = generator
        self.keys = {place for place, sampler in self.samplers.items() if keeps_state(sampler)}
        for place, sampler in self.samplers.items():
            if hasattr(sampler, "set_epoch") and isinstance(getattr(sampler, "epoch", None), int):
                self.keys.add(place + _EPOCH)

    def generator_states(self, *, with_default: bool = True) -> dict[str, bytes]:
        """The states of the generators, by place."""
        return {
            place: generator.get_state().numpy().tobytes()
            for place, generator in self.generators.items()
            if with_default or place != DEFAULT
        }

    def sampler_states(self) -> dict[str, bytes]:
        """By place, the states of samplers with a state_dict(), and the epochs of samplers that count epochs.

        Each state is pickled, because a sampler can return objects that it changes later. Only this process
        unpickles them.
        """
        return {key: self._sampler_state(key) for key in self.keys}

    def _sampler_state(self, key: str) -> bytes:
        sampler = self.samplers[key.removesuffix(_EPOCH)]
        return pickle.dumps(int(sampler.epoch) if key.endswith(_EPOCH) else sampler.state_dict())

    def generator_at(self, place: str, state: bytes) -> torch.Generator:
        """A new generator in the state of one at this place.

        Raises:
            ResumeError: It is not the state of such a generator.
        """
        generator = torch.Generator(self.generators[place].device)
        try:
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        except (RuntimeError, ValueError) as error:
            raise ResumeError(
                f"the state of the generator of the {place} is damaged: torch rejects {len(state)} bytes, "
                f"{error}"
            ) from error
        return generator

    def set_generators(self, states: Mapping[str, bytes]) -> None:
        """Set the generators at these places to these states.

        Raises:
            ResumeError: There is no generator at one of the places, or a state is not a generator's state.
        """
        for place in states.keys() - self.generators.keys():
            raise ResumeError(
                f"the state has a generator of the {place}, but this loader has none there: give "
                f"the {place} generator=torch.Generator(), as before"
            )
        for place, state in states.items():
            self.generators[place].set_state(self.generator_at(place, state).get_state())

    def set_samplers(self, states: Mapping[str, bytes]) -> None:
        """Set samplers to the states that `sampler_states` returned.

        Raises:
            ResumeError: The loader has no such sampler at one of the places.
        """
        for key in states.keys() - self.keys:
            raise ResumeError(
                f"the state has {key!r}, but this loader has no such sampler: give it the same kind of "
                "sampler as before"
            )
        for place, sampler in self.samplers.items():
            try:
                if place + _EPOCH in states:
                    sampler.set_epoch(pickle.loads(states[place + _EPOCH]))
                if place in states:
                    sampler.load_state_dict(pickle.loads(states[place]))
            except Exception as error:
                add_note(error, f"fastload: raised by the {place} when it got its part of the loader's state")
                raise

    @contextlib.contextmanager
    def unchanged_on_error(self) -> Iterator[None]:
        """If the block raises, restore the generators and samplers, torch's generator too."""
        generators, samplers = self.generator_states(), {}
        for key in self.keys:
            with contextlib.suppress(Exception):  # the loader's `state_dict()` raises this error
                samplers[key] = self._sampler_state(key)
        try:
            yield
        except BaseException:
            self.set_generators(generators)
            for key, state in samplers.items():
                with contextlib.suppress(Exception):  # the caller must see the first error
                    self.set_samplers({key: state})
            raise


# --- the rank, and what all ranks have in common --------------------------------------------------------

# Attributes for the rank and for the number of ranks: of torch's DistributedSampler (and of classes like it,
# such as Lightning's), of other libraries' samplers, and of Accelerate's BatchSamplerShard.
_RANK_ATTRIBUTES = (("rank", "num_replicas"), ("rank", "world_size"), ("process_index", "num_processes"))
_MAX_DEPTH = 6


def facts_of(loader: DataLoader[Any], generators: Mapping[str, bytes]) -> dict[str, Any]:
    """What determines the order on every rank, by name; None: unknown.

    Frameworks save the state of one rank and load it on all of them. Each rank reads different indices, so
    their checksum says nothing about the state of another rank: these facts are compared instead.

    Args:
        loader: Its sampler, or iterable dataset, is asked now.
        generators: States of generators, by place: the order of an epoch depends on their states before its
            first draw. A generator whose place is missing is taken as it is now.
    """
    samplers = _nested_samplers(loader)
    num_ranks = sharding_of(loader)[1]
    return {
        "batch_size": _first("batch_size", [loader, *samplers]),
        "number of ranks": num_ranks,
        "number of nodes": _first("num_nodes", samplers),
        "seed of the sampler": _seed(loader, samplers, generators, is_split=num_ranks is not None),
    }


def sharding_of(loader: DataLoader[Any]) -> tuple[int | None, int | None]:
    """The rank that the loader reads for, and the number of ranks that share its samples; None: unknown.

    The rank comes from the sampler or else from torch.distributed.
    """
    for owner in [loader.dataset] if is_iterable(loader) else _nested_samplers(loader):
        for names in _RANK_ATTRIBUTES:
            rank, num_ranks = (_first(name, [owner]) for name in names)
            if rank is not None and num_ranks is not None and 0 <= rank < num_ranks:
                return rank, num_ranks
    group = process_group()
    return None if group is None else int(group.get_rank()), None


def _nested_samplers(loader: DataLoader[Any]) -> list[Any]:
    """The loader's sampler, and the samplers inside it, from the outside in."""
    samplers: list[Any] = []
    sampler: Any = index_sampler(loader)
    while sampler is not None and len(samplers) < _MAX_DEPTH and not any(sampler is s for s in samplers):
        samplers.append(sampler)
        inner = _attribute(sampler, "batch_sampler")
        sampler = _attribute(sampler, "sampler") if inner is None else inner
    return samplers


def _attribute(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name, None)
    except Exception:  # noqa: BLE001  # a user's property, which can need a process group
        return None


def _first(name: str, owners: list[Any]) -> int | None:
    """The first attribute of this name that is an integer."""
    for value in (_attribute(owner, name) for owner in owners):
        if value is not None and not isinstance(value, bool):
            with contextlib.suppress(TypeError):
                return operator.index(value)
    return None


def _seed(
    loader: DataLoader[Any], samplers: list[Any], generators: Mapping[str, bytes], *, is_split: bool
) -> int | None:
    """The sampler's seed; without one, the seed of the generator that it draws from."""
    seed = _first("seed", samplers)
    drawing = [sampler for sampler in samplers if hasattr(sampler, "generator")]
    # The ranks that split an order share it, and a loaded state sets its generator.
    if seed is not None or is_split or not drawing:
        return seed
    # As in torch's samplers, None stands for the default generator.
    generator = torch.default_generator if drawing[0].generator is None else drawing[0].generator
    if not isinstance(generator, torch.Generator):
        return None
    order = Order(loader)
    for place, own in order.generators.items():
        if own is generator and place in generators:
            return order.generator_at(place, generators[place]).initial_seed()
    return generator.initial_seed()


def length_or_none(dataset: Any) -> int | None:
    """The length of a dataset; None if it has none."""
    try:
        return len(dataset)
    except Exception:  # noqa: BLE001  # with a sampler, torch does not need the dataset's length
        return None
