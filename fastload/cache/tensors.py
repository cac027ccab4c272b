"""Tensors over arrays: the memory of one as that of the other, without a copy.

Called by `leaves` and `columns` where they meet a tensor, in any process, and imported there only: this file
brings torch, without which caches can be listed, described and verified.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

from fastload.cache.dtypes import TENSOR_STORAGE
from fastload.errors import UnsupportedSampleError

Array = npt.NDArray[Any]

# Those that this release of torch has: each release adds some.
TENSOR_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in TENSOR_STORAGE if hasattr(torch, name)
}
_NAMES = {dtype: name for name, dtype in TENSOR_DTYPES.items()}

# A torch dtype that NumPy lacks, and the dtype of the same width that it is stored as.
_REINTERPRETED: dict[torch.dtype, torch.dtype] = {
    dtype: getattr(torch, TENSOR_STORAGE[name].name)
    for name, dtype in TENSOR_DTYPES.items()
    if TENSOR_STORAGE[name].name != name
}


def tensor_array(tensor: torch.Tensor) -> Array:
    """The memory of a contiguous tensor as an array of its storage dtype, without a copy."""
    reinterpreted = _REINTERPRETED.get(tensor.dtype)
    array: Array = (tensor if reinterpreted is None else tensor.view(reinterpreted)).numpy()
    return array


def array_tensor(array: Array, name: str) -> torch.Tensor:
    """A tensor of torch dtype `name` over the memory of a writable array, without a copy.

    Raises:
        ValueError: This release of torch has no such dtype.
    """
    dtype = TENSOR_DTYPES.get(name)
    if dtype is None:
        raise ValueError(f"torch {torch.__version__} has no dtype {name}")
    tensor = torch.from_numpy(array)
    return tensor.view(dtype) if dtype in _REINTERPRETED else tensor


def describe_tensor(tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """The name of a tensor's dtype, and the tensor in its plain form: C-contiguous, conjugated and negated.

    Raises:
        UnsupportedSampleError: Such a tensor is not cached. The caller adds the path.
    """
    if tensor.device.type != "cpu":
        raise UnsupportedSampleError(f"a tensor on {tensor.device} is not cached: return tensor.cpu()")
    if tensor.layout is not torch.strided:
        raise UnsupportedSampleError(f"a {tensor.layout} tensor is not cached: return tensor.to_dense()")
    if tensor.requires_grad:
        raise UnsupportedSampleError("a tensor that requires grad is not cached: return tensor.detach()")
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise UnsupportedSampleError(f"a tensor of {tensor.dtype} is not cached: return a plain dtype")
    return name, tensor.resolve_conj().resolve_neg().contiguous()
