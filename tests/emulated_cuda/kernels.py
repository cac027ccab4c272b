"""The values of torch's operators on a CUDA device whose kernels do nothing.

Under `EmulatedKernels` each operator first runs as torch runs it: it checks its arguments, allocates its
results, and launches a kernel. Then a host function on the current stream computes the same on the CPU, over
the same memory. So values appear when the stream comes to them, neither earlier nor later.

The mode is the thread's that enters it, and autograd's threads take it over.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable

# Results are views, new memory without values, or what a copy by the runtime brings.
_AS_THEY_ARE = {"_local_scalar_dense", "_pin_memory", "empty", "empty_like", "empty_strided", "is_pinned"}
_AS_THEY_ARE |= {"new_empty", "new_empty_strided", "record_stream", "resize_", "set_"}
_COPIES = {"_to_copy", "clone", "copy_"}
# By libraries that look for a device themselves.
_BY_LIBRARIES = {"addmm", "bmm", "convolution", "convolution_backward", "mm"}


class EmulatedKernels(TorchDispatchMode):
    """See the module."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        can_decompose = func._can_decompose()
        if name in _AS_THEY_ARE or (func.is_view and not can_decompose):
            return func(*args, **kwargs)
        sources = [leaf for leaf in tree_leaves((args, kwargs)) if _is_there(leaf)]
        device = kwargs.get("device")
        if not sources and (device is None or torch.device(device).type != "cuda"):
            return func(*args, **kwargs)
        if can_decompose:  # only in inference mode; autograd has done it otherwise
            with self:
                return func.decompose(*args, **kwargs)
        if name in _COPIES:
            return _copy(func(*args, **kwargs), args[1] if name == "copy_" else args[0])
        here_args, here_kwargs = tree_map(_here, (args, kwargs))
        if "device" in here_kwargs:
            here_kwargs["device"] = torch.device("cpu")
        if name == "equal" or torch.Tag.dynamic_output_shape in func.tags:
            torch.cuda.current_stream().synchronize()
            result = func(*here_args, **here_kwargs)
            return tree_map(lambda leaf: leaf.cuda() if isinstance(leaf, torch.Tensor) else leaf, result)
        result = _without_values(func, args, kwargs) if name in _BY_LIBRARIES else func(*args, **kwargs)
        made = [_here(leaf) for leaf in tree_leaves(result) if _is_there(leaf)]

        def compute() -> None:
            found = func(*here_args, **here_kwargs)
            values = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
            for target, value in zip(made, values, strict=True):
                # What a batch norm saves in evaluation has no elements on the CPU.
                if target.data_ptr() != value.data_ptr() and target.shape == value.shape:
                    target.copy_(value)

        on_current_stream((sources or tree_leaves(result))[0].device, compute)
        return result


def _copy(result: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """What a copy left to a kernel; one block in one layout and type is the runtime's."""
    if result.dtype == source.dtype and result.stride() == source.stride() and _is_dense(source):
        return result
    if not result.is_cuda:
        torch.cuda.current_stream(source.device).synchronize()
        result.copy_(_here(source))
        return result
    target, content = _here(result), _here(source) if source.is_cuda else source.clone()
    on_current_stream(result.device, lambda: target.copy_(content))
    return result


def _is_there(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_cuda and leaf.layout is torch.strided


def _here(leaf: Any) -> Any:
    """A CPU tensor over the memory of a CUDA tensor; anything else as it is, but for devices."""
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    if not _is_there(leaf):
        return leaf
    with torch.inference_mode(False):
        if not leaf.numel():
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
        storage = leaf.untyped_storage()
        memory = (ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr())
        flat = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=leaf.dtype).set_(flat, leaf.storage_offset(), leaf.shape, leaf.stride())


def _without_values(func: Any, args: Any, kwargs: Any) -> Any:
    """New tensors as ``func`` would give them."""
    device = next(leaf for leaf in tree_leaves((args, kwargs)) if _is_there(leaf)).device

    def like(leaf: Any, device: str | torch.device) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)

    meta_args, meta_kwargs = tree_map(lambda leaf: like(leaf, "meta"), (args, kwargs))
    return tree_map(lambda leaf: like(leaf, device), func(*meta_args, **meta_kwargs))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one block of memory in any order of dimensions: a copy then keeps strides."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


# --- host functions ---------------------------------------------------------------------------------------

_waiting: dict[int, Callable[[], object]] = {}
_numbers = itertools.count(1)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _call(number: int) -> None:
    try:
        with torch.no_grad():
            _waiting.pop(number)()
    except BaseException:  # noqa: BLE001  # nobody above could hear of it
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(99)


def on_current_stream(device: torch.device, function: Callable[[], object]) -> None:
    """Let the current stream of ``device`` call ``function`` when it comes to it."""
    number = next(_numbers)
    _waiting[number] = function
    with torch.cuda.device(device):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        code = ctypes.CDLL(None).cudaLaunchHostFunc(stream, _call, ctypes.c_void_p(number))
    if code:
        raise RuntimeError(f"cudaLaunchHostFunc gave error {code}")
