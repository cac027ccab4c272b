"""torchvision.io: its decoders of JPEG, PNG, GIF and WebP, by the content of their input.

They are met in the operators that all functions of `torchvision.io` call (`read_image`, `decode_image`, ...),
so names that were imported before are met, too, and stay the same objects. Reading a file to memory is real.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fastload.readers.decode_cache import current
from fastload.readers.identity import Identity, Unknown, identify_content
from fastload.readers.patch import Patch
from fastload.readers.results import memory_of

if TYPE_CHECKING:
    from collections.abc import Callable

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
        key, decode_ = (tuple(data.shape), *options), partial(original, *args)
        return cache.array(kind, partial(_identify, data), key, decode_, where="a tensor", source=None)

    return decode


def _identify(data: torch.Tensor) -> Identity | Unknown:
    is_plain = data.device.type == "cpu" and data.dtype == torch.uint8 and data.layout == torch.strided
    return identify_content(memory_of(data)) if is_plain and data.is_contiguous() else Unknown.NOT_A_FILE
