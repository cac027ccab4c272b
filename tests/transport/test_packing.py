"""Batches cross the border as bytes at offsets, and come back as they were; nested tensors as with torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as tud
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from fastload import DataLoader
from fastload.batch.packing import pack, unpack
from fastload.memory.lease import Arena, private_memory
from tests.kit import datasets
from tests.kit.batches import assert_same_samples, stop_workers

DTYPES = [
    torch.uint8, torch.int64, torch.float32, torch.float64, torch.bool, torch.bfloat16, torch.float16,
    torch.complex64, torch.int16,
]  # fmt: skip


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    """Plain tensors of any dtype and any strides: dense, permuted, sliced, expanded, empty."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    base = torch.randint(0, 2, shape).to(draw(st.sampled_from(DTYPES)))
    view = draw(st.sampled_from(["dense", "permuted", "sliced", "expanded"]))
    if view == "permuted" and shape:
        return base.permute(*draw(st.permutations(range(len(shape)))))
    if view == "sliced" and shape:
        return base[:: draw(st.integers(1, 3))]
    if view == "expanded":
        return base.unsqueeze(0).expand(3, *shape)
    return base


@st.composite
def arrays(draw: Any) -> Any:
    """Arrays in C and Fortran order, also structured ones and ones without elements."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    kind = draw(st.sampled_from(["u1", "<f4", ">i2", "?", "U3", "M8[s]", [("a", "u1"), ("b", "f8")]]))
    array = np.zeros(shape, kind)
    return np.asfortranarray(array) if draw(st.booleans()) else array


NESTS = st.recursive(
    tensors() | arrays() | st.integers() | st.text(max_size=5) | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)  # fmt: skip


@pytest.mark.slow
@given(NESTS, st.sampled_from([0, 1, 4096]))
@settings(deadline=None)
def test_any_nest_comes_back_equal_in_any_memory(batch: Any, had_bytes: int) -> None:
    """Values, types, dtypes, shapes and strides survive, in memory that fits, is too small, or is missing."""
    arena = Arena(private_memory)
    arena.begin(private_memory(had_bytes) if had_bytes else None)

    packed = pack(batch, arena)
    back = unpack(packed, arena.lease if packed.used_bytes else b"")

    assert_same_samples(batch, back)
    for one, other in zip(tree_leaves(batch), tree_leaves(back), strict=True):
        assert not isinstance(one, torch.Tensor) or not one.numel() or one.stride() == other.stride()


def test_where_leaves_lie_and_which_are_one() -> None:
    """What collate wrote into the slot is sent as an offset, and the same tensor twice is one again."""
    arena = Arena(private_memory)
    arena.begin(None)
    rows = torch.from_numpy(arena.allocate(600)).view(2, 300)

    packed = pack({"x": rows, "y": rows[1], "z": rows}, arena)
    back = unpack(packed, arena.lease)

    assert [offset for offset, *_ in packed.leaves] == [0, 300]
    assert packed.used_bytes == 600
    assert back["x"] is back["z"]


def test_a_batch_that_outgrows_its_memory_is_laid_out_anew_as_a_whole() -> None:
    """Leaves in the old memory and beside it all end up in the new one."""
    arena = Arena(private_memory)
    arena.begin(private_memory(4096))
    rows = torch.from_numpy(arena.allocate(4000))
    rows.fill_(7)

    first, second = unpack(pack([rows, torch.ones(100_000)], arena), arena.lease)

    assert (first == 7).all()
    assert (second == 1).all()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 gives it for any sparse tensor
def test_what_is_no_plain_tensor_travels_as_itself() -> None:
    """Subclasses, requires_grad and sparse tensors keep what they are."""
    batch = [torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True), torch.eye(2).to_sparse()]
    arena = Arena(private_memory)
    arena.begin(None)

    parameter, leaf, sparse = unpack(pack(batch, arena), arena.lease)

    assert type(parameter) is torch.nn.Parameter
    assert leaf.requires_grad
    assert sparse.is_sparse


# --- nested tensors --------------------------------------------------------------------------------------


# torch warns at the first strided one in each process
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")

JAGGED = pytest.param(torch.jagged, id="jagged", marks=pytest.mark.slow)  # it imports torch's compiler
LAYOUTS = [pytest.param(torch.strided, id="strided"), JAGGED]
REFUSAL = "not currently supported by the default collate_fn"


class Nested:
    """Samples that are nested tensors of two parts of unequal length, or a collate_fn that makes one."""

    def __init__(self, layout: torch.layout, rank: int = 1) -> None:
        self.layout = layout
        self.rank = rank  # of each part

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self([torch.full((length, *[3] * (self.rank - 1)), float(index)) for length in (2, 3)])

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "start_method"),
    [
        (torch.strided, "fork"),
        pytest.param(torch.jagged, "fork", marks=pytest.mark.slow),
        (torch.jagged, "forkserver"),
    ],
)
def test_they_travel_through_workers(layout: torch.layout, start_method: str) -> None:
    """With a collate_fn that keeps them: type, layout, dtype and values are the samples'."""
    dataset = Nested(layout)
    # Before workers are forked, because the first tensor imports torch's compiler.
    expected = [told([dataset[index]]) for index in range(4)]
    num_workers = 2 if start_method == "fork" else 1  # others import torch and its compiler in each worker
    options: Any = {"multiprocessing_context": start_method, "collate_fn": cloned}

    assert [told(batch) for batch in DataLoader(dataset, 1, num_workers=num_workers, **options)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_collate_fn_may_make_them(layout: torch.layout, num_workers: int) -> None:
    """The batches are those of torch's loader, also without automatic batching."""
    options: Any = {"num_workers": num_workers}
    samples = datasets.Made(ragged, 4)
    Nested(layout)([torch.ones(1)])  # the first tensor imports torch's compiler; workers inherit it
    ours, theirs = (
        kind(samples, 2, collate_fn=Nested(layout), **options) for kind in (DataLoader, tud.DataLoader)
    )
    single, their_single = (kind(Nested(layout), None, **options) for kind in (DataLoader, tud.DataLoader))

    assert list(map(told, ours)) == list(map(told, theirs))
    assert list(map(told, single)) == list(map(told, their_single))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_default_collate_refuses_them(layout: torch.layout) -> None:
    """With torch's error, in a worker as in this process."""
    for kind, num_workers in ((tud.DataLoader, 0), (DataLoader, 0), (DataLoader, 1)):
        iterator = iter(kind(Nested(layout), 2, num_workers=num_workers))
        with pytest.raises(RuntimeError, match=REFUSAL):
            next(iterator)
        stop_workers(iterator)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_memory_format_leaves_them(layout: torch.layout) -> None:
    """A nested tensor of three-dimensional parts counts four dimensions, and is no batch of images."""
    dataset = Nested(layout, rank=3)
    (batch,) = next(
        iter(DataLoader(dataset, 1, collate_fn=cloned, memory_format=torch.channels_last))  # type: ignore[arg-type]
    )

    assert told(batch) == told(dataset[0])
