"""What a loader's order follows from: its generators and samplers, by where they are held, and their states.

Called by `resume`, in the consumer's process. A sampler's place is the path of the loader's attribute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fastload.errors import ResumeError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

DEFAULT = "default"  # the place of torch's own generator


def samplers_by_place(loader: DataLoader[Any]) -> dict[str, Any]:
    """The samplers of a loader, each once."""
    held = {
        "batch_sampler": loader.batch_sampler,
        "sampler": loader.sampler,
        "batch_sampler.sampler": getattr(loader.batch_sampler, "sampler", None),
    }
    found: dict[str, Any] = {}
    for place, sampler in held.items():
        if sampler is not None and not any(sampler is other for other in found.values()):
            found[place] = sampler
    return found


def _held_generators(loader: DataLoader[Any]) -> dict[str, torch.Generator]:
    found = {DEFAULT: torch.default_generator}
    for place, owner in {"loader": loader, **samplers_by_place(loader)}.items():
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is g for g in found.values()):
            found[place] = generator
    return found


def generators_of(loader: DataLoader[Any]) -> dict[str, bytes]:
    """The states of the loader's generators, and of torch's own, by place."""
    return {place: g.get_state().numpy().tobytes() for place, g in _held_generators(loader).items()}


def set_generators(loader: DataLoader[Any], states: dict[str, bytes]) -> None:
    """Set those generators to these states.

    Raises:
        ResumeError: The loader has no generator at one of the places.
    """
    held = _held_generators(loader)
    for place, state in states.items():
        if place not in held:
            raise ResumeError(f"the state holds a generator of the {place}, and here it has none")
        held[place].set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def samplers_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """By place, the states of samplers that have a state_dict(), and the epochs of those that count them."""
    return {
        place: sampler.state_dict()
        for place, sampler in samplers_by_place(loader).items()
        if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")
    } | {
        f"{place}.epoch": sampler.epoch  # DistributedSampler's order follows from it
        for place, sampler in samplers_by_place(loader).items()
        if hasattr(sampler, "set_epoch") and isinstance(getattr(sampler, "epoch", None), int)
    }


def set_samplers(loader: DataLoader[Any], states: dict[str, Any]) -> None:
    """Give samplers back what `samplers_of` said of them."""
    for place, sampler in samplers_by_place(loader).items():
        if f"{place}.epoch" in states and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(states[f"{place}.epoch"])
        if place in states and hasattr(sampler, "load_state_dict"):
            sampler.load_state_dict(states[place])
