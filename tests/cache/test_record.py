"""Records: every sample comes back, and no damage does more than raise."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import OrderedDict, namedtuple
from enum import IntEnum
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as npst
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fastload.cache.lmdb.gather import stack_records
from fastload.cache.record import ALIGNMENT_BYTES, decode, encode
from fastload.errors import CacheCorruptError, CacheError, UnsupportedSampleError
from fastload.nested.dtypes import TENSOR_STORAGE
from fastload.nested.spec import Spec
from fastload.nested.tensors import TENSOR_DTYPES
from tests.cache.zoo import Pair, Triple
from tests.kit.batches import assert_same_samples

_DTYPES = st.one_of(
    npst.boolean_dtypes(),
    npst.integer_dtypes(endianness="?"),
    npst.unsigned_integer_dtypes(endianness="?"),
    npst.floating_dtypes(endianness="?"),
    npst.complex_number_dtypes(),
    npst.datetime64_dtypes(),
    npst.timedelta64_dtypes(),
    npst.byte_string_dtypes(min_len=1),
    npst.unicode_string_dtypes(min_len=1),
    npst.array_dtypes(npst.integer_dtypes(), min_size=1, max_size=3),
)
_ARRAYS = _DTYPES.flatmap(
    lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, min_side=0, max_side=4))
)
_TENSORS = st.tuples(
    st.sampled_from([name for name in TENSOR_DTYPES if name != "complex32"]),  # torch warns of it
    st.lists(st.integers(0, 4), max_size=3),
).map(lambda made: torch.arange(int(np.prod(made[1]))).reshape(made[1]).to(TENSOR_DTYPES[made[0]]))
_TEXT = st.text(st.characters(exclude_categories=()))  # lone surrogates too
_LEAVES = st.one_of(
    _ARRAYS,
    _TENSORS,
    _DTYPES.flatmap(npst.from_dtype).filter(lambda value: isinstance(value, np.generic)),
    st.integers(),
    st.floats(),
    st.booleans(),
    _TEXT,
    st.binary(),
    st.none(),
)
_SAMPLES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(_TEXT, inner, max_size=4),
        st.builds(Pair, inner, inner),
        st.builds(Triple, inner, inner, inner),
    ),
    max_leaves=8,
)


@given(_SAMPLES)
@settings(deadline=None)
def test_round_trip(sample: Any) -> None:
    """Any nest of supported leaves comes back with its exact types, dtypes, shapes and values."""
    assert_same_samples(decode(encode(sample)), sample)
    assert encode(sample) == encode(sample)  # two of them can be compared


@pytest.mark.slow
@given(st.data())
@settings(max_examples=200)
def test_damage_raises_at_worst(data: st.DataObject) -> None:
    """A record with any bytes overwritten or cut off is read, also in a batch, or raises a cache error."""
    record = encode(data.draw(_SAMPLES))
    damaged = bytearray(record)
    for _ in range(data.draw(st.integers(0, 4))):
        damaged[data.draw(st.integers(0, len(record) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(record)))
    records = data.draw(st.permutations([record, record, bytes(damaged[:end])]))
    with contextlib.suppress(CacheError):
        stack_records([memoryview(text) for text in records], np.empty)
    with contextlib.suppress(CacheError):
        decode(bytes(damaged[:end]))


def test_a_short_record_is_no_part_of_a_batch() -> None:
    """A record that begins as the first one does, and ends before its payloads do, raises."""
    record = memoryview(encode((np.arange(100), "text")))

    with pytest.raises(CacheCorruptError, match=r"a record states .* bytes, but only .* are there"):
        stack_records([record, record[:-1]], np.empty)


@pytest.mark.parametrize("read", [decode, lambda record: stack_records([record], np.empty)])
def test_text_that_is_no_text_is_damage(read: Any) -> None:
    """Bytes that are no UTF-8 where a str should be raise a cache error, from a batch as from a sample."""
    record = encode("text").replace(b"text", b"\xff\xfe\xfd\xfc")

    with pytest.raises(CacheCorruptError, match="a record's str"):
        read(memoryview(record))


@pytest.mark.parametrize("shape", [(0, 1 << 47, 1 << 47), (1, 0, 1 << 63), (1,) * 70, (0,) * 65])
@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_a_shape_that_no_array_has_is_damage(kind: str, shape: tuple[int, ...]) -> None:
    """A shape of no bytes that NumPy cannot make either raises a cache error."""
    spec = json.dumps([kind, "|u1" if kind == "array" else "uint8", shape])

    with pytest.raises(CacheCorruptError, match="description cannot be read"):
        Spec.parse(spec.encode())


@pytest.mark.parametrize("name", TENSOR_DTYPES)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_tensor_dtype(name: str) -> None:
    """Tensors of every dtype come back, also those that NumPy does not know."""
    tensor = torch.tensor([0, 1, 2]).to(torch.float32).to(TENSOR_DTYPES[name])
    back = decode(encode(tensor))

    assert back.dtype is tensor.dtype
    assert bytes(back.untyped_storage()) == bytes(tensor.untyped_storage())


def test_arrays_are_views_and_tensors_are_not(tmp_path: Path) -> None:
    """Arrays view the record without a copy, read-only and C-contiguous; tensors are private and writable."""
    array, mapped = np.arange(24).reshape(2, 3, 4), np.memmap(tmp_path / "x", np.uint8, "w+", shape=(3,))
    given = array.T, array[:, ::-2], np.asfortranarray(array), mapped
    record = encode((*given, torch.arange(6).reshape(2, 3).T))
    *arrays, tensor = decode(record)
    address = np.frombuffer(record, np.uint8).__array_interface__["data"][0]
    for one, other in zip(arrays, given, strict=True):
        assert type(one) is np.ndarray
        assert address <= one.__array_interface__["data"][0] < address + len(record)
        assert one.flags.c_contiguous
        assert not one.flags.writeable
        np.testing.assert_array_equal(one, other)
    assert torch.equal(tensor, torch.arange(6).reshape(2, 3).T)
    tensor += 1
    assert torch.equal(decode(record)[4], torch.arange(6).reshape(2, 3).T)


@given(st.lists(_ARRAYS | st.integers(), min_size=1, max_size=5))
@settings(deadline=None, max_examples=50)
def test_payloads_are_aligned(sample: list[Any]) -> None:
    """Every array starts at a multiple of 64 bytes from the record's start."""
    record = encode(sample)
    start = np.frombuffer(record, np.uint8).__array_interface__["data"][0]
    for value in decode(record):
        if isinstance(value, np.ndarray) and value.size:
            assert (value.__array_interface__["data"][0] - start) % ALIGNMENT_BYTES == 0


