"""Samples, collate functions and datasets of test_fetch.py, where started workers can import them."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate, get_worker_info

import fastload


def plain(index: int) -> torch.Tensor:
    return torch.full((1000,), index)


def array(index: int) -> Any:
    return np.full(3, index)


def missing_file(index: int) -> Any:
    if index == 3:
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


def worker_seed(index: int) -> int:
    info = get_worker_info()
    assert info is not None
    return info.seed


def an_object(index: int) -> Any:
    return np.zeros(index + 1) if index < 0 else object()


def undecoded(index: int) -> Any:
    return {"label": index, "image": fastload.EncodedImage(b"a file")}


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


class OwnView(fastload.CachedDataset):
    def view(self, index: int) -> Any:
        return super().view(index) * 100


def own_attribute(dataset: Any) -> Any:
    """An instance whose `view` was replaced."""
    cached = fastload.CachedDataset(dataset)
    original = cached.view
    cached.view = lambda index: original(index) * 100
    return cached


OWN_READERS = [OwnGetItem, OwnGetItems, OwnView, own_attribute]


class IteratorBatches:
    def __iter__(self) -> Any:
        yield iter([0, 1, 2])
        yield iter([5, 6])


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
