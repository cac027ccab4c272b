"""Datasets that make whole batches, and when the loader asks them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as tud
from torch.utils.data import default_collate

import fastload
from fastload.batch.fetch import Fetcher
from tests.kit import datasets
from tests.kit.batches import assert_same_batches

IMAGES = np.arange(24 * 20_000, dtype=np.int32).reshape(24, 20_000)


class Rows(tud.Dataset[Any]):
    """Rows of an array; what it was asked is in `calls`."""

    lend: Any = None
    defer: Any = None

    def __init__(self, *, is_gathered: bool = True) -> None:
        self.is_gathered = is_gathered
        self.calls: list[str] = []

    def __len__(self) -> int:
        return len(IMAGES)

    def __getitem__(self, index: int) -> Any:
        self.calls.append("sample")
        return IMAGES[index].copy(), index

    def _batch_access(self) -> Any:
        return self

    def gather(self, indices: Any, allocate: Any) -> Any | None:
        self.calls.append("batch")
        images = allocate((len(indices), IMAGES.shape[1]), IMAGES.dtype)
        if not self.is_gathered:
            return None
        np.take(IMAGES, indices, axis=0, out=images)
        return [torch.from_numpy(images), torch.tensor(indices)]


class Lends(Rows):
    """Lends views of the array."""

    def __init__(self) -> None:
        super().__init__(is_gathered=False)

    def lend(self, index: int) -> Any:
        view = IMAGES[index]
        view.flags.writeable = False
        self.calls.append("lent")
        return view, index


class OwnGetItem(Rows):
    """Has its own samples."""

    def __getitem__(self, index: int) -> Any:
        self.calls.append("own")
        return -IMAGES[index], index


class OwnGetItems(Rows):
    """Has its own lists of samples."""

    def __getitems__(self, indices: Any) -> Any:
        self.calls.append("own")
        return [(-IMAGES[index], index) for index in indices]


class OwnSource(OwnGetItem):
    """Has its own samples, and its own batches."""

    def _batch_access(self) -> Any:
        return self

    def gather(self, indices: Any, allocate: Any) -> Any | None:
        batch: Any = super().gather(indices, allocate)
        return [-batch[0], batch[1]]


class NoSource(Rows):
    """Says that it has none today."""

    def _batch_access(self) -> Any:
        return None


def user_collate(samples: Any) -> Any:
    return default_collate(samples)


WAYS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "batches": (Rows, {}, "batch"),
    "seeding sample": (Rows, {"seeding": "sample"}, "batch"),
    "no batch": (lambda: Rows(is_gathered=False), {}, "batch sample"),
    "lent": (Lends, {}, "batch lent"),
    "own samples": (OwnGetItem, {}, "own"),
    "own lists": (OwnGetItems, {}, "own"),
    "own batches": (OwnSource, {}, "batch"),
    "none": (NoSource, {}, "sample"),
    "collate_fn": (Rows, {"collate_fn": user_collate}, "sample"),
    "single samples": (Rows, {"batch_size": None}, "sample"),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_source_is_asked_where_its_batches_are_those_of_its_samples(name: str) -> None:
    """The batches are torch's, also inside a Subset; a subclass with its own samples is read by them."""
    make, options, calls = WAYS[name]
    for is_subset in (False, True):
        dataset = make()
        part: Any = tud.Subset(dataset, range(20, 2, -1)) if is_subset else dataset
        arguments = {"batch_size": 5, **options}
        torchs = {name: value for name, value in arguments.items() if name != "seeding"}
        expected = list(tud.DataLoader(part, **torchs))
        dataset.calls.clear()
        batches = list(fastload.DataLoader(part, **arguments))
        assert_same_batches(expected, batches)
        assert set(dataset.calls) == set(calls.split())


@pytest.mark.parametrize("make", [Rows, Lends])
def test_batches_of_a_source_come_from_workers(make: Any) -> None:
    """They equal torch's, and each stays as it is while it is kept."""
    expected = list(tud.DataLoader(make(), 5))
    batches = list(fastload.DataLoader(make(), 5, num_workers=2))
    assert_same_batches(expected, batches)


def test_a_bad_index_raises_what_the_dataset_raises() -> None:
    """The error of `gather` is the loader's, with the indices of the batch."""
    loader = fastload.DataLoader(Rows(), batch_sampler=[[1, 99]])
    with pytest.raises(IndexError) as caught:
        next(iter(loader))
    assert "dataset index [1, 99]" in "\n".join(caught.value.__notes__)


TENSORS: dict[str, Any] = {
    "images and labels": (torch.arange(23 * 48, dtype=torch.uint8).view(23, 4, 4, 3), torch.arange(23)),
    "bfloat16 and bool": (torch.randn(23, 300).bfloat16(), torch.arange(23) > 11),
    "complex": (torch.randn(23, 3, dtype=torch.complex64),),
    "a column of a table": (torch.arange(46.0).view(23, 2)[:, 1], torch.arange(23)),
    "a conjugate": (torch.randn(23, 3, dtype=torch.complex64).conj(),),
    "needs a gradient": (torch.randn(23, 3, requires_grad=True),),
    "sparse": (torch.eye(23).to_sparse(),),
    "nothing in a row": (torch.empty(23, 0), torch.arange(23)),
    "large rows": (torch.arange(23 * 200_000, dtype=torch.uint8).view(23, 200_000),),
    "a parameter": (torch.nn.Parameter(torch.randn(23, 2), requires_grad=False),),
}


