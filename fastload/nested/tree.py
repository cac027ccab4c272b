"""Walks over nested samples and over the outputs of transforms: copies, read-only views, comparison.

A nest consists of dicts, lists, tuples and namedtuples, including subclasses; any other value is a leaf.
"""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.nested.leaves import to_bytes
from fastload.nested.spec import flatten, is_namedtuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fastload.nested.leaves import Array


def map_leaves(nest: Any, change: Callable[[Any], Any]) -> Any:
    """The nest with every leaf replaced by `change(leaf)`; containers without a changed leaf are kept."""
    if isinstance(nest, dict):
        items = {key: map_leaves(value, change) for key, value in nest.items()}
        if all(items[key] is value for key, value in nest.items()):
            return nest
        if type(nest) is dict:
            return items
        other = copy.copy(nest)  # keeps a subclass and its attributes, such as a default factory
        other.update(items)
        return other
    if isinstance(nest, (list, tuple)):
        values = [map_leaves(value, change) for value in nest]
        if all(new is old for new, old in zip(values, nest, strict=True)):
            return nest
        if is_namedtuple(nest):
            return type(nest)._make(values)  # type: ignore[union-attr]
        return type(nest)(values)
    return change(nest)


def leaves(nest: Any) -> list[Any]:
    """Every leaf, in order."""
    found: list[Any] = []
    _collect(nest, found)
    return found


def _collect(nest: Any, found: list[Any]) -> None:
    if isinstance(nest, dict):
        nest = nest.values()
    elif not isinstance(nest, (list, tuple)):
        found.append(nest)
        return
    for value in nest:
        if isinstance(value, (dict, list, tuple)):
            _collect(value, found)
        else:
            found.append(value)


def private_copy(sample: Any) -> Any:
    """The sample with writable, private, C-contiguous copies of its arrays; its tensors are kept."""
    return map_leaves(sample, lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf)


# Types of leaves whose memory is known. np.void may be a view, and any other object may hold a view.
_SEEN_THROUGH = (
    *(np.ndarray, np.number, np.bool_, np.character, torch.Tensor),
    *(bool, int, float, complex, str, bytes, type(None)),
)


def is_seen_through(nest: Any) -> bool:
    """Whether `detached` finds all memory that a nest refers to: no leaf is an object of another type."""
    for leaf in leaves(nest):
        if not isinstance(leaf, _SEEN_THROUGH) or (isinstance(leaf, np.ndarray) and leaf.dtype.hasobject):
            return False
    return True


def detached(nest: Any, arrays: Iterable[Array]) -> Any:
    """The nest with private copies of the arrays and tensors that lie in the memory of the given arrays.

    Args:
        nest: Any nest; `is_seen_through` tells whether all of its memory is found.
        arrays: C-contiguous arrays.

    Returns:
        The nest; the strides of the copies have the same order as those of the originals.
    """
    ranges: list[tuple[int, int]] = []

    def detach(leaf: Any) -> Any:
        if isinstance(leaf, (bool, int, float, str)) or (type(leaf) is np.ndarray and leaf.flags.owndata):
            return leaf  # most leaves
        if not ranges:
            ranges.extend((_address(array), _address(array) + array.nbytes) for array in arrays)
        if isinstance(leaf, np.ndarray):
            return leaf.copy(order="K") if _starts_within(_address(leaf), ranges) else leaf
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.device.type == "cpu":
            return leaf.clone() if _starts_within(leaf.data_ptr(), ranges) else leaf
        return leaf

    return map_leaves(nest, detach)


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _starts_within(address: int, ranges: list[tuple[int, int]]) -> bool:
    return any(start <= address < stop for start, stop in ranges)


def read_only(sample: Any) -> Any:
    """A new sample of the dataset in the form that a cache returns: read-only arrays, private tensors.

    Raises:
        UnsupportedSampleError: A value in it cannot be cached; names its path.
    """
    spec, values = flatten(sample)
    return spec.build([_read_only_leaf(value) for value in values])


def _read_only_leaf(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        view = value.view()
        view.flags.writeable = False
        return view
    return value.clone() if isinstance(value, torch.Tensor) else value


_OUTLINE_DEPTH = 3
_OUTLINE_ITEMS = 8


def outline(nest: Any) -> str:
    """The structure of a nest in a few words, such as "a tuple of (array (8, 8, 3) uint8, int)".

    It names keys, types, shapes and dtypes, but no values; three containers deep, eight items of each.
    """
    text = _outline(nest, _OUTLINE_DEPTH)
    if isinstance(nest, (dict, list, tuple)):
        return f"a {type(nest).__name__} of {text}" if nest else f"an empty {type(nest).__name__}"
    return f"an {text}" if text[0] in "aeiou" else f"a {text}"


def _outline(nest: Any, depth: int) -> str:
    if isinstance(nest, np.ndarray):
        return f"array {nest.shape} {nest.dtype!s:.40}"
    if isinstance(nest, torch.Tensor):
        return f"tensor {tuple(nest.shape)} {str(nest.dtype).removeprefix('torch.')}"
    if not isinstance(nest, (dict, list, tuple)):
        return type(nest).__name__
    values = itertools.islice(
        nest.values() if isinstance(nest, dict) else nest, _OUTLINE_ITEMS if depth else 0
    )
    texts = [_outline(value, depth - 1) for value in values]
    if isinstance(nest, dict):
        texts = [f"{_outline_key(key)}: {text}" for key, text in zip(nest, texts, strict=False)]
    if len(nest) > len(texts):
        texts.append(f"… {len(nest)} in all" if texts else "…")
    brackets = "{}" if isinstance(nest, dict) else "[]" if isinstance(nest, list) else "()"
    return brackets[0] + ", ".join(texts) + brackets[1]


def _outline_key(key: Any) -> str:
    return f"{key!r:.40}" if isinstance(key, (str, int)) else type(key).__name__


def first_difference(one: Any, other: Any) -> str | None:
    """The path of the first leaf in which two samples differ in type, dtype, shape or value, or None.

    NaN equals NaN.

    Raises:
        UnsupportedSampleError: A value in a sample cannot be cached.
    """
    spec, values = flatten(one)
    other_spec, other_values = flatten(other)
    paths, other_paths = spec.paths(), other_spec.paths()
    for i, path in enumerate(paths):
        if i >= len(other_paths) or other_paths[i] != path or spec.leaves[i] != other_spec.leaves[i]:
            return path
        if not _equal(
            to_bytes(spec.leaves[i], values[i]), to_bytes(spec.leaves[i], other_values[i])
        ) and not (_equal_with_nan(values[i], other_values[i])):
            return path
    if len(other_paths) > len(paths):
        return other_paths[len(paths)]
    return None if spec.node == other_spec.node else "$"


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    return bool(one == other)


def _equal_with_nan(one: Any, other: Any) -> bool:
    """Whether two floats, arrays or tensors of one dtype and shape differ only in the bits of NaN."""
    if isinstance(one, torch.Tensor):
        if not (one.is_floating_point() or one.is_complex()):
            return False
        wide = torch.complex128 if one.is_complex() else torch.float64
        return torch.allclose(one.to(wide), other.to(wide), rtol=0, atol=0, equal_nan=True)
    dtype = np.asarray(one).dtype
    return dtype.kind in "fc" and bool(np.array_equal(one, other, equal_nan=True))
