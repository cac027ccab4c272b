"""Records and nests: every sample comes back, and no damage does more than raise."""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import json
import warnings
from collections import OrderedDict, UserDict, UserList
from enum import IntEnum
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as npst
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import default_collate

from fastload.cache.records import ALIGNMENT_BYTES, LMDB_PLACE, decode, encode, is_intact
from fastload.cache.samples import stack_records
from fastload.errors import CacheCorruptError, CacheError, UnsupportedSampleError
from fastload.nested.leaf import TENSOR_STORAGE
from fastload.nested.spec import Spec, flatten
from fastload.nested.tensors import TENSOR_DTYPES
from fastload.nested.tree import OpaqueLeafError, copy_views, leaves, structure_of
from tests.cache.zoo import Pair
from tests.kit.batches import assert_same_samples

_DTYPES = npst.scalar_dtypes() | npst.byte_string_dtypes(min_len=1) | npst.unicode_string_dtypes(min_len=1)
_ARRAYS = _DTYPES.flatmap(
    lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, min_side=0, max_side=4))
)
_TENSORS = st.tuples(
    st.sampled_from([name for name in TENSOR_DTYPES if name != "complex32"]),  # torch warns of it
    st.lists(st.integers(0, 4), max_size=3),
).map(lambda made: torch.arange(int(np.prod(made[1]))).reshape(made[1]).to(TENSOR_DTYPES[made[0]]))
_TEXT = st.text(st.characters(exclude_categories=()))  # lone surrogates too
_SCALARS = _DTYPES.flatmap(npst.from_dtype).filter(lambda value: isinstance(value, np.generic))
_PLAIN = st.integers() | st.floats() | st.booleans() | st.binary() | st.none() | _TEXT
_LEAVES = _ARRAYS | _TENSORS | _SCALARS | _PLAIN


