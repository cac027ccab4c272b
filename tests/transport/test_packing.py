"""Batches cross the border as bytes at offsets, and come back as they were: as torch makes them."""

from __future__ import annotations

import pickle
from multiprocessing import reduction
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as tud
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from fastload import DataLoader
from fastload.batch.packing import pack, unpack
from fastload.memory.lease import BumpAllocator, private_memory
from tests.kit import datasets
from tests.kit.batches import assert_same_batches, assert_same_samples

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
    kind = draw(st.sampled_from(["u1", "<f4", "<i2", "?", "U3", "M8[s]", [("a", "u1"), ("b", "f8")]]))
    array = np.zeros(shape, kind)
    return np.asfortranarray(array) if draw(st.booleans()) else array


NESTS = st.recursive(
    tensors() | arrays() | st.integers() | st.text(max_size=5) | st.none() | st.just(b"file" * 1000),
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
    allocator = BumpAllocator(private_memory)
    allocator.begin(private_memory(had_bytes) if had_bytes else None)

    packed = pack(batch, allocator)
    back = unpack(packed, allocator.lease if packed.used_bytes else b"")

    assert_same_samples(batch, back)
    for one, other in zip(tree_leaves(batch), tree_leaves(back), strict=True):
        assert not isinstance(one, torch.Tensor) or not one.numel() or one.stride() == other.stride()


def test_where_leaves_lie_and_which_are_one() -> None:
    """What collate wrote into the slot is sent as an offset, and the same tensor twice is one again."""
    allocator = BumpAllocator(private_memory)
    allocator.begin(None)
    rows = torch.from_numpy(allocator.allocate(600)).view(2, 300)

    packed = pack({"x": rows, "y": rows[1], "z": rows}, allocator)
    back = unpack(packed, allocator.lease)

    assert [offset for offset, *_ in packed.leaves] == [0, 300]
    assert packed.used_bytes == 600
    assert back["x"] is back["z"]


def test_a_batch_that_outgrows_its_memory_is_laid_out_anew_as_a_whole() -> None:
    """Leaves in the old memory and beside it all end up in the new one."""
    allocator = BumpAllocator(private_memory)
    allocator.begin(private_memory(4096))
    rows = torch.from_numpy(allocator.allocate(4000))
    rows.fill_(7)

    first, second = unpack(pack([rows, torch.ones(100_000)], allocator), allocator.lease)

    assert (first == 7).all()
    assert (second == 1).all()


@pytest.mark.parametrize("order", [1, -1])
def test_dtypes_that_are_equal_stay_what_they_are(order: int) -> None:
    """NumPy's equality ignores metadata, such as h5py's names of an enumeration, and alignment."""
    fields = {"names": ["a", "b"], "formats": ["u1", "f8"]}
    dtypes = [np.dtype("u1"), np.dtype("u1", metadata={"enum": {"cat": 0}})]
    dtypes += [np.dtype({**fields, "offsets": [0, 8], "itemsize": 16}), np.dtype(fields, align=True)]
    allocator = BumpAllocator(private_memory)
    allocator.begin(None)
    batch = [np.zeros(3, dtype) for dtype in dtypes[::order]]
    back = unpack(pack(batch, allocator), allocator.lease)
    for array, dtype in zip(back, dtypes[::order], strict=True):
        assert (array.dtype, array.dtype.metadata) == (dtype, dtype.metadata)
        assert array.dtype.isalignedstruct == dtype.isalignedstruct


def test_arrays_that_nobody_may_write_to_come_back_as_torchs() -> None:
    """Writable, also those that are pickled: structures of a file's bytes, say."""
    read_only = np.frombuffer(b"abcdefgh", [("a", "<i2"), ("b", "<i2")])
    allocator = BumpAllocator(private_memory)
    allocator.begin(None)
    back = unpack(pack(read_only, allocator), allocator.lease)
    theirs = pickle.loads(reduction.ForkingPickler.dumps(read_only))

    assert_same_samples(back, theirs)
    assert back.flags.writeable == theirs.flags.writeable


@pytest.mark.parametrize("code", [">i2", ">f8", ">c8", ">U3", ">M8[s]", [("a", ">i2")]])
def test_arrays_of_the_other_byte_order_come_back_as_torchs(code: Any) -> None:
    """In the machine's order, which torch.from_numpy wants; fields keep theirs."""
    array = np.arange(20_000).reshape(4, -1).astype(">i8").astype(code)
    allocator = BumpAllocator(private_memory)
    allocator.begin(None)
    back = unpack(pack(array, allocator), allocator.lease if allocator.used_bytes else b"")
    theirs = pickle.loads(reduction.ForkingPickler.dumps(array))

    assert_same_samples(back, theirs)
    assert back.dtype.str == theirs.dtype.str
    assert back.dtype.isnative or code == [("a", ">i2")]


def test_long_texts_lie_in_the_slot_and_hold_nothing_of_it() -> None:
    """A message stays short; strings are copied out, so a batch of them needs no lease."""
    texts = [f"caption {number}" for number in range(1000)]
    for batch in (texts, [texts, np.ma.masked_array([1, 2], [0, 1])], [torch.ones(3), texts, torch.ones(9)]):
        allocator = BumpAllocator(private_memory)
        allocator.begin(None)
        packed = pack(batch, allocator)
        memory, back = allocator.memory, unpack(packed, allocator.lease)
        allocator.end()

        assert len(pickle.dumps(packed)) < 1024
        assert memory is not None
        assert memory.is_leased is isinstance(batch[0], torch.Tensor)
        assert str(back) == str(batch)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 gives it for any sparse tensor
def test_what_is_no_plain_tensor_travels_as_itself() -> None:
    """Subclasses, requires_grad and sparse tensors keep what they are."""
    batch = [torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True), torch.eye(2).to_sparse()]
    allocator = BumpAllocator(private_memory)
    allocator.begin(None)

    parameter, leaf, sparse = unpack(pack(batch, allocator), allocator.lease)

    assert type(parameter) is torch.nn.Parameter
    assert leaf.requires_grad
    assert sparse.is_sparse


