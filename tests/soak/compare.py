"""Compare a batch with the expected one; overwrite a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from collections.abc import Iterator


class SoakError(AssertionError):
    """The library has broken a promise; the message says what was expected, what came, and where."""


def _parts(nest: Any) -> list[tuple[str, Any]] | None:
    """The values of a dict, list or tuple with their places; None for any other."""
    if isinstance(nest, dict):
        return [(f"[{key!r}]", value) for key, value in nest.items()]
    if isinstance(nest, (list, tuple)):
        return [(f"[{number}]", value) for number, value in enumerate(nest)]
    return None


def leaves(nest: Any) -> Iterator[Any]:
    """The leaves of a nest of dicts, lists and tuples, in order."""
    parts = _parts(nest)
    if parts is None:
        yield nest
    for _, value in parts or ():
        yield from leaves(value)


def difference(expected: Any, got: Any, path: str = "batch") -> str | None:
    """The first place in which two nests differ in type, dtype, shape or value; None if they are equal."""
    if type(expected) is not type(got):
        return f"{path}: expected a {type(expected).__name__}, got a {type(got).__name__}"
    if isinstance(expected, (torch.Tensor, np.ndarray)):
        kinds = [f"{one.dtype} {tuple(one.shape)}" for one in (expected, got)]
        if kinds[0] != kinds[1]:
            return f"{path}: expected {kinds[0]}, got {kinds[1]}"
        wrong = np.flatnonzero(np.asarray(expected != got))
        few = slice(int(wrong[0]), int(wrong[0]) + 8) if len(wrong) else slice(0)
        one, other = expected.reshape(-1)[few].tolist(), got.reshape(-1)[few].tolist()
        where = f"{len(wrong)} of {expected.reshape(-1).shape[0]} values of {kinds[0]} differ"
        return f"{path}: {where}; from value {few.start} on expected {one}, got {other}" if one else None
    parts, others = _parts(expected), _parts(got)
    if parts is None or others is None:
        return None if expected == got else f"{path}: expected {expected!r}, got {got!r}"
    names = [[name for name, _ in one] for one in (parts, others)]
    if names[0] != names[1]:
        return f"{path}: expected the parts {names[0]}, got {names[1]}"
    found = (
        difference(one, other, path + name) for (name, one), (_, other) in zip(parts, others, strict=True)
    )
    return next(filter(None, found), None)


def with_channels_last(batch: Any) -> Any:
    """The batch in the shapes that `memory_format=torch.channels_last` gives it; strides are not set."""
    return tree_map(lambda one: one.permute(0, 3, 1, 2) if _is_image(one, 3, (1, 2)) else one, batch)


def wrong_strides(batch: Any) -> str | None:
    """A message about the first images whose strides are not channels-last; None if there are none."""
    for leaf in leaves(batch):
        is_image = _is_image(leaf, channels=1, sides=(2, 3)) and leaf.numel()
        if is_image and not leaf.is_contiguous(memory_format=torch.channels_last):
            return f"images of shape {tuple(leaf.shape)} have strides {leaf.stride()}"
    return None


def _is_image(leaf: Any, channels: int, sides: tuple[int, int]) -> bool:
    return (
        isinstance(leaf, torch.Tensor)
        and (leaf.dtype is torch.uint8 or leaf.is_floating_point())
        and leaf.dim() == 4
        and leaf.shape[channels] in (1, 3, 4)
        and all(leaf.shape[side] >= 8 for side in sides)
    )


def spoil(batch: Any) -> None:
    """Overwrite all arrays and tensors of a batch."""
    for leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor):
            for dim, stride in enumerate(leaf.stride()):
                if stride == 0 and leaf.shape[dim] > 1:  # torch does not write to expanded tensors
                    leaf = leaf.narrow(dim, 0, 1)
            leaf.copy_(leaf == 0)
        elif isinstance(leaf, np.ndarray):
            leaf[...] = leaf == 0
