"""Walks over nested samples, batches and outputs of transforms: copies, read-only views, comparison, moves.

In a sample, containers are dicts, lists, tuples and namedtuples, including subclasses. `map_leaves` also
walks over batches, which can have more types.

The leaves of a batch that can move to a device are tensors, and objects with their own ``to(device)``
(PackedSequence, TensorDict, a graph's batch), because only these objects know how to move their content.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from fastload.nested.deferred import DeferredImage
from fastload.nested.leaves import to_bytes
from fastload.nested.spec import flatten

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.nested.leaf import Array, Leaf


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
    kind = _container(value.__class__)
    if kind is None or (is_leaf is not None and is_leaf(value)):
        return function(value)
    parts: Any
    if kind == "mapping":
        parts = value.items()
    elif kind == "sequence":
        parts = enumerate(value)
    else:  # fields declared with init=False might never have been set
        names = [field.name for field in dataclasses.fields(value)]
        parts = [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    changed = {}
    for key, part in parts:
        mapped = map_leaves(part, function, is_leaf)
        if mapped is not part:
            changed[key] = mapped
    return _with(value, kind, changed) if changed else value


@functools.lru_cache(maxsize=1024)
def _container(cls: type) -> Literal["mapping", "sequence", "dataclass"] | None:
    """What the objects of a class are; None if they are leaves."""
    if issubclass(cls, _VALUES):
        return None
    if issubclass(cls, Mapping):
        return "mapping"
    if issubclass(cls, Sequence):
        return "sequence"
    return "dataclass" if dataclasses.is_dataclass(cls) else None


def _with(value: Any, kind: str, changed: dict[Any, Any]) -> Any:
    """A container of the type of ``value`` with some parts replaced."""
    if isinstance(value, (dict, list, collections.UserDict, collections.UserList)):
        clone = copy.copy(value)  # keeps a default_factory and other extras
        for key, mapped in changed.items():
            clone[key] = mapped
        return clone
    if kind == "dataclass":
        clone = copy.copy(value)  # not replace(): it would run __post_init__ again
        for name, mapped in changed.items():
            object.__setattr__(clone, name, mapped)  # also where the dataclass is frozen
        return clone
    # Not copy.copy: if a class keeps its data in an attribute, the copy shares that attribute.
    content: Any
    if kind == "mapping":
        content = {**value, **changed}
    else:
        content = [changed.get(place, part) for place, part in enumerate(value)]
        if hasattr(value, "_make"):
            return value._make(content)  # a namedtuple
    try:
        return type(value)(content)
    except TypeError:  # the constructor takes something else
        return content  # as torch's pin_memory does


def is_namedtuple(value: Any) -> bool:
    """Whether a value is an instance of a namedtuple class."""
    return isinstance(value, tuple) and hasattr(type(value), "_fields") and hasattr(type(value), "_make")


def leaves(nest: Any) -> list[Any]:
    """Every leaf, in order."""
    if isinstance(nest, dict):
        nest = nest.values()
    elif not isinstance(nest, (list, tuple)):
        return [nest]
    return [leaf for value in nest for leaf in leaves(value)]


def private_copy(sample: Any) -> Any:
    """The sample with writable, private, C-contiguous copies of its arrays; its tensors are kept."""
    if type(sample) is tuple:  # most samples: faster than the walk
        return tuple([part if type(part) in _ATOMS else map_leaves(part, _copied) for part in sample])
    return map_leaves(sample, _copied)


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


class OpaqueLeafError(Exception):
    """A leaf can refer to memory that `copy_views` cannot see."""


# Leaves of these types refer to no memory of an array. np.void can be a view; other objects can hold one.
_ATOMIC = (bool, int, float, complex, str, bytes, type(None), np.number, np.bool_, np.character)
_ATOMS = frozenset((bool, int, float, complex, str, bytes, type(None), np.int64, np.float64, DeferredImage))


def copy_views(nest: Any, sample: Any) -> Any:
    """The nest with private copies of the arrays and tensors that lie in the memory of a sample.

    Args:
        nest: Any nest, for example the output of a transform.
        sample: Its arrays are views of a cache, and C-contiguous.

    Returns:
        The nest; the strides of the copies have the same order as those of the originals.

    Raises:
        OpaqueLeafError: A leaf is not an array, tensor, number or text.
    """
    if type(nest) is tuple and type(sample) is tuple and nest:  # most samples: faster than the walk
        first = nest[0].copy() if type(nest[0]) is np.ndarray and nest[0] is sample[0] else nest[0]
        parts = [first, *nest[1:]]
        return tuple([part if owns(part) else _copy_views(part, sample) for part in parts])
    return _copy_views(nest, sample)


def owns(part: Any) -> bool:
    """Whether a value is no view: a number, a text, or an array that owns its memory."""
    kind = type(part)
    if kind is np.ndarray:
        return part.flags.owndata and not part.dtype.hasobject
    return kind in _ATOMS


def _copy_views(nest: Any, sample: Any) -> Any:
    def own(leaf: Any) -> Any:
        if isinstance(leaf, (*_ATOMIC, DeferredImage)):  # the result of a deferred image is private
            return leaf
        if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            # An array that owns its memory is no view of a cache.
            is_copied = not leaf.flags.owndata and any(np.may_share_memory(leaf, a) for a in _arrays(sample))
            return leaf.copy(order="K") if is_copied else leaf
        if not isinstance(leaf, torch.Tensor):
            raise OpaqueLeafError
        if leaf.layout is torch.strided and leaf.device.type == "cpu":
            return leaf.clone() if any(_starts_within(leaf, a) for a in _arrays(sample)) else leaf
        return leaf

    return map_leaves(nest, own, is_no_container)


def is_no_container(value: Any) -> bool:
    """Whether a value in a sample is a leaf; see the top of this file."""
    return not isinstance(value, (dict, list, tuple))


def _arrays(sample: Any) -> list[Array]:
    return [leaf for leaf in leaves(sample) if isinstance(leaf, np.ndarray)]


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
    """The sample with read-only views of its arrays, and private tensors; other values stay unchanged."""
    return map_leaves(sample, _read_only_leaf)


def _read_only_leaf(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        view = value.view()
        view.flags.writeable = False
        return view
    return value.clone() if isinstance(value, torch.Tensor) else value


_TEXT_DEPTH = 3
_TEXT_ITEMS = 8


def structure_of(nest: Any) -> str:
    """The structure of nested values in a few words, such as "a tuple of (array (8, 8, 3) uint8, int)".

    It names keys, types, shapes and dtypes, but no values; three containers deep, eight items of each.
    """
    text = _structure_of(nest, _TEXT_DEPTH)
    if isinstance(nest, (dict, list, tuple)):
        return f"a {type(nest).__name__} of {text}" if nest else f"an empty {type(nest).__name__}"
    return f"an {text}" if text[0].lower() in "aeiou" else f"a {text}"


def _structure_of(nest: Any, depth: int) -> str:
    if isinstance(nest, np.ndarray):
        return f"array {nest.shape} {nest.dtype!s:.40}"
    if isinstance(nest, torch.Tensor):
        return f"tensor {tuple(nest.shape)} {str(nest.dtype).removeprefix('torch.')}"
    if not isinstance(nest, (dict, list, tuple)):
        return type(nest).__name__
    is_dict = isinstance(nest, dict)
    texts = []
    for part in itertools.islice(nest, _TEXT_ITEMS if depth else 0):
        key = f"{part!r:.40}: " if isinstance(part, (str, int)) else f"{type(part).__name__}: "
        texts.append(
            key + _structure_of(nest[part], depth - 1) if is_dict else _structure_of(part, depth - 1)
        )
    if len(nest) > len(texts):
        texts.append("…")
    brackets = "{}" if is_dict else "[]" if isinstance(nest, list) else "()"
    return brackets[0] + ", ".join(texts) + brackets[1]


def first_difference(sample: Any, other: Any) -> str | None:
    """The path of the first leaf in which two samples differ in type, dtype, shape or value, or None.

    Raises:
        UnsupportedSampleError: A value in a sample cannot be cached.
    """
    (spec, values), (other_spec, other_values) = flatten(sample), flatten(other)
    paths, other_paths = spec.paths(), other_spec.paths()
    leaves_of_sample = zip(paths, spec.leaves, values, strict=True)
    leaves_of_other = zip(other_paths, other_spec.leaves, other_values, strict=True)
    for (path, *leaf), (other_path, *other_leaf) in zip(leaves_of_sample, leaves_of_other, strict=False):
        if path != other_path or not _are_equal(*leaf, *other_leaf):
            return path
    if len(paths) != len(other_paths):
        return max(paths, other_paths, key=len)[min(len(paths), len(other_paths))]
    return None if spec == other_spec else "sample"


def _are_equal(leaf: Leaf, value: Any, other_leaf: Leaf, other: Any) -> bool:
    if leaf == other_leaf and leaf.dtype[1:] in ("f16", "c32"):  # whose padding has any bits
        return np.array_equal(value, other, equal_nan=True)
    return leaf == other_leaf and bytes(to_bytes(leaf, value)) == bytes(to_bytes(leaf, other))


# --- to a device ------------------------------------------------------------------------------------------


def map_device_leaves(
    value: Any, function: Callable[[Any], Any], is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """``value`` with each leaf that can move replaced by ``function(leaf)``; see `map_leaves`.

    ``is_leaf`` can name more leaves; it is called for containers too, before their content.

    Raises:
        Exception: The error of ``function``, or of the constructor of a container type.
    """

    def is_device_leaf(part: Any) -> bool:
        return hasattr(part.__class__, "to") or (is_leaf is not None and is_leaf(part))

    return map_leaves(value, lambda leaf: function(leaf) if is_device_leaf(leaf) else leaf, is_device_leaf)


def move_leaf(leaf: Any, device: torch.device) -> Any:
    """``leaf.to(device)``, with ``non_blocking=True`` if the leaf's ``to`` takes it."""
    try:
        return leaf.to(device, non_blocking=True)
    except TypeError:
        return leaf.to(device)
