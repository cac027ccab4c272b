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

_BATCHED = "return arrays, tensors, numbers, str or bytes in dicts, lists and tuples"


def explain(samples: Any, error: Exception) -> None:
    """Add a note to an error of default_collate, if the samples show its cause.

    Args:
        samples: Of a batch; or any other object that a dataset returns for one.
        error: The error.
    """
    if isinstance(samples, (list, tuple)) and samples and not isinstance(error, MemoryError):
        with contextlib.suppress(Exception):  # containers of the user's classes can raise anything
            cause = _cause(samples, "sample")
            if cause is not None:
                add_note(
                    error,
                    f"fastload: {cause}. Change it in the dataset or its transform, or give the loader a "
                    "collate_fn.",
                )


def is_of_torch(error: Exception) -> bool:
    """Whether an error was raised in default_collate."""
    step = error.__traceback__
    while step is not None and step.tb_frame.f_globals is not vars(torch_collate):
        step = step.tb_next
    return step is not None


def _cause(values: Sequence[Any], path: str) -> str | None:
    """Why default_collate fails for the values at one place of the samples; None if they show no reason."""
    first = values[0]
    kind, form = _form_of(first)
    if kind is None:
        cure = _BATCHED if isinstance(first, np.ndarray) else suggestion(first, _BATCHED)
        return f"{path} is {structure_of(first)}, which default_collate cannot batch: {cure}"
    for number, other in enumerate(values):
        if _form_of(other) != (kind, form):
            return (
                f"{path} is {structure_of(first)} in the first sample of the batch and {structure_of(other)} "
                f"in sample {number} of the batch: return one type, shape, length and set of keys for all "
                "samples; pad, resize or crop what differs"
            )
    keys = list(first) if kind is Mapping else range(len(first)) if kind is Sequence else ()
    parts = ((f"{path}[{key!r}]", [value[key] for value in values]) for key in keys)
    return next((cause for place, part in parts if (cause := _cause(part, place)) is not None), None)


def _form_of(value: Any) -> tuple[Any, Any]:
    """What values at one place must have in common for default_collate; None, None: it takes none such."""
    if isinstance(value, Mapping):
        return Mapping, set(value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return Sequence, len(value)
    if isinstance(value, np.ndarray) and value.dtype.kind not in "biufc":
        return None, None
    for kind in (torch.Tensor, np.ndarray):
        if isinstance(value, kind):
            return kind, tuple(value.shape)
    # The user can have added rules for more types.
    return (object, None) if isinstance(value, tuple(torch_collate.default_collate_fn_map)) else (None, None)
