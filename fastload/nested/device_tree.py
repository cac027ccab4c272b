"""Nested batches: visit the leaves that can move to a device, keep everything around them as it is.

Pure: containers are never changed in place. One in which no leaf was replaced comes back itself; any other
comes back as a new one of the same type.

Leaves are tensors, and objects with a ``to(device)`` of their own (PackedSequence, TensorDict, a graph's
batch), which know better than we do how to move what they hold.
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
    """``value`` with ``function(leaf)`` in the place of each leaf.

    Walked are dicts, lists, tuples, namedtuples, dataclasses, and every other Mapping and Sequence. Leaves
    that ``function`` returns as they are, and what is no leaf, stay the same objects. ``is_leaf`` can name
    more leaves; it is asked about everything but tensors, containers before what is in them.

    Raises:
        Exception: What ``function``, or the constructor of a container type, raised.
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
    """``leaf.to(device)``, which does not wait for the device where ``to`` leaves that choice."""
    if isinstance(leaf, torch.Tensor) or _takes_non_blocking(type(leaf)):
        return leaf.to(device, non_blocking=True)
    return leaf.to(device)


def _moves_itself(cls: type) -> bool:
    """Whether objects of this class have torch's ``to``; many others have one that converts units or formats.

    Known by a ``non_blocking`` argument, by ``(self, *args, **kwargs)``, as torch's own classes have it, or
    by a first argument ``device``.
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
    """Those of the class's method ``to`` behind ``self``; none if it has no such method."""
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
    # Not copy.copy: the copy of a class that keeps its data in an attribute shares that attribute.
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
    """A container of the type of ``value``; ``content`` itself if that type is made in another way."""
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
    clone = copy.copy(value)  # not replace(): __post_init__ has had its turn
    for name, mapped in changed.items():
        object.__setattr__(clone, name, mapped)  # also where the dataclass is frozen
    return clone
