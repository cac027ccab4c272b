"""Datasets and samplers that the resume tests share; importable, so that spawned workers find them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterator


class Numbers:
    """Gives its indices; counts what was read in this process."""

    def __init__(self, length: int = 50) -> None:
        self.length = length
        self.reads = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return torch.tensor([index, index * index])


class Draws(Sampler[int]):
    """Another order each epoch, drawn all at once from torch's default generator when iter() is called."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.length).tolist())


class Foreign(Draws):
    """Another order each epoch, drawn where nobody can restore it."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.SystemRandom().sample(range(self.length), self.length))


class Stateful(Draws):
    """A sampler with a state of its own, from which each epoch's order follows."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.round = 0

    def __iter__(self) -> Iterator[int]:
        self.round += 1
        order = random.Random(self.round).sample(range(self.length), self.length)
        return iter(order)

    def state_dict(self) -> dict[str, int]:
        return {"round": self.round}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.round = state["round"]
