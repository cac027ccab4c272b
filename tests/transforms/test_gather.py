"""Datasets that lie on the device: the same batches as those of the ordinary way, and clear refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload import DataLoader
from fastload.transforms import Gather, Normalize, RandomCrop, RandomHorizontalFlip
from tests.kit import datasets

IMAGES = datasets.Made(datasets.image, 50)
AUGMENT = [RandomCrop(8, 2), RandomHorizontalFlip(), Normalize([0.5] * 3, [0.25] * 3)]


class Dicts(torch.utils.data.Dataset[Any]):
    """Samples with names and several tensors."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": datasets.image(index)[0], "boxes": (torch.full((2,), index), float(index))}


def loader(dataset: Any, transform: list[Any], **options: Any) -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(
        dataset, 8, shuffle=True, generator=generator, device="cpu", device_transform=transform, **options
    )


def equal(one: Any, two: Any) -> bool:
    """Whether two nested batches have equal tensors."""
    leaves = [torch.utils._pytree.tree_leaves(batch) for batch in (one, two)]
    return all(
        left.dtype == right.dtype and torch.equal(left, right) for left, right in zip(*leaves, strict=True)
    )


@pytest.mark.parametrize("seeding", ["worker", "sample"])
@pytest.mark.parametrize(
    "options", [{}, {"drop_last": True}, {"num_workers": 1}], ids=["plain", "drop_last", "workers"]
)
def test_batches_are_those_of_the_ordinary_way(seeding: str, options: dict[str, Any]) -> None:
    """The same order, draws and values, bit for bit, over two epochs."""
    gather = Gather.from_dataset(IMAGES)
    with (
        loader(IMAGES, AUGMENT, seeding=seeding, **options) as ordinary,
        loader(gather.rows, [gather, *AUGMENT], seeding=seeding, **options) as gathering,
    ):
        for epoch in range(2):
            ordinary.set_epoch(epoch), gathering.set_epoch(epoch)
            assert all(equal(one, two) for one, two in zip(ordinary, gathering, strict=True))


def test_dicts_keep_their_structure() -> None:
    """Each tensor of the samples becomes a column under its name."""
    gather = Gather.from_dataset(Dicts())
    ordinary, gathering = loader(Dicts(), []), loader(gather.rows, [gather])
    assert all(equal(one, two) for one, two in zip(ordinary, gathering, strict=True))
    assert set(next(iter(gathering))) == {"image", "boxes"}


def test_an_epoch_is_resumed_in_the_middle() -> None:
    """The state of the one loader continues the other."""
    gather = Gather.from_dataset(IMAGES)
    first = iter(ordinary := loader(IMAGES, AUGMENT, seeding="sample"))
    next(first), next(first)
    gathering = loader(gather.rows, [gather, *AUGMENT], seeding="sample")
    gathering.load_state_dict(ordinary.state_dict())
    assert all(equal(one, two) for one, two in zip(first, gathering, strict=True))


def test_ranks_have_their_shares() -> None:
    """A distributed sampler over the rows is one over the dataset."""
    gather = Gather.from_dataset(IMAGES)
    for rank in range(2):
        batches = []
        for dataset, transform in ((IMAGES, AUGMENT), (gather.rows, [gather, *AUGMENT])):
            sampler = torch.utils.data.DistributedSampler(dataset, 2, rank, seed=5)  # type: ignore[arg-type]
            batches.append(
                list(DataLoader(dataset, 8, sampler=sampler, device="cpu", device_transform=transform))
            )
        assert all(equal(one[1], two[1]) for one, two in zip(*batches, strict=True))


def test_nothing_is_drawn_from_the_users_generator() -> None:
    """Reading the samples leaves torch's default generator as it was."""
    before = torch.get_rng_state()
    Gather.from_dataset(IMAGES)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("columns", [[], [torch.ones(3), torch.ones(4)], torch.tensor(1)], ids=repr)
def test_columns_of_different_lengths_are_refused(columns: Any) -> None:
    """With their shapes."""
    with pytest.raises(ValueError, match="columns should have all samples along their first dimension"):
        Gather(columns)


@pytest.mark.parametrize("batch", [[1, 2], torch.ones(3), torch.ones(2, 2, dtype=torch.int64)], ids=repr)
def test_what_is_no_row_numbers_is_refused(batch: Any) -> None:
    """The error names what the loader needs."""
    with pytest.raises(TypeError, match=r"expects row numbers, \(B,\) int64.*gather\.rows"):
        Gather(torch.ones(5))(batch)


def test_columns_larger_than_the_free_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is moved, with both figures."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 30))
    gather = Gather(torch.empty(3 << 20, dtype=torch.uint8))
    with pytest.raises(torch.OutOfMemoryError, match=r"take 3\.\d* M.*only 1\.\d* M"):
        gather._move(torch.device("cuda:0"))


@settings(max_examples=60, deadline=None)
@given(
    st.builds(range, st.integers(-9, 9), st.integers(10, 40), st.integers(1, 4)),
    st.lists(st.integers(0, 60), min_size=1, max_size=12),
    st.integers(1, 5),
)
def test_a_range_is_a_dataset_as_any_other(dataset: range, indices: list[int], batch_size: int) -> None:
    """Its batches are those of torch's loader, and so is the error of an index that is out of it."""
    found = []
    for kind in (torch.utils.data.DataLoader, DataLoader):
        try:
            found.append([batch.tolist() for batch in kind(dataset, batch_size, sampler=indices)])  # type: ignore[arg-type]
        except IndexError as error:
            found.append(str(error))
    assert found[0] == found[1]


@pytest.mark.parametrize("index", [-1, np.int64(3), True, torch.tensor(2)], ids=repr)
def test_odd_indices_of_a_range(index: Any) -> None:
    """They are read as torch's loader reads them."""
    found = [
        next(iter(kind(range(9), 2, sampler=[index, 1])))  # type: ignore[arg-type]
        for kind in (torch.utils.data.DataLoader, DataLoader)
    ]
    assert equal(*found)


class Named(Dicts):
    def __getitem__(self, index: int) -> Any:
        return index, f"name {index}"


class Turned(Dicts):
    """From sample 4 on, the keys have another order."""

    def __getitem__(self, index: int) -> Any:
        return {"a": index, "b": -index} if index < 4 else {"b": -index, "a": index}


def test_the_order_of_keys_does_not_matter() -> None:
    """Columns are joined by their names."""
    found = Gather.from_dataset(Turned())(torch.tensor([5]))
    assert {name: int(column) for name, column in found.items()} == {"a": 5, "b": -5}


@pytest.mark.parametrize(
    ("dataset", "message"),
    [(Named(), "but got str$"), ([], "got an empty one")],
)
def test_what_has_no_columns_is_refused(dataset: Any, message: str) -> None:
    """Text, and a dataset without samples."""
    with pytest.raises(ValueError, match=message):
        Gather.from_dataset(dataset)


@pytest.mark.parametrize("dataset", [range(0, 1 << 64, 1 << 62), range(1 << 63, (1 << 63) + 9)], ids=str)
def test_ranges_of_large_numbers_are_read_one_by_one(dataset: range) -> None:
    """The result, or the error, is that of torch's loader."""
    found = []
    for kind in (torch.utils.data.DataLoader, DataLoader):
        try:
            found.append(next(iter(kind(dataset, 2, sampler=[0, 1]))).tolist())  # type: ignore[arg-type]
        except Exception as error:  # noqa: BLE001  # whichever
            found.append(type(error).__name__)
    assert found[0] == found[1]
