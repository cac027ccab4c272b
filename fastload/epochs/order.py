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
from fastload.system.torch_private import is_iterable

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

    @property
    def drawn_from(self) -> str | None:
        """The place of the generator that the sampler draws from; None if no sampler says that it does."""
        for sampler in self.samplers.values():
            if hasattr(sampler, "generator"):  # as in torch's samplers, None stands for the default one
                drawn = torch.default_generator if sampler.generator is None else sampler.generator
                return next((place for place, own in self.generators.items() if own is drawn), None)
        return None

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
        states = {}
        for key in self.keys:
            sampler = self.samplers[key.removesuffix(_EPOCH)]
            states[key] = pickle.dumps(int(sampler.epoch) if key.endswith(_EPOCH) else sampler.state_dict())
        return states

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
        generators, samplers = self.generator_states(), self.sampler_states()
        try:
            yield
        except BaseException:
            self.set_generators(generators)
            with contextlib.suppress(Exception):  # the caller must see the first error
                self.set_samplers(samplers)
            raise


# Attributes for the rank and for the number of ranks: of torch's DistributedSampler (and of classes like it,
# such as Lightning's), of other libraries' samplers, and of Accelerate's BatchSamplerShard.
_RANK_ATTRIBUTES = (("rank", "num_replicas"), ("rank", "world_size"), ("process_index", "num_processes"))


def sharding_of(loader: DataLoader[Any]) -> tuple[int | None, bool]:
    """The rank that the loader reads for, None if unknown; and whether ranks split the samples between them.

    The rank comes from the sampler, or the iterable dataset, or else from torch.distributed.
    """
    for owner in [loader.dataset] if is_iterable(loader) else Order(loader).samplers.values():
        for names in _RANK_ATTRIBUTES:
            with contextlib.suppress(Exception):  # there are none, or a user's property needs a process group
                rank, num_ranks = (operator.index(getattr(owner, name)) for name in names)
                if 0 <= rank < num_ranks:
                    return rank, True
    group = process_group()
    return None if group is None else int(group.get_rank()), False


def length_or_zero(dataset: Any) -> int:
    """The length of a dataset; 0 if it has none."""
    try:
        return len(dataset)
    except Exception:  # noqa: BLE001  # with a sampler, torch does not need the dataset's length
        return 0
