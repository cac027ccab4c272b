"""Notes on errors of torch's default_collate: which field of the samples is the cause, and what to change.

They compare the samples, and collate nothing again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import collate as torch_collate

from fastload.errors import add_note
from fastload.images.encoded import EncodedImage
from fastload.nested.advice import advice
from fastload.nested.tree import outline

_NUMBERS = (int, float, np.number, np.bool_)
_TORCHS_RULES = tuple(torch_collate.default_collate_fn_map)
_BATCHED = "return arrays, tensors, numbers, str or bytes in dicts, lists and tuples"


def explain(values: Any, path: str, error: Exception) -> None:
    """Add a note to an error of default_collate, if the samples show its cause.

    Args:
        values: Whole samples, or the part at ``path`` of each sample.
        path: The place of the values in a sample.
        error: The error.
    """
    if isinstance(values, (list, tuple)) and values and not isinstance(error, MemoryError):
        with contextlib.suppress(Exception):  # containers of the user's classes may raise anything
            cause = _cause(values, path)
            if cause is not None:
                add_note(error, f"fastload: {cause}, or give the loader a collate_fn.")


def is_of_torch(error: Exception) -> bool:
    """Whether an error was raised in default_collate."""
    step = error.__traceback__
    while step is not None and step.tb_frame.f_globals is not vars(torch_collate):
        step = step.tb_next
    return step is not None


def _cause(values: Sequence[Any], path: str) -> str | None:
    """Why default_collate fails for the values at one place of the samples; None if they show no reason."""
    first = values[0]
    if isinstance(first, (str, bytes)) or _has_users_rule(first):
        return None
    if isinstance(first, (Mapping, Sequence)):
        return _cause_in_container(values, path)
    if isinstance(first, EncodedImage):
        return (
            f"{path} is an EncodedImage, which a CachedDataset decodes: give the loader "
            "fastload.CachedDataset(dataset, transform, cache=None), which stores nothing, or return "
            "image.decode() from the dataset"
        )
    is_array = isinstance(first, (np.ndarray, torch.Tensor))
    if not (is_array or isinstance(first, _NUMBERS)) or _has_objects(first):
        return _unsupported(first, path)
    for number, other in enumerate(values):
        if not _fits(first, other):
            return (
                f"{path} is {outline(first)} in the first sample of the batch and {outline(other)} in sample "
                f"{number} of the batch: return values of one type"
            )
        shape, other_shape = _shape(first), _shape(other)
        if is_array and None not in (shape, other_shape) and shape != other_shape:
            return (
                f"the samples of one batch differ in shape: {path} is {shape} in the first sample of the "
                f"batch and {other_shape} in sample {number} of the batch. Resize or crop all samples to one "
                "size, for example with albumentations.RandomCrop(224, 224) or "
                "fastload.ImageFolder(..., size=(256, 256))"
            )
    return None


def _cause_in_container(values: Sequence[Any], path: str) -> str | None:
    first = values[0]
    is_mapping = isinstance(first, Mapping)
    keys = list(first) if is_mapping else range(len(first))
    for number, other in enumerate(values):
        if not isinstance(other, Mapping if is_mapping else Sequence):
            return (
                f"{path} is {outline(first)} in the first sample of the batch and {outline(other)} in sample "
                f"{number} of the batch: return values of one type"
            )
        missing = [key for key in keys if key not in other] if is_mapping else []
        if missing:
            return (
                f"{path} has the key {missing[0]!r:.80} in the first sample of the batch and not in sample "
                f"{number} of the batch: return the same keys for all samples"
            )
        if not is_mapping and len(other) != len(first):
            return (
                f"{path} has {len(first)} elements in the first sample of the batch and {len(other)} in "
                f"sample {number} of the batch: pad all samples to one length"
            )
    parts = ((f"{path}[{key!r}]", [value[key] for value in values]) for key in keys)
    return next((cause for place, part in parts if (cause := _cause(part, place)) is not None), None)


def _unsupported(value: Any, path: str) -> str:
    kind = type(value)
    if value is None:
        text, cure = "None", "return a value"
    elif isinstance(value, np.ndarray):
        text, cure = outline(value), "return arrays of numbers"
    else:
        text, cure = f"of type {kind.__module__}.{kind.__qualname__}", advice(value, _BATCHED)
    return (
        f"{path} is {text}, which default_collate cannot batch: {cure}. Change it in the dataset, or in "
        "its transform"
    )


def _has_users_rule(value: Any) -> bool:
    """Whether the user has added a rule for such values to torch's table."""
    rules = torch_collate.default_collate_fn_map
    return any(isinstance(value, kind) for kind in rules if kind not in _TORCHS_RULES)


def _has_objects(value: Any) -> bool:
    """Whether an array holds no numbers."""
    return isinstance(value, np.ndarray) and value.dtype.kind not in "biufc"


def _fits(first: Any, other: Any) -> bool:
    """Whether default_collate takes ``other`` in a batch that begins with ``first``."""
    if isinstance(first, torch.Tensor):
        return isinstance(other, torch.Tensor)
    return isinstance(other, (np.ndarray, torch.Tensor, *_NUMBERS)) and not _has_objects(other)


def _shape(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, torch.Tensor) and value.is_nested:
        return None
    return tuple(value.shape) if isinstance(value, (np.ndarray, torch.Tensor)) else ()
