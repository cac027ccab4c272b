"""Makes tensors over the memory of arrays and arrays over the memory of tensors, without a copy."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from fastload.errors import UnsupportedSampleError
from fastload.nested.leaf import NUMBER_DTYPES, TENSOR_STORAGE, Array, Leaf, numpy_dtype
from fastload.system.torch_private import plain_tensor

# The dtypes that this release of torch has; newer releases add some.
TENSOR_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in TENSOR_STORAGE if hasattr(torch, name)
}
_NAMES = {dtype: name for name, dtype in TENSOR_DTYPES.items()}


@lru_cache(maxsize=64)
def _carrier(dtype: torch.dtype) -> torch.dtype:
    """The dtype itself, or the integers of the same width that carry it if NumPy lacks it."""
    try:
        torch.empty(0, dtype=dtype).numpy()
    except TypeError:
        return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return dtype


def tensor_array(tensor: torch.Tensor) -> Array:
    """The memory of a tensor as an array, without a copy; integers if NumPy lacks its dtype."""
    carrier = _carrier(tensor.dtype)
    array: Array = (tensor if carrier is tensor.dtype else tensor.view(carrier)).numpy()
    return array


def tensor_over(array: Array, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `tensor_array`: a tensor over the memory of a writable array, without a copy."""
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype is dtype else tensor.view(dtype)


def as_stacked(value: Any) -> Any:
    """The plain tensor as which torch stacks a tv_tensor of torchvision; any other value itself."""
    kind = type(value)
    if kind is torch.Tensor or not kind.__module__.startswith("torchvision.tv_tensors."):
        return value
    helpers = sys.modules.get("torchvision.tv_tensors._torch_function_helpers")
    keeps_class = getattr(helpers, "_must_return_subclass", lambda: True)()  # see `set_return_type`
    return value if keeps_class else plain_tensor(value)


def array_tensor(array: Array, name: str) -> torch.Tensor:
    """A tensor of torch dtype `name` over the memory of a writable array, without a copy.

    Raises:
        ValueError: This release of torch has no such dtype.
    """
    try:
        dtype = TENSOR_DTYPES[name]
    except KeyError:
        raise ValueError(f"torch {torch.__version__} has no dtype {name}") from None
    return tensor_over(array, dtype)


def describe_tensor(tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """The name of a tensor's dtype, and the tensor C-contiguous, with its conjugation and negation done.

    Raises:
        UnsupportedSampleError: Such a tensor cannot be cached. The caller adds the path.
    """
    if tensor.is_nested:
        raise UnsupportedSampleError("a nested tensor cannot be cached: return list(tensor.unbind())")
    name = _NAMES.get(tensor.dtype)
    is_dense = tensor.device.type == "cpu" and tensor.layout is torch.strided
    if name is None or not is_dense or tensor.requires_grad:
        raise UnsupportedSampleError(
            f"a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}, with "
            f"requires_grad={tensor.requires_grad} cannot be cached: return tensor.detach().cpu(), "
            "tensor.to_dense(), or a different dtype"
        )
    return name, tensor.resolve_conj().resolve_neg().contiguous()


def batch_tensor(leaf: Leaf, out: Array) -> torch.Tensor:
    """The tensor that default_collate would make of a leaf's rows, as a view of the memory of `out`."""
    if leaf.kind == "tensor":
        return array_tensor(out, leaf.dtype)
    tensor = torch.from_numpy(out)
    if leaf.kind == "scalar":
        # default_collate calls as_tensor on the list of scalars, and torch chooses the dtype.
        tensor = tensor.to(torch.as_tensor([out.dtype.type(0)]).dtype)
    return tensor


@lru_cache(maxsize=256)
def collates(leaf: Leaf) -> bool:
    """Whether default_collate makes a tensor or list of such leaves; if not, it raises the error itself."""
    if leaf.kind == "tensor":
        return leaf.dtype in TENSOR_DTYPES
    if leaf.kind in ("array", "scalar"):
        dtype = numpy_dtype(leaf.dtype)
        try:
            torch.from_numpy(np.empty(0, dtype))
            if leaf.kind == "scalar":
                torch.as_tensor([dtype.type(0)])
        except (TypeError, ValueError, RuntimeError):
            return False
        return True
    # NumPy's bytes are no bytes for it. A kind that it does not know, it refuses.
    return leaf.kind in (*NUMBER_DTYPES, "str", "bytes", "str_")
