"""Batches cross the border as bytes at offsets, and come back as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.batch.packing import pack, unpack
from fastload.memory.lease import Arena, private_memory

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


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            (one.dtype, one.shape) == (other.dtype, other.shape)
            and (one.numel() == 0 or one.stride() == other.stride())
            and torch.equal(one, other)
        )
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    return bool(one == other)


@given(NESTS, st.sampled_from([0, 1, 4096]))
@settings(max_examples=200, deadline=None)
def test_any_nest_comes_back_equal_in_any_memory(batch: Any, had_bytes: int) -> None:
    """Values, types, dtypes, shapes and strides survive, in memory that fits, is too small, or is missing."""
    arena = Arena(private_memory)
    arena.begin(private_memory(had_bytes) if had_bytes else None)

    packed = pack(batch, arena)
    back = unpack(packed, arena.lease if packed.used_bytes else b"")

    assert _same(batch, back)


def test_leaves_that_lie_in_the_memory_already_are_not_moved() -> None:
    """What collate wrote into the slot is sent as an offset."""
    arena = Arena(private_memory)
    arena.begin(None)
    rows = torch.from_numpy(arena.allocate(600)).view(2, 300)

    packed = pack({"x": rows, "y": rows[1]}, arena)

    assert [offset for offset, *_ in packed.leaves] == [0, 300]
    assert packed.used_bytes == 600


def test_a_batch_that_outgrows_its_memory_is_laid_out_anew_as_a_whole() -> None:
    """Leaves in the old memory and beside it all end up in the new one."""
    arena = Arena(private_memory)
    arena.begin(private_memory(4096))
    rows = torch.from_numpy(arena.allocate(4000))
    rows.fill_(7)

    packed = pack([rows, torch.ones(100_000)], arena)
    first, second = unpack(packed, arena.lease)

    assert (first == 7).all()
    assert (second == 1).all()


def test_the_same_tensor_twice_is_one_tensor_again() -> None:
    """Identity inside a batch survives."""
    tensor = torch.arange(3)
    arena = Arena(private_memory)
    arena.begin(None)

    one, other = unpack(pack([tensor, tensor], arena), arena.lease)

    assert one is other


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
