"""Notes on errors of torch's default_collate: which field of the samples is the cause, and what to change.

They compare the samples, and collate nothing again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fastload.nested.leaves import suggestion
from fastload.nested.tree import structure_of
from fastload.system.notes import add_note
from fastload.system.torch_private import torch_collate

_NUMBERS = (int, float, np.number, np.bool_)
_TORCHS_RULES = tuple(torch_collate.default_collate_fn_map)
_ONE_TYPE = "return values of one type and one length, and the same keys, for all samples"
_ONE_SHAPE = "pad, resize or crop all samples to one shape, in the dataset or its transform"
_BATCHED = "return arrays, tensors, numbers, str or bytes in dicts, lists and tuples"


def explain(samples: Any, error: Exception) -> None:
    """Add a note to an error of default_collate, if the samples show its cause.

    Args:
        samples: Of a batch; or any other object that a dataset returns for one.
        error: The error.
    """
    if isinstance(samples, (list, tuple)) and samples and not isinstance(error, MemoryError):
        with contextlib.suppress(Exception):  # containers of the user's classes can raise anything
            cause = _cause(samples, "$")
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
    is_container = isinstance(first, (Mapping, Sequence))
    if not is_container and not _is_numeric(first):
        kind = type(first)
        text = structure_of(first) if kind is np.ndarray else f"of type {kind.__module__}.{kind.__qualname__}"
        cure = "return arrays of numbers" if kind is np.ndarray else suggestion(first, _BATCHED)
        return (
            f"{path} is {text}, which default_collate cannot batch: {cure}. Change it in the dataset, or in "
            "its transform"
        )
    for number, other in enumerate(values):
        if not _fits(first, other):
            is_shape = _is_array(first) and _is_array(other) and tuple(first.shape) != tuple(other.shape)
            return (
                f"{path} is {structure_of(first)} in the first sample of the batch and {structure_of(other)} "
                f"in sample {number} of the batch: {_ONE_SHAPE if is_shape else _ONE_TYPE}"
            )
    if not is_container:
        return None
    keys = list(first) if isinstance(first, Mapping) else range(len(first))
    parts = ((f"{path}[{key!r}]", [value[key] for value in values]) for key in keys)
    return next((cause for place, part in parts if (cause := _cause(part, place)) is not None), None)


def _fits(first: Any, other: Any) -> bool:
    """Whether default_collate takes ``other`` in a batch that begins with ``first``."""
    if isinstance(first, Mapping):
        return isinstance(other, Mapping) and all(key in other for key in first)
    if isinstance(first, Sequence):
        return isinstance(other, Sequence) and len(other) == len(first)
    if isinstance(first, torch.Tensor) and not isinstance(other, torch.Tensor):
        return False
    are_arrays = _is_array(first) and _is_array(other)
    return _is_numeric(other) and (not are_arrays or tuple(first.shape) == tuple(other.shape))


def _is_numeric(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufc"
    return isinstance(value, (torch.Tensor, *_NUMBERS))


def _is_array(value: Any) -> bool:
    """Whether a value has a shape."""
    return isinstance(value, np.ndarray) or (isinstance(value, torch.Tensor) and not value.is_nested)


def _has_users_rule(value: Any) -> bool:
    """Whether the user has added a rule for such values to torch's table."""
    rules = torch_collate.default_collate_fn_map
    return any(isinstance(value, kind) for kind in rules if kind not in _TORCHS_RULES)
