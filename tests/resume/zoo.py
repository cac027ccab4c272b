"""Datasets and samplers that the resume tests share; importable, so that spawned workers find them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, Sampler, get_worker_info

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


class Faulty(Draws):
    """Draws from a generator of its own, and does at its next round what `fault` says."""

    def __init__(self, length: int, generator: torch.Generator) -> None:
        super().__init__(length)
        self.generator = generator
        self.fault: str | None = None

    def __iter__(self) -> Iterator[int]:
        if self.fault == "iter":
            raise ArithmeticError("the sampler fails")
        if self.fault == "interrupt":
            raise KeyboardInterrupt
        order = torch.randperm(self.length, generator=self.generator).tolist()
        if self.fault == "other":
            order.reverse()
        if self.fault == "short":
            del order[5:]
        return self._indices(order)

    def _indices(self, order: list[int]) -> Iterator[int]:
        for number, index in enumerate(order):
            if self.fault == "next" and number == 6:
                raise ArithmeticError("the sampler fails")
            yield index


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


class KeepsOrder(Draws):
    """As Stateful, but its state is the very dict that it goes on to change."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.state = {"round": 0}

    def __iter__(self) -> Iterator[int]:
        self.state["round"] += 1
        return iter(random.Random(self.state["round"]).sample(range(self.length), self.length))

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


class Keeps(IterableDataset[int]):
    """A stream whose state is the very dict that it goes on to change, with a list in it."""

    def __init__(self, length: int = 20) -> None:
        self.length = length
        self.state: dict[str, Any] = {"position": 0, "seen": []}

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        step = 1 if info is None else info.num_workers
        while self.state["position"] < self.length:
            position = self.state["position"]
            self.state["position"] = position + step
            self.state["seen"].append((position, step))
            yield position
        self.state["position"] = 0

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = {"position": state["position"], "seen": state["seen"]}


class MuteSampler(Stateful):
    """Cannot say where it stands."""

    def state_dict(self) -> dict[str, int]:
        raise ArithmeticError("no idea")


class SamplerOfArguments(Stateful):
    """Its state_dict() needs an argument."""

    def state_dict(self, epoch: int) -> dict[str, int]:  # type: ignore[override]
        raise AssertionError
