"""Samples, collate functions and datasets of test_fetch.py, where started workers can import them."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, default_collate

import fastload
from tests.kit import datasets


def plain(index: int) -> torch.Tensor:
    return torch.full((1000,), index)


def array(index: int) -> Any:
    return np.full(3, index)


def missing_file(index: int) -> Any:
    if index == 5:
        raise FileNotFoundError(2, "No such file or directory", f"/nowhere/{index}.jpg")
    return index


def raises_what_cannot_be_pickled(index: int) -> Any:
    class LocalError(ValueError):
        """No other process can find this class."""

    if index == 2:
        raise LocalError("no such sample")
    return index


def fails_at_one(sample: Any) -> Any:
    if sample[0] == 1:
        raise ValueError("one")
    return sample


def picture(index: int) -> Any:
    return Image.new("RGB", (4, 4)), index


def paints(sample: Any) -> Any:
    """A transform that returns what default_collate cannot batch."""
    return picture(int(sample[0]))


def collates_as_torch(samples: Any) -> Any:
    return default_collate([sample for sample in samples if sample is not missing_file])


def fails_to_collate(samples: Any) -> Any:
    raise TypeError("of the user")


def _boxes(index: int) -> Any:
    return np.zeros((4, 4, 3), np.uint8), {"boxes": torch.zeros(index + 1, 4), "label": index}


def _of_two_types(index: int) -> Any:
    return np.zeros(3) if index == 1 else torch.zeros(3)


def undecoded(index: int) -> Any:
    return {"label": index, "image": fastload.EncodedImage(b"a file")}


_CANNOT = "which default_collate cannot batch: return"
_DIFFERS = "in the first sample of the batch and"
# A function of the index, and how the note on default_collate's error begins.
NOT_COLLATED: dict[str, tuple[Any, str]] = {
    "undecoded": (undecoded, "$['image'] is an EncodedImage, which a CachedDataset decodes"),
    "shapes": (
        _boxes,
        f"$[1]['boxes'] is a tensor (1, 4) float32 {_DIFFERS} a tensor (2, 4) float32 in sample 1",
    ),
    "image": (picture, f"$[0] is of type PIL.Image.Image, {_CANNOT} numpy."),
    "object": (lambda i: [i, object()], f"$[1] is of type builtins.object, {_CANNOT} arrays"),
    "array of objects": (lambda i: np.array([None]), f"$ is an array (1,) object, {_CANNOT} arrays"),
    "nothing": (lambda i: {"a": None}, f"$['a'] is of type builtins.NoneType, {_CANNOT} arrays"),
    "one is nothing": (
        lambda i: (i, None if i == 2 else i),
        f"$[1] is an int {_DIFFERS} a NoneType in sample 2",
    ),
    "two sizes": (
        datasets.images_of_two_sizes,
        f"$ is an array (4, 4) uint8 {_DIFFERS} an array (4, 5) uint8 in sample 10",
    ),
    "types": (_of_two_types, f"$ is a tensor (3,) float32 {_DIFFERS} an array (3,) float64 in sample 1"),
    "texts": (lambda i: "a" if i == 3 else i, f"$ is an int {_DIFFERS} a str in sample 3"),
    "keys": (
        lambda i: {"a": 1} if i == 2 else {"a": 1, "b": 2},
        f"$ is a dict of {{'a': int, 'b': int}} {_DIFFERS} a dict of {{'a': int}} in sample 2",
    ),
    "lengths": (
        lambda i: {"a": [1] * (i + 2)},
        f"$['a'] is a list of [int, int] {_DIFFERS} a list of [int, int, int] in sample 1",
    ),
    "containers": (lambda i: [1] if i == 0 else 1, f"$ is a list of [int] {_DIFFERS} an int in sample 1"),
}


def _parts(index: int) -> list[Any]:
    size = 3 + index // 4  # each batch of 4 has a shape of its own
    return [
        {"b": torch.full((size,), 10 * index + view), "a": torch.full((size,), 1000 + 10 * index + view)}
        for view in range(2)
    ]


def views(index: int) -> Any:
    """Two views of one thing, stacked by the dataset."""
    made = default_collate(_parts(index))
    return {"a": made["a"], "b": made["b"]}


def views_of_a_loader(index: int) -> Any:
    """The same, by a loader within the dataset."""
    made = next(iter(DataLoader(_parts(index), 2)))
    return {"a": made["a"], "b": made["b"]}


def collate_in_two_threads(samples: Any) -> Any:
    """The batch, and what another thread collates at the same time."""
    others: list[Any] = []
    begun = threading.Event()

    def collate_others() -> None:
        for _ in range(8):
            others.append(default_collate([torch.full((1000,), -1)] * 4))
            begun.set()

    thread = threading.Thread(target=collate_others)
    thread.start()
    begun.wait()
    batch = default_collate(samples)
    thread.join()
    return batch, others


class KeepsBatches:
    """Keeps every batch, and counts at each later one how many of them have changed."""

    def __init__(self) -> None:
        self.kept: list[tuple[Any, Any]] = []

    def __call__(self, samples: Any) -> Any:
        batch = default_collate(samples)
        self.kept.append((batch, batch.tolist()))
        return batch, sum(kept.tolist() != values for kept, values in self.kept)


class OwnGetItem(fastload.CachedDataset):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) * 100


class OwnGetItems(fastload.CachedDataset):
    def __getitems__(self, indices: Any) -> Any:
        return [self[index] * 100 for index in indices]


OWN_READERS = [OwnGetItem, OwnGetItems]


class Silent:
    """An index, or a sample, whose repr raises."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """An error whose attributes cannot be set, with a path that is none."""

    value: Any = None

    @property
    def path(self) -> Any:
        return np.zeros(3)

    @property
    def filename(self) -> Any:
        raise KeyError("filename")


def raises_frozen(_: Any) -> Any:
    raise FrozenError("the real error")
