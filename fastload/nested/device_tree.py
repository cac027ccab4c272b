"""Walks over nested batches: visits the leaves that can move to a device, and keeps everything else as it is.

The functions are pure: containers are never changed in place. A container in which no leaf was replaced is
returned itself; any other container is returned as a new one of the same type.

Leaves are tensors, and objects with a ``to(device)`` of their own (PackedSequence, TensorDict, a graph's
batch), because only these objects know how to move their content.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, memoryview, range, type)


def map_leaves(
    value: Any, function: Callable[[Any], Any], is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """``value`` with each leaf replaced by ``function(leaf)``.

    The walk enters dicts, lists, tuples, namedtuples, dataclasses, and every other Mapping and Sequence.
    Leaves that ``function`` returns unchanged, and all other values, stay the same objects. ``is_leaf`` can
    name more leaves; it is called for everything but tensors, and for a container before its content.

    Raises:
        Exception: The error of ``function``, or of the constructor of a container type.
    """
    if isinstance(value, torch.Tensor) or (is_leaf is not None and is_leaf(value)):
        return function(value)
    if isinstance(value, _PLAIN):
        return value
    if _moves_itself(type(value)):
        return function(value)
    visit = functools.partial(map_leaves, function=function, is_leaf=is_leaf)
    if isinstance(value, Mapping):
        return _map_mapping(value, visit)
    if isinstance(value, Sequence):
        return _map_sequence(value, visit)
    if dataclasses.is_dataclass(value):
        return _map_dataclass(value, visit)
    return value


def move_leaf(leaf: Any, device: torch.device) -> Any:
    """``leaf.to(device)``, with ``non_blocking=True`` if the leaf's ``to`` takes it."""
    if isinstance(leaf, torch.Tensor) or _takes_non_blocking(type(leaf)):
        return leaf.to(device, non_blocking=True)
    return leaf.to(device)


def _moves_itself(cls: type) -> bool:
    """Whether this class's ``to`` moves to a device; in many classes it converts units or formats.

    A ``to`` that moves has a ``non_blocking`` argument, the signature ``(self, *args, **kwargs)`` (as in
    torch's own classes), or a first argument ``device``.
    """
    parameters = _parameters_of_to(cls)
    return _takes_non_blocking(cls) or (bool(parameters) and parameters[0].name == "device")


def _takes_non_blocking(cls: type) -> bool:
    parameters = _parameters_of_to(cls)
    kinds = [parameter.kind for parameter in parameters]
    return any(parameter.name == "non_blocking" for parameter in parameters) or kinds == [
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    ]


@functools.lru_cache(maxsize=1024)
def _parameters_of_to(cls: type) -> list[inspect.Parameter]:
    """The parameters of the class's method ``to`` after ``self``; empty if it has no such method."""
    method = inspect.getattr_static(cls, "to", None)
    return list(inspect.signature(method).parameters.values())[1:] if inspect.isfunction(method) else []


def _map_mapping(value: Mapping[Any, Any], visit: Callable[[Any], Any]) -> Any:
    parts = dict(value.items())
    changed = {}
    for key, part in parts.items():
        mapped = visit(part)
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


def _map_sequence(value: Any, visit: Callable[[Any], Any]) -> Any:
    parts = list(value)
    mapped = [visit(part) for part in parts]
    if all(new is old for new, old in zip(mapped, parts, strict=True)):
        return value
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


def _map_dataclass(value: Any, visit: Callable[[Any], Any]) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        if not hasattr(value, field.name):
            continue  # declared with init=False and never set
        part = getattr(value, field.name)
        mapped = visit(part)
        if mapped is not part:
            changed[field.name] = mapped
    if not changed:
        return value
    clone = copy.copy(value)  # not replace(): it would run __post_init__ again
    for name, mapped in changed.items():
        object.__setattr__(clone, name, mapped)  # also where the dataclass is frozen
    return clone
