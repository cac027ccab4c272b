"""What a dataset holds as many small objects is found, with its size, by `profile`."""

from __future__ import annotations

import itertools
import re
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch.utils.data
from torch.utils.data import ConcatDataset, Subset

import fastload
from fastload.profiling.small_objects import MIN_BYTES, find_small_objects
from tests.kit import datasets

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_ITEMS = 200_000
LOADERS = {"torch": torch.utils.data.DataLoader, "fastload": fastload.DataLoader}


def dicts() -> list[Any]:
    return [{"name": f"train/{number:09}.jpg", "number": number} for number in range(NUM_ITEMS)]


class Holding(torch.utils.data.Dataset[Any]):
    """A dataset that reads one attribute."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return NUM_ITEMS

    def __getitem__(self, index: int) -> Any:
        return self.items[index]["number"]


def leads_to_itself(dataset: Any) -> Any:
    """In which each object is to be looked at once."""
    dataset.again, dataset.samples, dataset.parts = dataset, dataset.items, [dataset]
    return dataset


# What a dataset holds, and its place as Python would write it; None if workers share it or it is small.
HELD: dict[str, tuple[Callable[[], Any], str | None]] = {
    "itself": (dicts, "dataset"),
    "subset": (lambda: Subset(Holding(dicts()), [1, 2]), "dataset.dataset.items"),
    "concatenated": (lambda: ConcatDataset([Holding([]), Holding(dicts())]), "dataset.datasets[1].items"),
    "json": (lambda: Holding({"images": dicts(), "version": 1}), "dataset.items['images']"),
    "dict": (lambda: Holding({item["number"]: item for item in dicts()}), "dataset.items"),
    "objects": (lambda: Holding(tuple(datasets.Photo(**item) for item in dicts())), "dataset.items"),
    "str": (lambda: Holding([item["name"] * 8 for item in dicts()]), "dataset.items"),
    "circle": (lambda: leads_to_itself(Holding(dicts())), "dataset.items"),
    "array": (lambda: Holding(np.zeros(8 * MIN_BYTES, np.uint8)), None),
    # Of these, only the beginnings are copied.
    "large objects": (lambda: Holding([bytes(1 << 20) for _ in range(100)]), None),
    "one object": (lambda: Holding([0] * NUM_ITEMS * 10), None),
    "range": (lambda: Holding(range(10**9)), None),
    "SharedList": (lambda: Holding(fastload.SharedList(dicts())), None),
    "module": (lambda: Holding(np), None),
    "nothing": (lambda: Holding(None), None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HELD)
def test_what_workers_would_copy_is_named(name: str) -> None:
    """By its place, as Python would write it; what they share, or is small, is not found."""
    make, path = HELD[name]
    assert [found.path for found in find_small_objects(make())] == ([] if path is None else [path])


def test_the_size_is_that_of_the_objects() -> None:
    """Of the dicts and what is in them, without the tables of dicts and list, which have no counts."""
    items = dicts()
    (found,) = find_small_objects(Holding(items))
    nbytes = sum(64 + sys.getsizeof(item["name"]) + sys.getsizeof(item["number"]) for item in items)
    assert found.nbytes == pytest.approx(nbytes, rel=0.1)
    assert str(found).startswith("dataset.items (200,000 elements, about ")


def notes(kind: str, items: Any, **settings: Any) -> list[str]:
    """The notes of a profile of some batches that mention workers."""
    loader = LOADERS[kind](Holding(items), 256, shuffle=True, **{"num_workers": 1} | settings)
    with fastload.profile(loader) as profile:
        for _ in itertools.islice(loader, 130):
            pass
    return [note for note in profile.report().notes if "worker" in note]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "method"), [("torch", "fork"), ("fastload", "fork"), ("fastload", "forkserver")]
)
def test_profile_notes_what_workers_copy(kind: str, method: str) -> None:
    """The attribute, its size, the cure, and how much memory one worker has."""
    (note,) = notes(kind, dicts(), multiprocessing_context=method)
    copies = "workers copy the pages that they read" if method == "fork" else "each worker has a copy"
    assert note.startswith(f"loader: {copies} of dataset.items (200,000 elements, ")
    assert "fastload.SharedList(items)" in note
    assert re.search(r"; one worker has \d+\.\d MB of its own\. ", note)


class Refusing(list[Any]):
    """A list that can be read by position alone."""

    def __iter__(self) -> Any:
        raise TypeError("items come by position")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (lambda: fastload.SharedList(dicts()), {}),
        (dicts, {"num_workers": 0}),
        (dicts, {"worker_type": "thread"}),
        (lambda: Refusing(dicts()), {"num_workers": 0}),
    ],
    ids=["SharedList", "no workers", "threads", "refusing"],
)
def test_profile_is_silent_where_nothing_is_copied(make: Any, settings: dict[str, Any]) -> None:
    """Also where that cannot be measured: the loop gets its batches."""
    assert notes("fastload", make(), **settings) == []
