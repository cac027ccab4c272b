"""Finds the leaves of a nested batch that can move to a device, and moves them.

These leaves are tensors, and objects with a ``to(device)`` of their own (PackedSequence, TensorDict, a
graph's batch), because only these objects know how to move their content.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

from fastload.nested.tree import map_leaves

if TYPE_CHECKING:
    from collections.abc import Callable


def map_movable(
    value: Any, function: Callable[[Any], Any], is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """``value`` with each leaf that can move replaced by ``function(leaf)``; see `map_leaves`.

    ``is_leaf`` can name more leaves; it is called for containers too, before their content.

    Raises:
        Exception: The error of ``function``, or of the constructor of a container type.
    """

    def is_found(part: Any) -> bool:
        can_move = isinstance(part, torch.Tensor) or _moves_itself(type(part))
        return can_move or (is_leaf is not None and is_leaf(part))

    return map_leaves(value, lambda leaf: function(leaf) if is_found(leaf) else leaf, is_found)


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
