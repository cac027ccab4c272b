"""Let torch's default_collate stack tensors directly into the slot, wherever user code calls it.

Installed in worker processes, where torch itself stacks into shared memory. Rule: only code whose result is
the batch stacks into the slot. Samples never lie in the slot, because it can be reused while a sample is
still in use.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import default_collate

from fastload.batch.packing import is_plain
from fastload.memory.lease import current_allocator
from fastload.nested.tensors import as_stacked
from fastload.system.torch_private import torch_collate

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.memory.lease import BumpAllocator

_TENSOR_RULE = torch_collate.default_collate_fn_map[torch.Tensor]
ARRAY_RULE = torch_collate.default_collate_fn_map[np.ndarray]
# torch documents that users can change its map in place; default_collate then follows the user's rules.
default_rules = dict(torch_collate.default_collate_fn_map)


def is_torch_default(collate_fn: Callable[..., Any]) -> bool:
    """Whether ``collate_fn`` is default_collate with torch's own rules, so rows can be written.

    Call this for each batch: a module that a dataset imports with its first sample can add a rule.
    """
    return collate_fn is default_collate and torch_collate.default_collate_fn_map == default_rules


def install_slot_rules() -> None:
    """Let default_collate stack tensors and arrays into a slot within an `allocating_in` block.

    Call this only in worker processes: it changes torch's table of rules, unless the user has changed it.
    """
    rules = torch_collate.default_collate_fn_map
    replacements = {torch.Tensor: (_TENSOR_RULE, _slot_rule), np.ndarray: (ARRAY_RULE, _array_slot_rule)}
    for kind, (torch_rule, slot_rule) in replacements.items():
        if rules[kind] is torch_rule:
            rules[kind] = default_rules[kind] = slot_rule


def rows_for(allocator: BumpAllocator, tensors: Any) -> torch.Tensor:
    """Memory for a stack of tensors like the first, `(len(tensors), *shape)`.

    Raises:
        SharedMemoryError: The memory could not be allocated; torch's own rule would need the same amount.
    """
    first = tensors[0]
    memory = torch.from_numpy(allocator.allocate(first.numel() * first.itemsize * len(tensors)))
    return memory.view(first.dtype).view(len(tensors), *first.shape)


def _slot_rule(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """Torch's rule for tensors in a worker, with the slot instead of new shared memory."""
    allocator = current_allocator()
    if allocator is not None and batch[0].numel() and is_plain(as_stacked(batch[0])):
        rows = rows_for(allocator, batch)
        with contextlib.suppress(Exception):  # torch's own rule below raises the error
            return torch.stack(tuple(batch), 0, out=rows)
    return _TENSOR_RULE(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]


def stacked_arrays(allocator: BumpAllocator, arrays: Any) -> torch.Tensor | None:
    """Small arrays, `(len(arrays), *shape)`, in the allocator's memory; None if torch's rule must stack them.

    NumPy copies all of them in one call, in a third of the time of a loop over rows or of torch's rule.
    """
    shape, dtype = arrays[0].shape, arrays[0].dtype
    if not shape or not arrays[0].nbytes or not torch_takes(dtype):
        return None
    for array in arrays:
        if type(array) is not np.ndarray or array.shape != shape or not array.flags.c_contiguous:
            return None
        if array.dtype is not dtype and array.dtype != dtype:
            return None
    rows = allocator.array((len(arrays) * shape[0], *shape[1:]), dtype)
    np.concatenate(arrays, out=rows)
    return torch.from_numpy(rows).view(len(arrays), *shape)


def _array_slot_rule(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """Torch's rule for arrays in a worker, with the slot instead of new shared memory."""
    allocator = current_allocator()
    stacked = None if allocator is None else stacked_arrays(allocator, batch)
    if stacked is None:
        return ARRAY_RULE(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]
    return stacked


@functools.lru_cache(maxsize=64)
def torch_takes(dtype: np.dtype[Any]) -> bool:
    """Whether torch has tensors of this dtype and byte order; otherwise its own error says so."""
    try:
        torch.from_numpy(np.empty(0, dtype))
    except (TypeError, ValueError):
        return False
    return True