class Colour(IntEnum):
    RED = 1


def _local_tuple() -> Any:
    from typing import NamedTuple

    class Local(NamedTuple):
        x: int

    return Local(1)


@pytest.mark.parametrize(
    ("sample", "path", "advice"),
    [
        ({"image": Image.new("RGB", (2, 2))}, '$["image"]', "numpy.asarray(image)"),
        ((1, [Image.new("L", (2, 2))]), "$[1][0]", "numpy.asarray(image)"),
        ([{1, 2}], "$[0]", "plain list"),
        ({"p": Path("x")}, '$["p"]', "str(value)"),
        ({1: 2}, "$", "str keys"),
        (OrderedDict(a=1), "$", "plain dict"),
        ({"file": bytearray(b"x")}, '$["file"]', "str or bytes"),
        ((Colour.RED,), "$[0]", "plain int"),
        ([np.array([None])], "$[0]", "numbers"),
        ([np.ma.masked_array([1])], "$[0]", "numpy.asarray"),
        ([torch.nn.Parameter(torch.zeros(1))], "$[0]", "plain tensor"),
        ([torch.zeros(1, requires_grad=True)], "$[0]", "detach()"),
        ([torch.zeros(1).to_sparse()], "$[0]", "to_dense()"),
        ([torch.zeros(1, device="meta")], "$[0]", "cpu()"),
        ([object()], "$[0]", "arrays, tensors"),
        ([_local_tuple()], "$[0]", "top of a module"),
    ],
)
def test_unsupported_samples_are_named(sample: Any, path: str, advice: str) -> None:
    """What cannot be cached raises, naming where it is and what to return instead."""
    with pytest.raises(UnsupportedSampleError) as caught:
        encode(sample)

    assert str(caught.value).startswith(f"{path}:")
    assert advice in str(caught.value)


def test_endless_nest_raises() -> None:
    """A list that holds itself is refused instead of recursing for ever."""
    endless: list[Any] = []
    endless.append(endless)

    with pytest.raises(UnsupportedSampleError, match="nested more than 64 levels deep"):
        encode(endless)


@pytest.mark.parametrize(
    ("sample", "old", "new", "said"),
    [
        (Pair(1, 2), b"tests.cache.zoo", b"tests.cache.xyz", r"import tests\.cache\.xyz"),  # imports nothing
        (Pair(1, 2), b'"Pair"', b'"Imag"', "no such class"),  # another object is not called
        (1, b"FLrc\x01", b"FLrc\x02", "not a record of format 1"),
    ],
)
def test_what_this_process_does_not_know(sample: Any, old: bytes, new: bytes, said: str) -> None:
    """A class that is not a namedtuple of an imported module, and another format version, raise."""
    assert old in encode(sample)
    with pytest.raises(CacheError, match=said):
        decode(encode(sample).replace(old, new))


def test_a_dtype_that_this_torch_lacks_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may come from where a newer release of torch is; its other samples can be read."""
    record = encode(torch.zeros(3, dtype=torch.bfloat16))
    monkeypatch.delitem(TENSOR_DTYPES, "bfloat16")

    with pytest.raises(CacheCorruptError, match=r"torch .* has no dtype bfloat16"):
        decode(record)


def test_dtypes_are_stored_under_the_names_that_torch_gives_them() -> None:
    """All of those that this release of torch has."""
    assert {f"torch.{name}": dtype for name, dtype in TENSOR_DTYPES.items()} == {
        str(getattr(torch, name)): getattr(torch, name) for name in TENSOR_STORAGE if hasattr(torch, name)
    }


def test_a_namedtuple_that_was_defined_again_is_the_new_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's cell that defines it is run again."""
    module = sys.modules[__name__]
    for _ in range(2):
        kind = namedtuple("Again", ["image", "label"])
        monkeypatch.setattr(module, "Again", kind, raising=False)
        monkeypatch.setattr(kind, "__module__", __name__)

        assert type(decode(encode(kind(np.zeros(3, np.uint8), 1)))) is kind
