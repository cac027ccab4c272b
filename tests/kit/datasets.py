"""Datasets, samplers and misbehaviours that started workers import."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import random
import signal
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


class InBulk(Made):
    """Gives for a list of indices what a function makes of it."""

    def __init__(self, given: Any) -> None:
        super().__init__(None, 11)
        self.given = given

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


class OneBuffer(Made):
    """Gives the same large array each time, with other values."""

    def __init__(self) -> None:
        super().__init__(None, 8)
        self.buffer = np.zeros((112, 112, 3), np.uint8)

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


class Anew(IterableDataset):
    """Begins anew if it is asked again after its end."""

    def __init__(self) -> None:
        self.left = 3

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        self.left = (self.left - 1) % 4
        if self.left == 3:
            raise StopIteration
        return self.left


class Count(IterableDataset):
    """Numbers."""

    def __iter__(self) -> Any:
        return iter(range(30))


def at_most_six(samples: Any) -> Any:
    """A collate function that ends the epoch."""
    if 6 in samples:
        raise StopIteration
    return samples


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


@dataclasses.dataclass
class Photo:
    """A sample of a class that torch has no rule for."""

    number: int
    name: str


def photo(index: int) -> Photo:
    return Photo(index, f"{index}.jpg")


def album(photos: list[Photo]) -> Photo:
    return Photo(sum(one.number for one in photos), "".join(one.name for one in photos))


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


def floats(index: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(index).random((2, 3), dtype=np.float32)


# Kinds of samples: each makes a sample of its index.
SAMPLES: dict[str, Any] = {
    "HWC uint8 and label": image,
    "one channel": lambda i: torch.full((1, 5, 6), float(i)),
    "one channel array": lambda i: np.full((1, 5, 6), i, np.float32),
    "1 x 1": lambda i: np.full((3, 1, 1), i, np.uint8),
    "tensor": lambda i: torch.arange(6).view(2, 3) + i,
    "bfloat16": lambda i: torch.full((2, 3), i, dtype=torch.bfloat16),
    "float16": lambda i: torch.full((2, 3), i, dtype=torch.float16),
    "bool": lambda i: torch.tensor([i % 2 == 0, True]),
    "complex": lambda i: torch.full((2,), complex(i, 1)),
    "uint16 array": lambda i: np.full((3,), i, np.uint16),
    "0-d tensor": lambda i: torch.tensor(i),
    "0-d array": lambda i: np.array(i),
    "numbers": lambda i: (i, float(i), i % 2 == 0, np.float32(i), np.int16(i), np.bool_(True)),
    "strings": lambda i: {"s": f"{i}", "b": b"x" * i, "nest": [f"{i}", (f"{i}", i)]},
    "bare string": lambda i: f"{i}",
    "None": lambda i: None,
    "named tuple": lambda i: Point(np.full(2, i), {"z": torch.tensor([i])}),
    "list": lambda i: [torch.tensor(i), [floats(i), f"{i}"]],
    "mixed dtypes": promoted,
    "ints then floats": lambda i: i if i % 3 else float(i),
    "two sizes": images_of_two_sizes,
    "lists of unequal length": lambda i: [1] * (1 + (i == 7)),
    "a missing key": lambda i: {"a": 1} if i == 6 else {"a": 1, "b": floats(i)},
    "an extra key": lambda i: {"a": floats(i), "b": 1} if i == 6 else {"a": floats(i)},
    "more keys in later batches": lambda i: {"b": 1, "a": floats(i)} if i > 7 else {"a": floats(i)},
    "keys in another order later": lambda i: {"b": i, "a": i} if i > 7 else {"a": i, "b": i},
    "tuple then list": lambda i: (floats(i), i) if i % 2 else [floats(i), i],
    "requires grad": lambda i: torch.ones(2, requires_grad=True),
    "parameter": lambda i: torch.nn.Parameter(torch.ones(2), requires_grad=False),
    "sparse": lambda i: torch.eye(2).to_sparse(),
    "nothing": lambda i: np.zeros((0, 3), np.float32),
    "no elements, tensor": lambda i: torch.zeros(2, 0),
    "transposed": lambda i: floats(i).T,
    "HWC seen as CHW": lambda i: torch.from_numpy(image(i)[0]).permute(2, 0, 1),
    "array HWC seen as CHW": lambda i: image(i)[0].transpose(2, 0, 1),
    "negative strides": lambda i: floats(i)[::-1],
    "every other": lambda i: np.arange(10.0)[::2] + i,
    "big endian": lambda i: floats(i).astype(">f4"),
    "objects": lambda i: np.array([None, i], object),
    "text array": lambda i: np.array(["a"]),
    "unknown type": lambda i: object(),
    "dataclass": photo,
    "expanded": lambda i: torch.tensor([float(i)]).expand(4),
    "conjugate": lambda i: torch.full((2,), 1j).conj(),
    "draws": draws,
    "raises": raises,
    "stops": stops,
    "worker info": info_of_worker,
}
