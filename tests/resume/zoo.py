"""Samplers, streams with and without a state, also faulty ones; importable."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, Sampler, get_worker_info

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


# --- samplers --------------------------------------------------------------------------------------------


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
        self.fault: Any = None

    def __iter__(self) -> Iterator[int]:
        if isinstance(self.fault, type):
            raise self.fault
        order = torch.randperm(self.length, generator=self.generator).tolist()
        if self.fault == "other":
            order.reverse()
        return map(self._index, range(self.length), order)

    def _index(self, number: int, index: int) -> int:
        if self.fault == "next" and number == 6:
            raise ArithmeticError("the sampler fails")
        return index


class Stateful(Draws):
    """A sampler from whose state each epoch's order follows; the state is the very dict that it changes."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.state = {"round": 0}

    def __iter__(self) -> Iterator[int]:
        self.state["round"] += 1
        return iter(random.Random(self.state["round"]).sample(range(self.length), self.length))

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        if "round" not in state:
            raise KeyError("round")
        self.state = state


class Sharded(BatchSampler):
    """Gives each rank every n-th batch, with the attributes of Accelerate's BatchSamplerShard."""

    def __init__(self, batch_sampler: BatchSampler, num_processes: int, process_index: int) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index

    def __len__(self) -> int:
        return len(self.batch_sampler) // self.num_processes

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(self.batch_sampler, self.process_index, None, self.num_processes)


# --- streams ---------------------------------------------------------------------------------------------


def share(length: int) -> range:
    """The samples of this worker; the second of three workers has few."""
    info = get_worker_info()
    if info is None:
        return range(length)
    return range(info.id, length // 4 if (info.id, info.num_workers) == (1, 3) else length, info.num_workers)


class Mute(IterableDataset[int]):
    """A stream without a state."""

    def __init__(self, length: int = 41) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        yield from share(self.length)


class Shuffled(Mute):
    """A stream without a state, in an order that it draws while it is read."""

    def __iter__(self) -> Iterator[int]:
        left = list(share(self.length))
        while left:
            yield left.pop(random.randrange(len(left)))


class HasPosition:
    """What has a position that is its state."""

    position = 0

    def state_dict(self, deep: bool = False) -> dict[str, Any]:  # defaults need no arguments
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        self.position = state["position"]


class Samples(HasPosition):
    """An iterator with a state."""

    def __init__(self, samples: range) -> None:
        self.samples = samples

    def __iter__(self) -> Samples:
        return self

    def __next__(self) -> int:
        if self.position >= len(self.samples):
            raise StopIteration
        self.position += 1
        return self.samples[self.position - 1]


class MakesSamples(Mute):
    """A stream without a state, whose iterator has one."""

    def __iter__(self) -> Iterator[int]:
        return Samples(share(self.length))


class MakesBoth(MakesSamples):
    """A stream with a state, which its iterator needs: where its samples begin."""

    first = 0

    def __iter__(self) -> Iterator[int]:
        self.first += 100
        return Samples(range(self.first, self.first + len(share(self.length))))

    def state_dict(self) -> dict[str, int]:
        return {"first": self.first - 100}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["first"]


class StartsOver(Samples, Mute):
    """A stream that is its own iterator, and goes back to its beginning with each call of iter()."""

    __init__ = Mute.__init__

    def __iter__(self) -> StartsOver:
        self.samples, self.position = share(self.length), 0
        return self


class ContinuesOnce(HasPosition, Mute):
    """A stream that is its own iterator, and needs its state before iter()."""

    def __iter__(self) -> Iterator[int]:
        self.left = iter(share(self.length)[self.position :])
        return self

    def __next__(self) -> int:
        sample = next(self.left, None)
        self.position = 0 if sample is None else self.position + 1
        if sample is None:
            raise StopIteration
        return sample


class Stream(HasPosition, Mute):
    """A stream that says where it stands and goes on there; each worker reads an unequal share."""

    def __iter__(self) -> Iterator[int]:
        samples = share(self.length)
        while self.position < len(samples):
            self.position += 1
            yield samples[self.position - 1]
        self.position = 0


class Keeps(Stream):
    """A stream whose state is the very dict that it goes on to change, with a list in it."""

    def __init__(self) -> None:
        super().__init__(20)
        self.seen: list[Any] = []

    def __iter__(self) -> Iterator[int]:
        for sample in super().__iter__():
            self.seen.append((self.position, sample))
            yield sample

    def state_dict(self, deep: bool = False) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        vars(self).update(state)


class Rounds(HasPosition, Mute):
    """A stream that counts its epochs; its state has their number, which is in its samples."""

    number = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < len(share(self.length)):
            self.position += 1
            yield 100 * self.number + share(self.length)[self.position - 1]
        self.position, self.number = 0, self.number + 1

    def state_dict(self, deep: bool = False) -> dict[str, int]:
        return {"position": self.position, "number": self.number}

    def load_state_dict(self, state: dict[str, int], strict: bool = True) -> None:
        self.position, self.number = state["position"], state["number"]


def stream(**methods: Any) -> Stream:
    """A stream some of whose methods are others."""
    found = Stream()
    vars(found).update(methods)
    return found


def draw(samples: list[int]) -> torch.Tensor:
    """A collate_fn that draws from the generator from which Shuffled draws."""
    return torch.tensor([*samples, random.randrange(1000)])