@pytest.mark.parametrize(
    ("name", "num_workers"),
    [*((name, 0) for name in TENSORS), ("images and labels", 1), ("bfloat16 and bool", 1)],
)
def test_batches_of_a_tensor_dataset_are_torchs(name: str, num_workers: int) -> None:
    """Its rows, also inside a Subset with negative indices, and the error of an index that is too large."""
    whole = tud.TensorDataset(*TENSORS[name])
    for dataset, order in (
        (whole, range(23)),
        (tud.Subset(whole, [5, -1, 0, 5, 22]), range(5)),
        (whole, [3, 23]),
    ):
        expected, batches = [], []
        for found, cls in ((expected, tud.DataLoader), (batches, fastload.DataLoader)):
            try:
                found.extend(cls(dataset, 4, sampler=order, num_workers=num_workers))
            except Exception as error:  # noqa: BLE001  # compared
                found.append(type(error))
        assert_same_batches(expected, batches)


def test_a_tensor_dataset_is_gathered() -> None:
    """No row is read by itself; a subclass that reads in its own way is."""

    class Twice(tud.TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return tuple(2 * part for part in super().__getitem__(index))

    for cls, factor in ((tud.TensorDataset, 1), (Twice, 2)):
        loader = fastload.DataLoader(cls(torch.arange(8)), 4)
        with pytest.MonkeyPatch.context() as patches:
            if cls is tud.TensorDataset:
                patches.setattr(Fetcher, "_read", None)
            rows = next(iter(loader))[0]
        assert rows.tolist() == [factor * number for number in range(4)]


def _sevens(indices: Any) -> Any:
    return [torch.tensor([7.0]) for _ in indices]


def _replaced(self: Any, index: int) -> Any:
    return torch.tensor([index + 100.0])


def _sevens_of(self: Any, indices: Any) -> Any:
    return _sevens(indices)


MADE: dict[str, Any] = {
    "tensors": lambda: tud.TensorDataset(torch.arange(6.0)),
    "subset": lambda: tud.Subset(tud.TensorDataset(torch.arange(9.0)), [5, 4, 3, 2, 1, 0]),
    "subset of a subset": lambda: tud.Subset(MADE["subset"](), [5, 4, 3, 2, 1, 0]),
    "several": lambda: tud.ConcatDataset([MADE["tensors"](), MADE["subset"]()]),
    "stacked": lambda: tud.StackDataset(MADE["tensors"](), MADE["subset"]()),
    "cached": lambda: fastload.CachedDataset(datasets.Made(_number, 6), cache=None),
    "subset of cached": lambda: tud.Subset(MADE["cached"](), [5, 4, 3, 2, 1, 0]),
}


def _number(index: int) -> Any:
    return torch.tensor([float(index)])


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("where", ["instance", "inner instance"])
def test_what_an_instance_reads_in_bulk_is_what_it_says(name: str, where: str) -> None:
    """`__getitems__` that somebody has set on a dataset, or on one inside it, is called as torch calls it."""
    dataset = MADE[name]()
    owner = getattr(dataset, "dataset", dataset) if where == "inner instance" else dataset
    owner.__getitems__ = _sevens
    expected = list(tud.DataLoader(dataset, 3))

    assert_same_batches(expected, list(fastload.DataLoader(dataset, 3)))


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("method", ["__getitem__", "__getitems__"])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_method_that_somebody_has_replaced_is_called(
    name: str, method: str, is_wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the class of the dataset, or of a dataset inside it; functools.wraps does not hide it."""
    dataset = MADE[name]()
    layer = dataset
    while layer is not None:
        with monkeypatch.context() as patches:
            cls, replacement = type(layer), _replaced if method == "__getitem__" else _sevens_of
            if is_wrapped and hasattr(cls, method):
                replacement = functools.wraps(getattr(cls, method))(
                    lambda self, key, call=replacement: call(self, key)
                )
            patches.setattr(cls, method, replacement, raising=False)
            expected = list(tud.DataLoader(dataset, 3))

            assert_same_batches(expected, list(fastload.DataLoader(dataset, 3)))
        layer = getattr(layer, "dataset", None)


@pytest.mark.parametrize("name", ["subset", "subset of cached"])
def test_seeds_of_samples_need_samples_that_are_read_one_by_one(name: str) -> None:
    """A Subset that reads in bulk by itself is refused, as any dataset that does."""
    dataset = MADE[name]()
    dataset.__getitems__ = _sevens
    with pytest.raises(ValueError, match=r"Subset\.__getitems__ fetches many"):
        fastload.DataLoader(dataset, 3, seeding="sample")
