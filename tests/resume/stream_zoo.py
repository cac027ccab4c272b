"""Streams with and without a state, also faulty ones, and map-style datasets with a state; importable."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

from tests.resume.zoo import Numbers

if TYPE_CHECKING:
    from collections.abc import Iterator


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


class Position:
    """An iterator with a state."""

    def __init__(self, samples: range) -> None:
        self.samples = samples
        self.position = 0

    def __iter__(self) -> Position:
        return self

    def __next__(self) -> int:
        if self.position >= len(self.samples):
            raise StopIteration
        self.position += 1
        return self.samples[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class MakesPosition(Mute):
    """A stream without a state, whose iterator has one."""

    def __iter__(self) -> Iterator[int]:
        return Position(share(self.length))


class MakesBoth(MakesPosition):
    """A stream with a state, which its iterator needs: where its samples begin."""

    first = 0

    def __iter__(self) -> Iterator[int]:
        self.first += 100
        return Position(range(self.first, self.first + len(share(self.length))))

    def state_dict(self) -> dict[str, int]:
        return {"first": self.first - 100}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["first"]


class StartsOver(Mute):
    """A stream that is its own iterator, and goes back to its beginning with each call of iter()."""

    def __iter__(self) -> Iterator[int]:
        self.samples = Position(share(self.length))
        return self

    def __next__(self) -> int:
        return next(self.samples)

    def state_dict(self) -> dict[str, int]:
        return self.samples.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.samples.load_state_dict(state)


class ContinuesOnce(Mute):
    """A stream that is its own iterator, and needs its state before iter()."""

    position = 0

    def __iter__(self) -> Iterator[int]:
        self.left = iter(share(self.length)[self.position :])
        return self

    def __next__(self) -> int:
        try:
            sample = next(self.left)
        except StopIteration:
            self.position = 0
            raise
        self.position += 1
        return sample

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


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

    def state_dict(self, deep: bool = False) -> dict[str, Any]:  # defaults need no arguments
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        self.position = state["position"]


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


class Counting(Numbers):
    """A map-style dataset that counts its reads, and gives the count with each index."""

    def __getitem__(self, index: int) -> Any:
        return [index, super().__getitem__(index)[0] * 0 + self.reads]

    def state_dict(self) -> dict[str, int]:
        return {"reads": self.reads}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.reads = state["reads"]


def draw(samples: list[int]) -> list[int]:
    """A collate_fn that draws from the generator from which Shuffled draws."""
    return [*samples, random.randrange(1000)]


def identity(samples: Any) -> Any:
    return samples
