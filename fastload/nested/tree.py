"""Walks over nested samples and over the outputs of transforms: copies, read-only views, comparison.

In a sample, containers are dicts, lists, tuples and namedtuples, including subclasses. `map_leaves` also
walks over batches, which may be of more types.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.nested.leaves import IMAGE, to_bytes
from fastload.nested.spec import flatten

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.nested.leaves import Array, Leaf

    _Function = Callable[[Any], Any]
    _IsLeaf = Callable[[Any], bool]
    _Rebuild = Callable[[Any, _Function, _IsLeaf | None], Any]


# Sequences that are values, and types whose objects hold no leaves.
_VALUES = (torch.Tensor, np.ndarray, str, bytes, bytearray, memoryview, range)


def map_leaves(
    value: Any, function: Callable[[Any], Any], is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """``value`` with each leaf replaced by ``function(leaf)``.

    The walk enters dicts, lists, tuples, namedtuples, dataclasses, and every other Mapping and Sequence; all
    other values are leaves. Containers are never changed in place: a container in which no leaf was replaced
    is returned itself, any other container is returned as a new one of the same type. ``is_leaf`` can name
    containers that are leaves.

    Raises:
        Exception: The error of ``function``, or of the constructor of a container type.
    """
    rebuild = _rebuilder(value.__class__)
    if rebuild is None or (is_leaf is not None and is_leaf(value)):
        return function(value)
    return rebuild(value, function, is_leaf)


@functools.lru_cache(maxsize=1024)
def _rebuilder(cls: type) -> _Rebuild | None:
    """The function that maps the parts of a container of this class; None if its objects are leaves."""
    if issubclass(cls, _VALUES):
        return None
    if issubclass(cls, Mapping):
        return _map_mapping
    if issubclass(cls, Sequence):
        return _map_sequence
    return _map_dataclass if dataclasses.is_dataclass(cls) else None


def _map_mapping(value: Mapping[Any, Any], function: _Function, is_leaf: _IsLeaf | None) -> Any:
    parts = dict(value.items())
    changed = {}
    for key, part in parts.items():
        mapped = map_leaves(part, function, is_leaf)
        if mapped is not part:
            changed[key] = mapped
    if not changed:
        return value
    if type(value) is dict:
        return {**parts, **changed}
    if isinstance(value, (dict, collections.UserDict)):
        clone = copy.copy(value)  # keeps a default_factory and other extras
        for key, mapped in changed.items():
            clone[key] = mapped  # some subclasses refuse update()
        return clone
    # Not copy.copy: if a class keeps its data in an attribute, the copy shares that attribute.
    return _make_like(value, {**parts, **changed})


def _map_sequence(value: Any, function: _Function, is_leaf: _IsLeaf | None) -> Any:
    parts = list(value)
    mapped = [map_leaves(part, function, is_leaf) for part in parts]
    for new, old in zip(mapped, parts, strict=True):
        if new is not old:
            break
    else:
        return value
    if type(value) is tuple:
        return tuple(mapped)
    if type(value) is list:
        return mapped
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(mapped)  # a namedtuple
    if isinstance(value, (list, collections.UserList)):
        clone = copy.copy(value)
        clone[:] = mapped
        return clone
    return _make_like(value, mapped)


def _make_like(value: Any, content: Any) -> Any:
    """A container of the type of ``value``; ``content`` itself if the type's constructor does not take it."""
    try:
        return type(value)(content)
    except TypeError:
        return content  # as torch's pin_memory does


def _map_dataclass(value: Any, function: _Function, is_leaf: _IsLeaf | None) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        if not hasattr(value, field.name):
            continue  # declared with init=False and never set
        part = getattr(value, field.name)
        mapped = map_leaves(part, function, is_leaf)
        if mapped is not part:
            changed[field.name] = mapped
    if not changed:
        return value
    clone = copy.copy(value)  # not replace(): it would run __post_init__ again
    for name, mapped in changed.items():
        object.__setattr__(clone, name, mapped)  # also where the dataclass is frozen
    return clone


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


# Types of leaves that refer to no memory of an array.
_NUMBERS_AND_TEXTS = (bool, int, float, complex, str, bytes, type(None))
# Types of leaves whose memory is known. np.void may be a view, and any other object may hold a view.
_SEEN_THROUGH = (
    *(np.ndarray, np.number, np.bool_, np.character, torch.Tensor),
    *_NUMBERS_AND_TEXTS,
)


def owns_its_memory(nest: Any) -> bool:
    """Whether every array owns its memory and every other leaf is a number or a text.

    Most outputs of transforms do; this is a quick check before `is_seen_through` and `detached`.
    """
    parts = nest if type(nest) is tuple else leaves(nest)  # most outputs: quicker than the walk
    for leaf in parts:
        if type(leaf) is np.ndarray:
            if not leaf.flags.owndata or leaf.dtype.hasobject:
                return False
        elif type(leaf) not in _NUMBERS_AND_TEXTS:
            return isinstance(leaf, (dict, list, tuple)) and owns_its_memory(leaves(nest))
    return True


def is_seen_through(nest: Any) -> bool:
    """Whether `detached` finds all memory that a nest refers to: no leaf is an object of another type."""
    for leaf in leaves(nest):
        if not isinstance(leaf, _SEEN_THROUGH) or (isinstance(leaf, np.ndarray) and leaf.dtype.hasobject):
            return False
    return True


def detached(nest: Any, arrays: Sequence[Array]) -> Any:
    """The nest with private copies of the arrays and tensors that lie in the memory of the given arrays.

    Args:
        nest: Any nest; `is_seen_through` tells whether all of its memory is found.
        arrays: C-contiguous arrays.

    Returns:
        The nest; the strides of the copies have the same order as those of the originals.
    """

    def detach(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            is_within = any(np.may_share_memory(leaf, array) for array in arrays)
            return leaf.copy(order="K") if is_within else leaf
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.device.type == "cpu":
            return leaf.clone() if any(_starts_within(leaf, array) for array in arrays) else leaf
        return leaf

    return map_leaves(nest, detach)


def _starts_within(tensor: torch.Tensor, array: Array) -> bool:
    start: int = array.__array_interface__["data"][0]
    return start <= tensor.data_ptr() < start + array.nbytes


def read_only(sample: Any) -> Any:
    """A new sample of the dataset in the form that a cache returns: read-only arrays, private tensors.

    Raises:
        UnsupportedSampleError: A value in it cannot be cached; names its path.
    """
    spec, values = flatten(sample)
    return spec.build([_read_only_leaf(value) for value in values])


def read_only_views(sample: Any) -> Any:
    """The sample with read-only views of its arrays, and private tensors; other values stay as they are."""
    return map_leaves(sample, _read_only_leaf)


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
            _content(spec.leaves[i], values[i]), _content(spec.leaves[i], other_values[i])
        ) and not (_equal_with_nan(values[i], other_values[i])):
            return path
    if len(other_paths) > len(paths):
        return other_paths[len(paths)]
    return None if spec.node == other_spec.node else "$"


def _content(leaf: Leaf, value: Any) -> Any:
    """The bytes that decide whether two values are equal; the path of an undecoded image does not."""
    return bytes(value.content()) if leaf.kind == IMAGE else to_bytes(leaf, value)


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