def nests(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Containers in containers around these leaves."""
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=4).map(tuple),
            st.dictionaries(_TEXT, inner, max_size=4),
        ),
        max_leaves=8,
    )


_SAMPLES = nests(_LEAVES)


@pytest.mark.slow
@given(_SAMPLES)
def test_round_trip(sample: Any) -> None:
    """Any nest of supported leaves comes back, of the same types; arrays are aligned and read-only views."""
    text = encode(sample)
    found = decode(text)
    start = np.frombuffer(text, np.uint8).__array_interface__["data"][0]
    assert_same_samples(found, sample)
    assert text == encode(sample)  # two of them can be compared
    for array in leaves(found):
        if isinstance(array, np.ndarray) and array.size:
            offset = array.__array_interface__["data"][0] - start
            assert 0 < offset < len(text)
            assert (LMDB_PLACE + offset) % ALIGNMENT_BYTES == 0
            assert (array.flags.c_contiguous, array.flags.writeable) == (True, False)


@pytest.mark.parametrize("side", [0, 8, 80])
@pytest.mark.parametrize("texts", [("one", "two", "six"), ("a", "", "three"), ("a" * 20_000, "b", "c")])
def test_a_batch_of_records_is_that_of_default_collate(side: int, texts: tuple[str, ...]) -> None:
    """Of small and large arrays, several in a record, beside numbers and texts; of records of any length."""
    rng = np.random.default_rng(side)
    samples = [
        (rng.random((side, side, 3)), text, len(text), (rng.random((side, 64)), torch.arange(side * 99)))
        for text in texts
    ]
    records = [memoryview(encode(sample)) for sample in samples]
    assert_same_samples(stack_records(records, np.empty, [0, 0, 0]), default_collate(samples))


@pytest.mark.slow
@given(st.data())
def test_damage_raises_at_worst(data: st.DataObject) -> None:
    """A record with any bytes overwritten or cut off is read, also in a batch, or raises a cache error."""
    record = encode(data.draw(_SAMPLES))
    damaged = bytearray(record)
    for _ in range(data.draw(st.integers(0, 4))):
        damaged[data.draw(st.integers(0, len(record) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(record)))
    records = data.draw(st.permutations([record, record, bytes(damaged[:end])]))
    with contextlib.suppress(CacheError):
        stack_records([memoryview(text) for text in records], np.empty, [0, 0, 0])
    with contextlib.suppress(CacheError):
        decode(bytes(damaged[:end]))


@given(st.data())
def test_a_checksum_finds_damage_and_foreign_keys(data: st.DataObject) -> None:
    """Any changed byte, a cut, bytes too many, exchanged sectors and another key are found."""
    record, key = encode(data.draw(_SAMPLES), b"key"), b"key"
    assert is_intact(record, key)
    assert not is_intact(record, b"yek")
    assert not is_intact(record[: data.draw(st.integers(0, len(record) - 1))], key)
    assert not is_intact(record + b"\0", key)
    changed = bytearray(record)
    changed[data.draw(st.integers(0, len(record) - 1))] ^= data.draw(st.integers(1, 255))
    assert not is_intact(changed, key)
    sectors = encode((b"a" * 512, b"b" * 512), key)
    at, other = sectors.index(b"a" * 512), sectors.index(b"b" * 512)
    swapped = bytearray(sectors)
    swapped[at : at + 512], swapped[other : other + 512] = (
        sectors[other : other + 512],
        sectors[at : at + 512],
    )
    assert not is_intact(swapped, key)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_tensor_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of this torch come back, by torch's names; a file with one of a newer torch has other samples."""
    for name, dtype in TENSOR_DTYPES.items():
        tensor = torch.tensor([0, 1, 2]).to(torch.float32).to(dtype)
        back = decode(encode(tensor))
        assert (str(dtype), back.dtype) == (f"torch.{name}", dtype)
        assert bytes(back.untyped_storage()) == bytes(tensor.untyped_storage())
    assert set(TENSOR_DTYPES) == {name for name in TENSOR_STORAGE if hasattr(torch, name)}
    text = encode(torch.zeros(3, dtype=torch.bfloat16))
    monkeypatch.delitem(TENSOR_DTYPES, "bfloat16")
    with pytest.raises(CacheCorruptError, match=r"torch .* has no dtype bfloat16"):
        decode(text)


def test_arrays_in_any_order_come_back_and_tensors_are_private(tmp_path: Path) -> None:
    """Arrays become C-contiguous arrays of NumPy; what is written to a tensor stays with its reader."""
    array, mapped = np.arange(24).reshape(2, 3, 4), np.memmap(tmp_path / "x", np.uint8, "w+", shape=(3,))
    given = array.T, array[:, ::-2], np.asfortranarray(array), mapped
    text = encode((*given, torch.arange(6).reshape(2, 3).T))
    *arrays, tensor = decode(text)
    for one, other in zip(arrays, given, strict=True):
        assert type(one) is np.ndarray
        assert one.flags.c_contiguous
        np.testing.assert_array_equal(one, other)
    tensor += 1
    assert torch.equal(decode(text)[4], torch.arange(6).reshape(2, 3).T)


class _MetaTensor(torch.Tensor):
    """A stand-in for MONAI's class of this name."""


Colour = IntEnum("Colour", "RED")


def nested_tensor(layout: Any) -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # the API is a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("sample", "path", "advice"),
    [
        *(([{1, 2}], "sample[0]", "plain list"), ({1: 2}, "sample", "str keys")),
        ({"p": Path("x")}, 'sample["p"]', "str(value)"),
        *((OrderedDict(a=1), "sample", "plain dict"),
          ({"file": bytearray(b"x")}, 'sample["file"]', "str or bytes")),
        *(((Colour.RED,), "sample[0]", "plain int"), ([np.array([None])], "sample[0]", "numbers")),
        *(([np.ma.masked_array([1])], "sample[0]", "(array.data, numpy.ma.getmaskarray(array))"),
          ([np.rec.array([(1, 2)])], "sample[0]", "numpy.asarray"),
          ([object()], "sample[0]", "arrays, tensors")),
        *(([nested_tensor(torch.strided)], "sample[0]", "list(tensor.unbind())"),
          ([nested_tensor(torch.jagged)], "sample[0]", "list(tensor.unbind())")),
        *(([torch.nn.Parameter(torch.zeros(1))], "sample[0]", "plain tensor"),
          ([torch.zeros(1, requires_grad=True)], "sample[0]", "detach()"),
          ([torch.zeros(1).to_sparse()], "sample[0]", "to_dense()"),
          ([torch.zeros(1, device="meta")], "sample[0]", "cpu()"),
          ([torch.zeros(2).as_subclass(_MetaTensor)], "sample[0]", "return a plain tensor, for instance")),
        *(([value], "sample[0]", "return str(value)") for value in (dt.date(2026, 1, 2), decimal.Decimal(1))),
        *(([UserDict(a=1)], "sample[0]", "return a plain dict"),
          ([UserList([1])], "sample[0]", "return a plain list")),
        ([Pair(1, 2)], "sample[0]", "return a plain list or tuple"),
        ([{("a", "to", "b"): 1}], "sample[0]", "is a tuple: use plain str keys"),
        ([Image.new("L", (2, 2))], "sample[0]", "numpy.asarray(image) for a mask"),
        (ENDLESS, "", "nested more than 64 levels deep"),
    ],
)  # fmt: skip
def test_unsupported_samples_are_named(sample: Any, path: str, advice: str) -> None:
    """What cannot be cached raises, naming where it is and what to return instead."""
    with pytest.raises(UnsupportedSampleError) as caught:
        encode(sample)
    assert str(caught.value).startswith((f"{path}:", "the sample is nested"))
    assert advice in str(caught.value)
    assert "CachedDataset(pre_transform=function); or cache by file" in str(caught.value)


