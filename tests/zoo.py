"""Datasets, samplers and misbehaviours that started workers import."""

from __future__ import annotations

import collections
import functools
import os
import random
import signal
import sys
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

Point = collections.namedtuple("Point", ["x", "y"])


class Made(Dataset):
    """Samples made by a function of the index."""

    def __init__(self, make: Any, size: int = 23) -> None:
        self.make = make
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Bulk(Made):
    """The same through __getitems__."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.make(index) for index in indices]


class InBulk(Dataset):
    """Gives for a list of indices what a function makes of it."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("samples are read in bulk")

    def __getitems__(self, indices: list[int]) -> Any:
        return self.given(indices)


def as_array(indices: list[int]) -> np.ndarray[Any, Any]:
    return np.array(indices)


def first_in_full(indices: list[int]) -> Any:
    """Arrays for the first batch, and nothing for the others."""
    return [np.full(3, index) for index in indices] if 0 in indices else None


def count_samples(samples: Any) -> int:
    """A collate function that takes whatever can be iterated."""
    return sum(1 for _ in samples)


class Tagged:
    """A kind of sample that torch has no rule for."""


def tagged(index: int) -> Any:
    """Adds a rule for its kind of sample, which says how many there are."""
    rules = torch.utils.data._utils.collate.default_collate_fn_map
    rules[Tagged] = lambda batch, collate_fn_map=None: f"{len(batch)} tagged"
    return Tagged()


class OneBuffer(Dataset):
    """Gives the same array each time, with other values."""

    def __init__(self) -> None:
        self.buffer = np.zeros((4, 4, 3), np.uint8)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        self.buffer[:] = index
        return self.buffer


class Stream(IterableDataset):
    """An iterable dataset, sharded or not, of which each worker may have another share."""

    def __init__(
        self, size: int = 20, *, sharded: bool = False, uneven: bool = False, claimed: int = -1
    ) -> None:
        self.size = size
        self.sharded = sharded
        self.uneven = uneven
        if claimed >= 0:
            self.__class__ = _claiming(claimed)

    def __iter__(self) -> Any:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        step = num_workers if self.sharded else 1
        first = worker if self.sharded else 0
        size = self.size // (worker + 1) if self.uneven else self.size
        for number in range(first, size, step):
            yield np.full((3, 3), number, np.float32), number, random.random()


@functools.cache
def _claiming(claimed: int) -> type[Stream]:
    return type("Claiming", (Stream,), {"__len__": lambda self: claimed})


class OddError(Exception):
    """An exception whose constructor takes several arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def image(index: int) -> Any:
    return np.random.default_rng(index).integers(0, 256, (8, 8, 3), dtype=np.uint8), index


def draws(index: int) -> Any:
    """What user code draws from the global generators."""
    return {"r": random.random(), "n": np.random.rand(2), "t": torch.rand(3), "i": index}


def raises(index: int) -> Any:
    errors: dict[int, Any] = {5: ValueError("five"), 9: KeyError("nine"), 13: OddError(1, 2)}
    if index in errors:
        raise errors[index]
    return torch.tensor([index])


def stops(index: int) -> Any:
    if index == 13:
        raise StopIteration
    return index


def images_of_two_sizes(index: int) -> Any:
    return np.zeros((4, 4 + (index == 10)), np.uint8)


def growing(index: int) -> Any:
    """Each batch of 4 has a size of its own, up and down."""
    side = [2, 40, 8, 120, 1][(index // 4) % 5]
    return np.full((side, side, 3), index, np.uint8)


def promoted(index: int) -> Any:
    return torch.zeros(2, dtype=torch.float64 if index % 2 else torch.float32)


def killed(index: int) -> Any:
    if index == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    return image(index)


def left(index: int) -> Any:
    if index == 13:
        sys.exit(3)
    return image(index)


def mixed_up(samples: list[Any]) -> Any:
    """A collate function like MixUp: torch's own first, then arithmetic with the batch turned by one."""
    images, labels = default_collate(samples)
    images = images.float()
    return 0.5 * images + 0.5 * images.roll(1, 0), torch.nn.functional.one_hot(labels % 5, 5)


def as_arrays(samples: list[Any]) -> Any:
    return {"x": np.stack([sample[0] for sample in samples]), "names": [f"{sample[1]}" for sample in samples]}


def packed(samples: list[Any]) -> Any:
    """A PackedSequence of the labels."""
    return torch.nn.utils.rnn.pack_sequence([torch.tensor([label]) for _, label in samples])


class Box:
    """Holds something where nobody looks for it."""

    def __init__(self, content: Any) -> None:
        self.content = content


class Sealed(Box):
    """Can be sent, and be opened only where it came from."""

    def __getstate__(self) -> Any:
        return self.content, os.getpid()

    def __setstate__(self, state: Any) -> None:
        self.content, pid = state
        if pid != os.getpid():
            raise ValueError("sealed")


def in_a_box(samples: list[Any]) -> Any:
    """The images alone, in an object."""
    return Box(default_collate(samples)[0])


def beside_a_box(samples: list[Any]) -> Any:
    """The images twice: as they are, and in an object."""
    images, _ = default_collate(samples)
    return images, Box(images)


def in_a_set(samples: list[Any]) -> Any:
    images, labels = default_collate(samples)
    return labels, {images}


def third_sealed(index: int) -> Any:
    return Sealed(torch.tensor(index)) if index == 2 else torch.tensor(index)


def ragged(samples: list[Any]) -> Any:
    return tuple(torch.full((label % 4, 2), label) for _, label in samples)


def info_of_worker(index: int) -> Any:
    info = get_worker_info()
    return (-1, -1, 0) if info is None else (info.id, info.num_workers, info.seed)


def init(worker_id: int) -> None:
    random.seed(worker_id)
    np.random.seed(worker_id)


def bad_init(worker_id: int) -> None:
    raise ValueError(f"init of worker {worker_id}")


class Endless:
    """A sampler whose length is an error, or more than Python's `len` can say."""

    def __init__(self, length: Exception | int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return iter([3, 1, 4])

    def __len__(self) -> int:
        if isinstance(self.length, Exception):
            raise self.length
        return self.length


class Words(Dataset):
    """A dataset of no known length, with names for indices."""

    def __getitem__(self, name: str) -> str:
        return name * 2


class TupleBatches:
    """A batch sampler that gives tuples and tensors."""

    def __iter__(self) -> Any:
        yield (3, 1)
        yield torch.tensor([2, 0])
        yield [5]

    def __len__(self) -> int:
        return 3
