"""Compare a batch with the expected one; overwrite a batch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class SoakError(AssertionError):
    """The library has broken a promise; the message says what was expected, what came, and where."""


def difference(expected: Any, got: Any, path: str = "batch") -> str | None:
    """The first place in which two nests differ in type, dtype, shape or value; None if they are equal."""
    if type(expected) is not type(got):
        return f"{path}: expected a {type(expected).__name__}, got a {type(got).__name__}"
    if isinstance(expected, torch.Tensor):
        return _tensor_difference(expected, got, path)
    if isinstance(expected, np.ndarray):
        if (expected.dtype, expected.shape) != (got.dtype, got.shape):
            return f"{path}: expected {expected.dtype} {expected.shape}, got {got.dtype} {got.shape}"
        return None if np.array_equal(expected, got) else f"{path}: {_shown(expected, got)}"
    if dataclasses.is_dataclass(expected):
        return difference(vars(expected), vars(got), path)
    if isinstance(expected, dict):
        if list(expected) != list(got):
            return f"{path}: expected the keys {list(expected)}, got {list(got)}"
        parts = [(f"{path}[{key!r}]", expected[key], got[key]) for key in expected]
    elif isinstance(expected, (list, tuple)):
        if len(expected) != len(got):
            return f"{path}: expected {len(expected)} elements, got {len(got)}"
        parts = [(f"{path}[{i}]", *pair) for i, pair in enumerate(zip(expected, got, strict=True))]
    else:
        return None if expected == got else f"{path}: expected {expected!r}, got {got!r}"
    for place, one, other in parts:
        found = difference(one, other, place)
        if found is not None:
            return found
    return None


def _tensor_difference(expected: torch.Tensor, got: torch.Tensor, path: str) -> str | None:
    if (expected.dtype, expected.shape) != (got.dtype, got.shape):
        shapes = tuple(expected.shape), tuple(got.shape)
        return f"{path}: expected {expected.dtype} {shapes[0]}, got {got.dtype} {shapes[1]}"
    return None if torch.equal(expected, got) else f"{path}: {_shown(expected, got)}"


def _shown(expected: Any, got: Any) -> str:
    where = (expected != got).reshape(-1)
    count = int(where.sum())
    first = int(where.nonzero()[0].item() if isinstance(where, torch.Tensor) else where.nonzero()[0][0])
    one, other = expected.reshape(-1), got.reshape(-1)
    few = slice(first, first + 8)
    return (
        f"{count} of {len(one)} values of shape {tuple(expected.shape)} differ; from value {first} on "
        f"expected {one[few].tolist()}, got {other[few].tolist()}"
    )


def with_channels_last(batch: Any) -> Any:
    """The batch in the shapes that `memory_format=torch.channels_last` gives it; strides are not set."""
    if isinstance(batch, torch.Tensor):
        return batch.permute(0, 3, 1, 2) if _is_image(batch, channels=3, sides=(1, 2)) else batch
    if type(batch) is dict:
        return {key: with_channels_last(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return type(batch)(*(with_channels_last(value) for value in batch))
    if type(batch) in (list, tuple):
        return type(batch)(with_channels_last(value) for value in batch)
    return batch


def wrong_strides(batch: Any) -> str | None:
    """A message about the first images whose strides are not channels-last; None if there are none."""
    for leaf in leaves(batch):
        if not isinstance(leaf, torch.Tensor) or not _is_image(leaf, channels=1, sides=(2, 3)):
            continue
        if leaf.numel() and not leaf.is_contiguous(memory_format=torch.channels_last):
            return f"images of shape {tuple(leaf.shape)} have strides {leaf.stride()}, not channels-last ones"
    return None


def _is_image(tensor: torch.Tensor, channels: int, sides: tuple[int, int]) -> bool:
    is_pixels = tensor.dtype is torch.uint8 or tensor.is_floating_point()
    return (
        is_pixels
        and tensor.dim() == 4
        and tensor.shape[channels] in (1, 3, 4)
        and all(tensor.shape[side] >= 8 for side in sides)
    )


def leaves(nest: Any) -> Iterator[Any]:
    """The leaves of a nest of dicts, lists, tuples and dataclasses, in order."""
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        nest = vars(nest)
    if isinstance(nest, dict):
        nest = nest.values()
    elif not isinstance(nest, (list, tuple)):
        yield nest
        return
    for value in nest:
        yield from leaves(value)


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
