"""The size of a batch, where it can be known without walking through it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_MAX_VALUES = 8  # of a container that is examined; a tensor takes 0.1 us
_MAX_DEPTH = 3
_WITHOUT = frozenset({str, bytes, int, float, bool, type(None)})  # neither tensors nor arrays are inside


def nbytes_of(batch: Any, depth: int = _MAX_DEPTH) -> int | None:
    """The bytes of the tensors and arrays in a batch; None if they cannot be known in a microsecond or two.

    They are known for a dense tensor, an array, and for tuples, lists and dicts of up to eight of them,
    nested or not. A longer list counts nothing if its first value is a string or a number.
    """
    kind = type(batch)
    if kind is np.ndarray or (kind is torch.Tensor and batch.layout is torch.strided):
        nbytes: int = batch.nbytes
        return nbytes
    if kind in _WITHOUT or (
        kind in (tuple, list) and len(batch) > _MAX_VALUES and type(batch[0]) in _WITHOUT
    ):
        return 0
    if kind not in (tuple, list, dict) or len(batch) > _MAX_VALUES or not depth:
        return None
    total = 0
    for value in batch.values() if kind is dict else batch:
        part = nbytes_of(value, depth - 1)
        if part is None:
            return None
        total += part
    return total
