"""torchvision.io: its decoders of JPEG, PNG, GIF and WebP, by the content of their input.

They are met in the operators that all functions of `torchvision.io` call (`read_image`, `decode_image`, ...),
so names that were imported before are met, too, and stay the same objects. Reading a file to memory is real.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.readers.decode_cache import current
from fastload.readers.identity import Identity, Unknown, identify_content
from fastload.readers.patch import Patch

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

_DECODERS = ("decode_image", "decode_jpeg", "decode_png", "decode_gif", "decode_webp")


def patches() -> list[Patch]:
    """What is replaced in torchvision: operators that were loaded."""
    operators = torch.ops.image
    names = [name for name in _DECODERS if hasattr(operators, name)]
    return [Patch(getattr(operators, name), "_op", partial(_decoder, name)) for name in names]


def _decoder(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    kind = f"torchvision.io.{name} {sys.modules['torchvision'].__version__} {torch.__version__}"

    def decode(*args: Any, **kwargs: Any) -> Any:
        cache = current()
        if cache is None or kwargs or not args or type(args[0]) is not torch.Tensor:
            return original(*args, **kwargs)
        data, *options = args
        return cache.array(
            *(kind, partial(_identify, data), (tuple(data.shape), *options), partial(original, *args)),
            where="a tensor",
            source=None,
            pack=_pack,
            unpack=_unpack,
        )

    return decode


def _identify(data: torch.Tensor) -> Identity | Unknown:
    is_plain = data.device.type == "cpu" and data.dtype == torch.uint8 and data.layout == torch.strided
    return identify_content(memory_of(data)) if is_plain and data.is_contiguous() else Unknown.NOT_A_FILE


def _pack(tensor: Any) -> tuple[npt.NDArray[Any], Any] | None:
    """The memory of a tensor as it lies, and how to see it: decoders return (C, H, W) of (H, W, C)."""
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return None
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes or tensor.untyped_storage().nbytes() != nbytes or tensor.requires_grad:
        return None
    return memory_of(tensor), (str(tensor.dtype), tuple(tensor.shape), tensor.stride())


def _unpack(memory: npt.NDArray[Any], note: Any) -> torch.Tensor:
    dtype, shape, stride = note
    tensor = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype.split(".")[1]), device="cpu")
    np.copyto(memory_of(tensor), memory)
    return tensor


class _Memory:
    """The bytes of a tensor; its own `numpy()` would keep it from being resized later."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        nbytes = tensor.numel() * tensor.element_size()
        data = tensor.data_ptr(), False
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": data}


def memory_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The bytes of a tensor without gaps, `(n,) uint8`, without a copy; it can still be resized later."""
    return np.asarray(_Memory(tensor))
