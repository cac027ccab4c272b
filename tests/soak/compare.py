"""Compare a batch with the expected one; overwrite a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map


class SoakError(AssertionError):
    """The library has broken a promise; the message says what was expected, what came, and where."""


def difference(expected: Any, got: Any, name: str = "batch") -> str | None:
    """The first place in which two nests differ in type, dtype, shape or value; None if they are equal."""
    (ours, form), (theirs, other_form) = tree_flatten_with_path(expected), tree_flatten_with_path(got)
    if form != other_form:
        return f"{name}: expected the parts {form}, got {other_form}"
    for (path, one), (_, other) in zip(ours, theirs, strict=True):
        place = name + keystr(path)
        if type(one) is not type(other):
            return f"{place}: expected a {type(one).__name__}, got a {type(other).__name__}"
        if not isinstance(one, (torch.Tensor, np.ndarray)):
            if one != other:
                return f"{place}: expected {one!r}, got {other!r}"
            continue
        kinds = [f"{array.dtype} {tuple(array.shape)}" for array in (one, other)]
        if kinds[0] != kinds[1]:
            return f"{place}: expected {kinds[0]}, got {kinds[1]}"
        wrong = np.flatnonzero(np.asarray(one != other))
        if len(wrong):
            few = slice(int(wrong[0]), int(wrong[0]) + 8)
            values = f"expected {one.reshape(-1)[few].tolist()}, got {other.reshape(-1)[few].tolist()}"
            return f"{place}: {len(wrong)} of the values of {kinds[0]} differ; from {few.start} on {values}"
    return None


def with_channels_last(batch: Any) -> Any:
    """The batch in the shapes that `memory_format=torch.channels_last` gives it; strides are not set."""
    return tree_map(lambda one: one.permute(0, 3, 1, 2) if _is_image(one, 3, (1, 2)) else one, batch)


def wrong_strides(batch: Any) -> str | None:
    """A message about the first images whose strides are not channels-last; None if there are none."""
    for leaf in tree_leaves(batch):
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
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            for dim, stride in enumerate(leaf.stride()):
                if stride == 0 and leaf.shape[dim] > 1:  # torch does not write to expanded tensors
                    leaf = leaf.narrow(dim, 0, 1)
            leaf.copy_(leaf == 0)
        elif isinstance(leaf, np.ndarray):
            leaf[...] = leaf == 0
