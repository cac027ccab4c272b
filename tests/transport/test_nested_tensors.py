"""Nested tensors travel as with torch's loader: `torch.nested.nested_tensor` in both layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.data as tud

from fastload import DataLoader
from tests.kit import datasets
from tests.kit.batches import stop_workers

# torch warns at the first strided one in each process
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")

LAYOUTS = {"strided": torch.strided, "jagged": torch.jagged}
REFUSAL = "not currently supported by the default collate_fn"


class Nested(tud.Dataset[Any]):
    """Nested tensors of two parts of unequal length; ``rank`` is that of each part."""

    def __init__(self, layout: torch.layout, rank: int = 1) -> None:
        self.layout = layout
        self.rank = rank

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        parts = [torch.full((length, *[3] * (self.rank - 1)), float(index)) for length in (2, 3)]
        return torch.nested.nested_tensor(parts, layout=self.layout)


class Nest:
    """A collate_fn that makes one nested tensor of samples of unequal length."""

    def __init__(self, layout: torch.layout) -> None:
        self.layout = layout

    def __call__(self, samples: Any) -> Any:
        return torch.nested.nested_tensor(samples, layout=self.layout)


def cloned(samples: Any) -> Any:
    """As torch's own test does."""
    return [sample.clone() for sample in samples]


def ragged(index: int) -> Any:
    return torch.arange(index + 1.0)


def told(batch: Any) -> Any:
    """What a nested tensor is: its layout, dtype and parts."""
    if isinstance(batch, (list, tuple)):
        return [told(part) for part in batch]
    assert batch.is_nested
    return type(batch), batch.layout, batch.dtype, [part.tolist() for part in batch.unbind()]


@pytest.mark.parametrize(
    ("layout", "start_method"), [(torch.strided, "fork"), (torch.jagged, "fork"), (torch.jagged, "spawn")]
)
def test_they_travel_through_workers(layout: torch.layout, start_method: str) -> None:
    """With a collate_fn that keeps them: type, layout, dtype and values are the samples'."""
    dataset = Nested(layout)
    # Before workers are forked, because the first tensor imports torch's compiler.
    expected = [told([dataset[index]]) for index in range(4)]
    num_workers = 2 if start_method == "fork" else 1  # others import torch and its compiler in each worker
    options: Any = {"multiprocessing_context": start_method, "collate_fn": cloned}

    assert [told(batch) for batch in DataLoader(dataset, 1, num_workers=num_workers, **options)] == expected


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_collate_fn_may_make_them(layout: torch.layout, num_workers: int) -> None:
    """The batches are those of torch's loader, also without automatic batching."""
    options: Any = {"num_workers": num_workers}
    samples = datasets.Made(ragged, 4)
    Nest(layout)([torch.ones(1)])  # the first tensor imports torch's compiler; workers inherit it
    ours, theirs = (
        kind(samples, 2, collate_fn=Nest(layout), **options) for kind in (DataLoader, tud.DataLoader)
    )
    single, their_single = (kind(Nested(layout), None, **options) for kind in (DataLoader, tud.DataLoader))

    assert list(map(told, ours)) == list(map(told, theirs))
    assert list(map(told, single)) == list(map(told, their_single))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_default_collate_refuses_them(layout: torch.layout) -> None:
    """With torch's error, in a worker as in this process."""
    for kind, num_workers in ((tud.DataLoader, 0), (DataLoader, 0), (DataLoader, 1)):
        iterator = iter(kind(Nested(layout), 2, num_workers=num_workers))
        with pytest.raises(RuntimeError, match=REFUSAL):
            next(iterator)
        stop_workers(iterator)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_memory_format_leaves_them(layout: torch.layout) -> None:
    """A nested tensor of three-dimensional parts counts four dimensions, and is no batch of images."""
    dataset = Nested(layout, rank=3)
    (batch,) = next(
        iter(DataLoader(dataset, 1, collate_fn=cloned, memory_format=torch.channels_last))  # type: ignore[arg-type]
    )

    assert told(batch) == told(dataset[0])
