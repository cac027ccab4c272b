"""Datasets that pickle cannot send reach workers that are not forked by value, with cloudpickle."""

from __future__ import annotations

import enum
import pickle
import sys
import types
from collections import namedtuple
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import pytest
import torch

import fastload
from fastload.system import by_value
from tests.cache.zoo import Made
from tests.kit.batches import assert_same_batches

if TYPE_CHECKING:
    from pathlib import Path

METHODS = ["forkserver", pytest.param("spawn", marks=pytest.mark.thorough)]


def epoch(dataset: Any, method: str | None, **options: Any) -> list[Any]:
    """All batches, in two workers or none."""
    workers: Any = {"num_workers": 2, "multiprocessing_context": method} if method else {}
    return list(fastload.DataLoader(dataset, 2, **workers, **options))


@pytest.mark.parametrize("method", METHODS)
def test_lambdas_and_local_classes_reach_workers(method: str) -> None:
    """As the dataset, inside it, and as functions that the loader takes; batches are the usual ones."""

    class Local(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.steps = {"double": lambda x: 2 * x}
            self.lock = get_context(method).Lock()
            self.shared = torch.arange(8.0).share_memory_()
            self.generator = torch.Generator().manual_seed(3)

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            with self.lock:
                return self.steps["double"](self.shared[index]), super().__add__.__name__

    offset = 5
    options: Any = {
        "collate_fn": lambda samples: (
            torch.stack([sample[0] for sample in samples]) + offset,
            samples[0][1],
        ),
        "generator": torch.Generator().manual_seed(1),
        "shuffle": True,
    }
    started = epoch(Local(), method, worker_init_fn=lambda number: torch.manual_seed(number), **options)
    options["generator"].manual_seed(1)
    assert_same_batches(epoch(Local(), None, **options), started)


@pytest.mark.parametrize("method", METHODS)
def test_what_workers_return_is_of_the_senders_classes(method: str) -> None:
    """Dataclasses, named tuples, enumerations and errors; the classes of the sender do not change."""

    @dataclass
    class Pair:
        image: torch.Tensor
        scale: int = 2

        def scaled(self) -> torch.Tensor:
            return self.image * self.scale

    class Kind(enum.Enum):
        PHOTO = 1

    class Odd(Exception):  # noqa: N818
        """An error of the user's."""

    point = namedtuple("point", "x y")
    method_before, Pair.scale = Pair.scaled, 3

    def read(index: int) -> Any:
        if index == 6:
            raise Odd(f"sample {index}")
        return Pair(torch.full((200, 200), float(index)), Pair.scale), Kind.PHOTO, point(1, index)

    loader = fastload.DataLoader(
        Made(read, 8), None, num_workers=1, multiprocessing_context=method, collate_fn=lambda sample: sample
    )
    batches = iter(loader)
    for index in range(6):
        pair, kind, where = next(batches)
        assert (type(pair), kind, type(where)) == (Pair, Kind.PHOTO, point)
        assert where == (1, index)
        assert pair.scaled()[0, 0] == 3 * index
    with pytest.raises(Odd, match="sample 6"):
        next(batches)
    assert Pair.scaled is method_before


@pytest.mark.parametrize("method", METHODS)
def test_what_a_notebook_defines_reaches_workers(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes and functions of a main module that is no file, where pickle itself would not fail."""
    cell = """
import collections
import torch

SCALE = 3
Sample = collections.namedtuple("Sample", "image label")

def scaled(value):
    return SCALE * value

class Base:
    def __len__(self):
        return 4

class Cells(Base):
    def __getitem__(self, index):
        return Sample(torch.full((2,), scaled(index)), index)

def collate(samples):
    return torch.utils.data.default_collate(samples)
"""
    notebook: Any = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    exec(cell, vars(notebook))
    assert not by_value.workers_find_main()
    pickle.dumps(notebook.Cells())
    started = epoch(notebook.Cells(), method, collate_fn=notebook.collate)
    assert_same_batches(epoch(notebook.Cells(), None), started)
    assert type(started[0]) is notebook.Sample


def test_a_dataset_that_pickle_can_send_is_sent_by_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """By value is for what pickle cannot do."""
    monkeypatch.setattr(by_value, "workers_find_main", lambda: True)  # also where tests run in parallel
    monkeypatch.setattr(by_value, "dump", None)
    assert len(epoch(Made(abs, 4), "forkserver")) == 2


def refused(dataset: Any) -> Any:
    """The error of a loader whose workers cannot get the dataset."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        epoch(dataset, "spawn")
    return caught.value


def test_what_cannot_travel_raises_pickles_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open file beside a lambda, which cloudpickle alone would copy; a note names the attribute."""
    monkeypatch.setattr(by_value, "workers_find_main", lambda: True)  # also where tests run in parallel
    dataset: Any = Made(lambda index: index, 4)
    dataset.stream = (tmp_path / "x").open("w+")
    with pytest.raises(Exception) as expected:  # noqa: PT011
        pickle.dumps(dataset)
    with dataset.stream:
        error = refused(dataset)
    assert (type(error), str(error)) == (type(expected.value), str(expected.value))
    (note,) = (note for note in error.__notes__ if note.startswith("fastload"))
    assert "dataset.stream cannot be sent" in note
    assert "'fork'" in note
    assert "cloudpickle" not in note


def test_without_cloudpickle_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is pickle's, as with torch's loader."""
    monkeypatch.setattr(by_value, "is_possible", lambda: False)
    dataset = Made(lambda index: index, 4)
    with pytest.raises(Exception) as expected:  # noqa: PT011
        pickle.dumps(dataset)
    error = refused(dataset)
    assert (type(error), str(error)) == (type(expected.value), str(expected.value))
    assert any('pip install "fastload-torch[cloudpickle]"' in note for note in error.__notes__)
