"""Walks over nests: private copies of what lies in cached memory, and outlines for errors."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.nested.tree import HiddenMemoryError, detached, leaves, outline
from tests.cache.zoo import Pair


class Memory(NamedTuple):
    """Arrays as a cache gives them."""

    image: Any
    mask: Any


def memory() -> Memory:
    return Memory(
        np.arange(6 * 5 * 3, dtype=np.uint8).reshape(6, 5, 3),
        np.arange(30, dtype=np.float32).reshape(6, 5),
    )


# Ways to make something that lies in an array's memory, and one that does not.
INSIDE = {
    "array": lambda array: array,
    "slice": lambda array: array[2:, 1:3],
    "reversed": lambda array: array[::-1, ::-1],
    "transposed": lambda array: array.T,
    "last": lambda array: array.reshape(-1)[-1:],
    "tensor": torch.from_numpy,
    "tensor of a slice": lambda array: torch.from_numpy(array[3:]),
    "permuted tensor": lambda array: torch.from_numpy(array).transpose(0, 1),
    "slice of a tensor": lambda array: torch.from_numpy(array)[-1:],
}
OUTSIDE = {
    "copy": lambda array: array.copy(),
    "clone": lambda array: torch.from_numpy(array).clone(),
    "number": lambda array: 7,
    "text": lambda array: "text",
}


def as_array(leaf: Any) -> Any:
    return leaf.numpy() if isinstance(leaf, torch.Tensor) else np.asarray(leaf)


@pytest.mark.parametrize("way", INSIDE)
def test_what_lies_in_cached_memory_is_copied(way: str) -> None:
    """Alone it becomes a private copy, whose axes lie in the same order; what lies elsewhere is kept."""
    for make in OUTSIDE.values():
        leaf = make(memory().image)
        assert detached(leaf, [*memory()]) is leaf
    for array in memory():
        leaf = INSIDE[way](array)
        found = detached(leaf, [array])

        assert type(found) is type(leaf)
        assert not np.shares_memory(as_array(found), array)
        np.testing.assert_array_equal(as_array(found), as_array(leaf))
        assert np.argsort(np.abs(as_array(found).strides)).tolist() == (
            np.argsort(np.abs(as_array(leaf).strides)).tolist()
        )


LEAVES = st.tuples(st.sampled_from([*INSIDE, *OUTSIDE]), st.integers(0, 1))
NESTS = st.recursive(
    LEAVES.map(lambda leaf: ("leaf", leaf)),
    lambda children: (
        st.lists(children, max_size=3).map(lambda items: ("list", items))
        | st.lists(children, max_size=3).map(lambda items: ("tuple", items))
        | st.tuples(children, children).map(lambda items: ("pair", items))
        | st.dictionaries(st.sampled_from("abc"), children).map(lambda items: ("dict", items))
    ),
    max_leaves=8,
)


def build(node: Any, arrays: Memory) -> Any:
    kind, value = node
    if kind == "leaf":
        way, position = value
        return {**INSIDE, **OUTSIDE}[way](arrays[position])
    if kind == "dict":
        return {key: build(child, arrays) for key, child in value.items()}
    items = [build(child, arrays) for child in value]
    return Pair(*items) if kind == "pair" else tuple(items) if kind == "tuple" else items


@given(NESTS)
def test_no_leaf_of_any_nest_stays_in_cached_memory(node: Any) -> None:
    """After `detached` no leaf shares memory with the sample, and every leaf has its values."""
    arrays = memory()
    nest = build(node, arrays)
    found = detached(nest, arrays)

    for new, old in zip(leaves(found), leaves(nest), strict=True):
        np.testing.assert_array_equal(as_array(new), as_array(old))
        for array in arrays:
            assert not np.shares_memory(as_array(new), array)


@pytest.mark.parametrize(
    "leaf",
    [
        object(),
        np.array([None], object),
        np.zeros(1, [("a", "u1")])[0],
        memoryview(b"x"),
        bytearray(b"x"),
        {1, 2},
    ],
    ids=lambda leaf: type(leaf).__name__,  # repr() tells addresses, which differ between processes
)
def test_other_objects_are_not_seen_through(leaf: Any) -> None:
    """An object that may refer to memory of its own kind is told apart from plain values."""
    with pytest.raises(HiddenMemoryError):
        detached({"a": [1, leaf]}, memory())


# --- outlines --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nest", "expected"),
    [
        ((np.zeros((48, 64, 3), np.uint8), 7), "a tuple of (array (48, 64, 3) uint8, int)"),
        (
            {"img": np.zeros(3), "more": [torch.zeros(2, 3), "x"]},
            "a dict of {'img': array (3,) float64, 'more': [tensor (2, 3) float32, str]}",
        ),
        (Pair(1.5, None), "a Pair of (float, NoneType)"),
        (np.zeros((4, 4), np.uint8), "an array (4, 4) uint8"),
        ((), "an empty tuple"),
        (5, "an int"),
        (list(range(100)), "a list of [int, int, int, int, int, int, int, int, …]"),
        ([[[[1]]]], "a list of [[[[…]]]]"),
    ],
)
def test_outline(nest: Any, expected: str) -> None:
    """An outline names containers, keys, types, shapes and dtypes."""
    assert outline(nest) == expected


@settings(max_examples=50)
@given(
    st.recursive(
        st.none() | st.integers() | st.text() | st.binary(),
        lambda inner: (
            st.lists(inner, max_size=20)
            | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner, max_size=20)
        ),
        max_leaves=50,
    )
)
def test_an_outline_is_bounded(nest: Any) -> None:
    """However large a sample is, its outline is a few lines of text at most."""
    assert len(outline(nest)) < 8 * 8 * 8 * 60
