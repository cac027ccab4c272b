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


class Stream(IterableDataset[int]):
    """A stream that says where it stands and goes on there; each worker reads an unequal share."""

    def __init__(self, length: int = 41) -> None:
        self.length = length
        self.position: int | None = None

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        if self.position is None:
            self.position = first
        # The second of three workers has little to give.
        stop = self.length // 4 if step == 3 and first == 1 else self.length
        while self.position < stop:
            self.position += step
            yield self.position - step
        self.position = None

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


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


class BrokenStream(Stream):
    """Cannot say where it stands."""

    def state_dict(self) -> dict[str, Any]:
        raise ArithmeticError("no idea")


class BrokenTwice(BrokenStream):
    """Fails in its second batch."""

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            if number == 4:
                raise ZeroDivisionError
            yield number


class MuteAtTimes(Stream):
    """Cannot say where it stands after each other batch."""

    asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        if self.asked % 2:
            raise ArithmeticError("not now")
        return super().state_dict()


class OddState(Stream):
    """Says where it stands with something that cannot be pickled."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": lambda: self.position}


class NeedsArguments(Stream):
    """As litdata's StreamingDataset: its loader has to say how much was read."""

    def state_dict(  # type: ignore[override]
        self, num_samples_yielded: int, num_workers: int, batch_size: int
    ) -> dict[str, Any]:
        return {}


class LoadNeedsArguments(Stream):
    """Wants to know more when it goes on."""

    def load_state_dict(self, state: dict[str, Any], *, strict: bool) -> None:  # type: ignore[override]
        raise AssertionError


class HasDefaults(Stream):
    """Its methods take more arguments than they need."""

    def state_dict(self, deep: bool = False) -> dict[str, Any]:
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        super().load_state_dict(state)


class MuteSampler(Stateful):
    """Cannot say where it stands."""

    def state_dict(self) -> dict[str, int]:
        raise ArithmeticError("no idea")


class SamplerOfArguments(Stateful):
    """Its state_dict() needs an argument."""

    def state_dict(self, epoch: int) -> dict[str, int]:  # type: ignore[override]
        raise AssertionError