# --- small arrays ----------------------------------------------------------------------------------------

ARRAY_DTYPES = ["uint8", "int64", "float32", "float64", "bool", "uint16", "complex64"]
NO_TENSORS = [">i4", "U3", "M8[s]", "object"]  # torch refuses these


def arrays_like(shape: tuple[int, ...], dtype: str, order: str, count: int) -> list[np.ndarray[Any, Any]]:
    """Some arrays of different values."""
    made = []
    for number in range(count):
        array = (np.arange(np.prod(shape, dtype=int)) % 7 + number).reshape(shape).astype(dtype)
        if order == "F":
            array = np.asfortranarray(array)
        elif order == "reversed" and array.ndim and len(array) > 1:  # torch refuses negative strides
            array = array[::-1]
        elif order == "read-only":
            array.flags.writeable = False
        made.append(array)
    return made


shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
orders = st.sampled_from(["C", "C", "C", "F", "reversed", "read-only"])


@pytest.mark.slow
@given(
    st.lists(st.tuples(shapes, st.sampled_from(ARRAY_DTYPES + NO_TENSORS), orders), min_size=1, max_size=2),
    st.sampled_from(["whole", "tuple", "dict"]),
)
@settings(max_examples=150)
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_any_arrays_give_torchs_batch_or_torchs_error(
    kinds: list[tuple[tuple[int, ...], str, str]], form: str
) -> None:
    """Small arrays, which one call stacks: values, dtypes, strides, and the type of an error."""
    samples: list[Any] = [array for kind in kinds for array in arrays_like(*kind, count=3)]
    if form != "whole":
        samples = [(array, 3) if form == "tuple" else {"a": array} for array in samples]
    loader = DataLoader(datasets.Made(samples.__getitem__, len(samples)), len(samples))
    try:
        expected = default_collate(samples)
    except Exception as error:  # noqa: BLE001  # compared below
        with pytest.raises(type(error)):
            next(iter(loader))
        return
    assert_same_batches(expected, next(iter(loader)))


# --- nested tensors --------------------------------------------------------------------------------------

# torch warns at the first strided one in each process
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
JAGGED = pytest.param(torch.jagged, id="jagged", marks=pytest.mark.slow)  # it imports torch's compiler
LAYOUTS = pytest.mark.parametrize("layout", [pytest.param(torch.strided, id="strided"), JAGGED])


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


def told(batch: Any) -> Any:
    """What a nested tensor is: its layout, dtype and parts."""
    if isinstance(batch, (list, tuple)):
        return [told(part) for part in batch]
    assert batch.is_nested
    return type(batch), batch.layout, batch.dtype, [part.tolist() for part in batch.unbind()]


@pytest.mark.slow
@pytest.mark.parametrize("method", [None, "fork", "forkserver"])
@LAYOUTS
def test_nested_tensors_are_those_of_torchs_loader(layout: torch.layout, method: Any) -> None:
    """Samples, in a collate_fn that keeps them or alone, and batches of a collate_fn that makes them."""
    options = {"num_workers": int(method is not None), "multiprocessing_context": method}
    nested, ragged = Nested(layout), [torch.arange(length + 1.0) for length in range(4)]
    for dataset, size, collate_fn in [(nested, 2, cloned), (nested, None, None), (ragged, 2, nested)]:
        expected = list(map(told, tud.DataLoader(dataset, size, collate_fn=collate_fn)))

        assert list(map(told, DataLoader(dataset, size, collate_fn=collate_fn, **options))) == expected


@LAYOUTS
def test_default_collate_refuses_nested_tensors(layout: torch.layout) -> None:
    """With torch's error, in a worker as in this process."""
    for kind, num_workers in ((tud.DataLoader, 0), (DataLoader, 0), (DataLoader, 1)):
        with pytest.raises(RuntimeError, match="not currently supported by the default collate_fn"):
            next(iter(kind(Nested(layout), 2, num_workers=num_workers)))


@LAYOUTS
def test_the_memory_format_leaves_nested_tensors(layout: torch.layout) -> None:
    """A nested tensor of three-dimensional parts counts four dimensions, and is no batch of images."""
    dataset: Any = Nested(layout, rank=3)
    (batch,) = next(iter(DataLoader(dataset, 1, collate_fn=cloned, memory_format=torch.channels_last)))

    assert told(batch) == told(dataset[0])


# --- storages --------------------------------------------------------------------------------------------


def storages(index: int) -> Any:
    whole = torch.arange(1_000) + index
    parts = whole.untyped_storage(), whole[3:5].untyped_storage(), torch.UntypedStorage(0)
    return [*parts, torch.full((3,), index)._typed_storage(), whole]


def contents(value: Any) -> Any:
    return [contents(part) if isinstance(part, list) else (type(part), part.tolist()) for part in value]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_storages_are_those_of_torchs_loader(num_workers: int) -> None:
    """Of a whole tensor, of a part of one, empty, and typed."""
    options: dict[str, Any] = {"collate_fn": list, "num_workers": num_workers}
    theirs, ours = (
        [contents(batch) for batch in make(datasets.Made(storages, 4), 2, **options)]
        for make in (tud.DataLoader, DataLoader)
    )
    assert theirs == ours
