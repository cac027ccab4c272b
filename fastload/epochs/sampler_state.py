"""Find, read and set the generators and samplers that determine a loader's order.

Each one is named by its place in the loader. The place of a sampler is the path of the attribute that holds
it.
"""

from __future__ import annotations

import contextlib
import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler

from fastload.batch.iterable_state import keeps_state
from fastload.errors import ResumeError, add_note

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.utils.data import DataLoader

DEFAULT = "default"  # the place of torch's own generator
LOADER = "loader"  # the place of the loader's generator
_EPOCH = ".epoch"  # ends the key of a sampler's epoch


def samplers_by_place(loader: DataLoader[Any]) -> dict[str, Any]:
    """The samplers of a loader, each once, with those inside its batch samplers.

    Batch samplers may be nested: Accelerate wraps the loader's own in one for the batches of a rank.
    """
    found: dict[str, Any] = {}
    seen = {id(None)}
    left = [("batch_sampler", loader.batch_sampler), ("sampler", loader.sampler)]
    while left:
        place, sampler = left.pop(0)
        if id(sampler) in seen:
            continue
        seen.add(id(sampler))
        found[place] = sampler
        if sampler is loader.batch_sampler or isinstance(sampler, BatchSampler):
            inner = ((name, getattr(sampler, name, None)) for name in ("sampler", "batch_sampler"))
            left += [(f"{place}.{name}", other) for name, other in inner]
    return found


def _held_generators(loader: DataLoader[Any], samplers: dict[str, Any]) -> dict[str, torch.Generator]:
    found = {DEFAULT: torch.default_generator}
    for place, owner in ((LOADER, loader), *samplers.items()):
        generator = getattr(owner, "generator", None)
        if generator is None or any(generator is other for other in found.values()):
            continue
        if isinstance(generator, torch.Generator):
            found[place] = generator
    return found


def generators_of(loader: DataLoader[Any], samplers: dict[str, Any]) -> dict[str, bytes]:
    """The states of the generators of the loader and of its samplers, and of torch's own, by place."""
    held = _held_generators(loader, samplers)
    return {place: generator.get_state().numpy().tobytes() for place, generator in held.items()}


def initial_seed_of(loader: DataLoader[Any], generator: torch.Generator, states: Mapping[str, bytes]) -> int:
    """The seed of one of the loader's generators, as of these states, or as of now if they lack it."""
    for place, held in _held_generators(loader, samplers_by_place(loader)).items():
        if held is generator and place in states:
            generator = torch.Generator(held.device)
            generator.set_state(torch.frombuffer(bytearray(states[place]), dtype=torch.uint8))
    return generator.initial_seed()


def check_generators(loader: DataLoader[Any], states: dict[str, bytes]) -> None:
    """Check that each state is valid for the generator at its place; places without one are skipped.

    Raises:
        ResumeError: A state has the wrong length, or is not a generator's state.
    """
    held = _held_generators(loader, samplers_by_place(loader))
    for place, state in states.items():
        if place in held:
            _try_state(held[place], place, state)


def set_generators(loader: DataLoader[Any], states: dict[str, bytes]) -> None:
    """Set the generators at these places to these states; after an error, none of them has changed.

    Raises:
        ResumeError: The loader has no generator at one of the places, or a state is not a generator's state.
    """
    held = _held_generators(loader, samplers_by_place(loader))
    for place, state in states.items():
        if place not in held:
            raise ResumeError(f"the state has a generator of the {place}, but this loader has none there")
        _try_state(held[place], place, state)
    for place, state in states.items():
        held[place].set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _try_state(held: torch.Generator, place: str, state: bytes) -> None:
    try:
        torch.Generator(held.device).set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    except (RuntimeError, ValueError) as error:
        raise ResumeError(
            f"the state of the generator of the {place} is damaged: torch refuses {len(state)} bytes, {error}"
        ) from error


def samplers_of(samplers: dict[str, Any]) -> dict[str, bytes]:
    """By place, the states of samplers with a state_dict(), and the epochs of samplers that count epochs.

    Each state is pickled, because a sampler may return objects that it changes later. Only this process may
    unpickle them.
    """
    states = {}
    for key in sampler_keys(samplers):
        sampler = samplers[key.removesuffix(_EPOCH)]
        states[key] = pickle.dumps(int(sampler.epoch) if key.endswith(_EPOCH) else sampler.state_dict())
    return states


def sampler_keys(samplers: Mapping[str, Any]) -> set[str]:
    """The keys of `samplers_of`, without calling a `state_dict()`."""
    keys = {place for place, sampler in samplers.items() if keeps_state(sampler)}
    # DistributedSampler's order depends on the epoch.
    return keys | {place + _EPOCH for place, sampler in samplers.items() if _counts_epochs(sampler)}


def set_samplers(loader: DataLoader[Any], states: dict[str, bytes]) -> None:
    """Set samplers to the states that `samplers_of` returned.

    Raises:
        ResumeError: The loader has no such sampler at one of the places.
    """
    held = samplers_by_place(loader)
    for key in states.keys() - fitting(loader, states).keys():
        raise ResumeError(
            f"the state has {key!r}, but this loader has no such sampler: give it the same kind of sampler "
            "as before"
        )
    for place, sampler in held.items():
        try:
            if place + _EPOCH in states:
                sampler.set_epoch(pickle.loads(states[place + _EPOCH]))
            if place in states:
                sampler.load_state_dict(pickle.loads(states[place]))
        except Exception as error:
            add_note(error, f"fastload: raised by the {place} when it got its part of the loader's state")
            raise


def fitting(loader: DataLoader[Any], states: dict[str, bytes]) -> dict[str, bytes]:
    """The samplers' states for which the loader has a sampler."""
    keys = sampler_keys(samplers_by_place(loader))
    return {key: state for key, state in states.items() if key in keys}


def _counts_epochs(sampler: Any) -> bool:
    return hasattr(sampler, "set_epoch") and isinstance(getattr(sampler, "epoch", None), int)


@contextlib.contextmanager
def unchanged_on_error(loader: DataLoader[Any]) -> Iterator[None]:
    """If the block raises, restore the loader's generators and samplers and torch's generator."""
    held = samplers_by_place(loader)
    generators = generators_of(loader, held)
    try:
        samplers = samplers_of(held)
    except Exception:  # noqa: BLE001  # the loader's `state_dict()` raises this error
        samplers = {}
    try:
        yield
    except BaseException as error:
        try:
            set_generators(loader, generators)
            set_samplers(loader, samplers)
        except Exception as failure:  # noqa: BLE001  # the caller must see the first error
            add_note(
                error, f"fastload: the loader's generators and samplers could not be restored: {failure!r}"
            )
        raise
