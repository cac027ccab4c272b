"""Finds the leaves of a nested batch that can move to a device, and moves them.

These leaves are tensors, and objects with their own ``to(device)`` (PackedSequence, TensorDict, a graph's
batch), because only these objects know how to move their content.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

from fastload.nested.tree import map_leaves

if TYPE_CHECKING:
    from collections.abc import Callable


def map_device_leaves(
    value: Any, function: Callable[[Any], Any], is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """``value`` with each leaf that can move replaced by ``function(leaf)``; see `map_leaves`.

    ``is_leaf`` can name more leaves; it is called for containers too, before their content.

    Raises:
        Exception: The error of ``function``, or of the constructor of a container type.
    """

    def is_device_leaf(part: Any) -> bool:
        can_move = isinstance(part, torch.Tensor) or _moves(part.__class__)[0]
        return can_move or (is_leaf is not None and is_leaf(part))

    return map_leaves(value, lambda leaf: function(leaf) if is_device_leaf(leaf) else leaf, is_device_leaf)


def move_leaf(leaf: Any, device: torch.device) -> Any:
    """``leaf.to(device)``, with ``non_blocking=True`` if the leaf's ``to`` takes it."""
    if isinstance(leaf, torch.Tensor) or _moves(leaf.__class__)[1]:
        return leaf.to(device, non_blocking=True)
    return leaf.to(device)


@functools.lru_cache(maxsize=1024)
def _moves(cls: type) -> tuple[bool, bool]:
    """Whether a class's ``to`` moves to a device, and whether it takes ``non_blocking``.

    In many classes ``to`` converts units or formats. One that moves has a ``non_blocking`` argument, the
    signature ``(self, *args, **kwargs)`` (as in torch's own classes), or a first argument ``device``.
    """
    method = inspect.getattr_static(cls, "to", None)
    if not inspect.isfunction(method):
        return False, False
    _, *parameters = inspect.signature(method).parameters.values()
    kinds = [parameter.kind for parameter in parameters]
    is_general = kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
    names = [parameter.name for parameter in parameters]
    takes_non_blocking = is_general or "non_blocking" in names
    return takes_non_blocking or names[:1] == ["device"], takes_non_blocking
