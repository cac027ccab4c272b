"""What a dataset holds as many small objects is found, with its size, by `profile` and `doctor`."""

from __future__ import annotations

import itertools
import json
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch.utils.data
from torch.utils.data import ConcatDataset, Subset
from typer.testing import CliRunner

import fastload
from fastload.cli import main
from fastload.nested.small_objects import MIN_BYTES, find_small_objects

if TYPE_CHECKING:
    from pathlib import Path

NUM_ITEMS = 200_000
LOADERS = {"torch": torch.utils.data.DataLoader, "fastload": fastload.DataLoader}


@dataclass
class Record:
    path: str
    boxes: list[float]


def dicts() -> list[Any]:
    return [{"path": f"train/{number:09}.jpg", "label": number} for number in range(NUM_ITEMS)]


class Holding(torch.utils.data.Dataset[Any]):
    """A dataset that reads one attribute."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return NUM_ITEMS

    def __getitem__(self, index: int) -> Any:
        return self.items[index]["label"]


def leads_to_itself(dataset: Any) -> Any:
    """In which each object is to be looked at once."""
    dataset.again, dataset.samples, dataset.parts = dataset, dataset.items, [dataset]
    return dataset


# --- finding it -------------------------------------------------------------------------------------------


def test_the_size_is_that_of_the_objects() -> None:
    """Of the dicts and what is in them, without the tables of dicts and list, which have no counts."""
    items = dicts()
    (found,) = find_small_objects(Holding(items))
    nbytes = sum(64 + sys.getsizeof(item["path"]) + sys.getsizeof(item["label"]) for item in items)
    assert found.nbytes == pytest.approx(nbytes, rel=0.1)
    assert str(found).startswith("dataset.items (200,000 elements, about ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda items: items, "dataset"),
        (lambda items: Subset(Holding(items), [1, 2]), "dataset.dataset.items"),
        (lambda items: ConcatDataset([Holding([]), Holding(items)]), "dataset.datasets[1].items"),
        (lambda items: Holding({"images": items, "version": 1}), "dataset.items['images']"),
        (lambda items: Holding({item["label"]: item for item in items}), "dataset.items"),
        (lambda items: Holding(tuple(Record(item["path"], [0.5]) for item in items)), "dataset.items"),
        (lambda items: Holding([item["path"] * 8 for item in items]), "dataset.items"),
        (lambda items: leads_to_itself(Holding(items)), "dataset.items"),
    ],
    ids=["itself", "subset", "concatenated", "json", "dict", "objects", "str", "circle"],
)
def test_its_place_is_named(wrap: Any, path: str) -> None:
    """As Python would write it."""
    assert [found.path for found in find_small_objects(wrap(dicts()))] == [path]


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros(8 * MIN_BYTES, np.uint8),
        lambda: [bytes(1 << 20) for _ in range(100)],  # of these, only the beginnings are copied
        lambda: [0] * NUM_ITEMS * 10,
        lambda: range(10**9),
        lambda: fastload.SharedList(dicts()),
        lambda: np,
        lambda: None,
    ],
    ids=["array", "large objects", "one object", "range", "SharedList", "module", "nothing"],
)
def test_what_workers_share_or_is_small_is_not_found(make: Any) -> None:
    """No worker copies much of it."""
    assert find_small_objects(Holding(make())) == []


# --- telling of it ----------------------------------------------------------------------------------------


def notes(kind: str, items: Any, **settings: Any) -> list[str]:
    """The notes of a profile of some batches that mention workers."""
    if "num_workers" not in settings:
        settings = {"num_workers": 1, "multiprocessing_context": "fork"} | settings
    loader = LOADERS[kind](Holding(items), 256, shuffle=True, **settings)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (lambda: fastload.SharedList(dicts()), {}),
        (dicts, {"num_workers": 0}),
        (dicts, {"num_workers": 1, "worker_type": "thread"}),
        (lambda: [{"label": 1}] * NUM_ITEMS, {}),
    ],
    ids=["SharedList", "no workers", "threads", "one object"],
)
def test_profile_is_silent_where_nothing_is_copied(make: Any, settings: dict[str, Any]) -> None:
    """No note mentions workers."""
    assert notes("fastload", make(), **settings) == []


class Refusing(list[Any]):
    """A list that can be read by position alone."""

    def __iter__(self) -> Any:
        raise TypeError("items come by position")


def test_profile_survives_what_cannot_be_measured() -> None:
    """The loop gets its batches."""
    assert notes("torch", Refusing(dicts()), num_workers=0) == []


def test_doctor_notes_what_workers_would_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its size alone: no worker runs."""
    (tmp_path / "metadata_of_mine.py").write_text(
        "import numpy as np\n"
        "class Images:\n"
        "    def __init__(self): self.items = [{'label': i, 'path': f'{i:09}.jpg'} for i in range(200_000)]\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, index): return np.full((64, 64, 3), index, np.uint8)\n"
    )
    monkeypatch.chdir(tmp_path)
    found = json.loads(CliRunner().invoke(main.app, ["doctor", "metadata_of_mine:Images", "--json"]).stdout)
    assert found["notes"][-1].startswith(
        "each worker copies what it reads of dataset.items (200,000 elements"
    )
    assert "fastload.SharedList" in found["notes"][-1]