@pytest.mark.parametrize(
    ("sample", "old", "new", "said"),
    [
        (1, b"FLrc\x04", b"FLrc\x01", "not a record of format 4"),
        (1, b"\x08\0\0\0\0\0\0\0\x01", b"\x08\0\0\0\0\0\0\x09\x01", "claims .* bytes, which is impossible"),
        ("text", b"text", b"\xff\xfe\xfd\xfc", "a record's str"),
    ],
)
def test_a_record_that_was_changed(sample: Any, old: bytes, new: bytes, said: str) -> None:
    """A format and damage raise, also in a batch."""
    text = encode(sample)
    assert old in text
    forged = text.replace(old, new)[8:]
    for read in (decode, lambda record: stack_records([record], np.empty, [0])):
        with pytest.raises(CacheError, match=said):
            read(memoryview(xxhash.xxh3_64_digest(forged) + forged))


def test_what_no_array_has_is_damage() -> None:
    """Shapes of no bytes that NumPy cannot make either; a record that ends before its payloads do."""
    for shape in [(0, 1 << 47, 1 << 47), (1, 0, 1 << 63), (1,) * 70, (0,) * 65]:
        for kind, dtype in (("array", "|u1"), ("tensor", "uint8")):
            with pytest.raises(CacheCorruptError, match="description cannot be read"):
                Spec.parse(json.dumps([kind, dtype, shape]).encode())
    text = memoryview(encode((np.arange(100), "text")))
    with pytest.raises(CacheCorruptError, match=r"a record claims .* bytes, but only .* are there"):
        stack_records([text, text[:-1]], np.empty, [0, 0])


def test_specs_are_equal_by_value() -> None:
    """Also when the first of two equal ones is no longer among those that are kept."""
    spec, _ = flatten((np.zeros(1), 7))
    for length in range(2, 1100):
        flatten((np.zeros(length), 7))
    again, _ = flatten((np.zeros(1), 7))
    assert again is not spec
    assert (again == spec, len({again, spec})) == (True, 1)
    assert again != flatten((np.zeros(2), 7))[0]


# --- nests ---------------------------------------------------------------------------------------------


MEMORY = np.arange(90, dtype=np.uint8).reshape(6, 5, 3), np.arange(30, dtype=np.float32).reshape(6, 5)


def ways(array: Any) -> list[Any]:
    """What lies in the memory of an array, and what does not."""
    tensor = torch.from_numpy(array)
    inside = [array, array[2:, 1:3], array[::-1, ::-1], array.T, array.reshape(-1)[-1:]]
    return [*inside, tensor[3:], tensor.transpose(0, 1), array.copy(), tensor.clone(), 7, "text"]


@pytest.mark.slow
@given(nests(st.sampled_from([leaf for array in MEMORY for leaf in ways(array)])))
def test_no_leaf_of_any_nest_stays_in_cached_memory(nest: Any) -> None:
    """What lies there is copied, with its axes in the same order; what lies elsewhere is kept."""
    for new, old in zip(leaves(copy_views(nest, MEMORY)), leaves(nest), strict=True):
        is_inside = any(np.shares_memory(old, array) for array in MEMORY)
        assert (new is old) == (not is_inside)
        if is_inside:
            assert type(new) is type(old)
            np.testing.assert_array_equal(new, old)
            orders = [np.argsort(np.abs(np.asarray(leaf).strides)).tolist() for leaf in (new, old)]
            assert orders[0] == orders[1]
            assert not any(np.shares_memory(new, array) for array in MEMORY)


def test_other_objects_are_not_seen_through() -> None:
    """An object that may refer to memory of its own kind is told apart from plain values."""
    objects = [object(), np.array([None], object), np.zeros(1, [("a", "u1")])[0], memoryview(b"x")]
    for leaf in [*objects, bytearray(b"x"), {1, 2}]:
        with pytest.raises(OpaqueLeafError):
            copy_views({"a": [1, leaf]}, MEMORY)


# --- outlines --------------------------------------------------------------------------------------------


def test_structure_of() -> None:
    """The text names containers, keys, types, shapes and dtypes, in a few lines for any sample."""
    image, nest = np.zeros((4, 6, 3), np.uint8), {"img": np.zeros(3), "more": [torch.zeros(2, 3), "x"]}
    for sample, expected in (
        ((image, 7), "a tuple of (array (4, 6, 3) uint8, int)"),
        (nest, "a dict of {'img': array (3,) float64, 'more': [tensor (2, 3) float32, str]}"),
        (Pair(1.5, None), "a Pair of (float, NoneType)"),
        (image, "an array (4, 6, 3) uint8"),
        *(((), "an empty tuple"), (5, "an int"), ([[[[1]]]], "a list of [[[[…]]]]")),
        (list(range(100)), "a list of [int, int, int, int, int, int, int, int, …]"),
        ({(1, 2): 3}, "a dict of {tuple: int}"),
    ):
        assert structure_of(sample) == expected
    large: Any = None
    for _ in range(9):
        large = {f"{key}" * 99: large for key in range(20)}
    assert len(structure_of(large)) < 8 * 8 * 8 * 60
