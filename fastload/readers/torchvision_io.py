"""torchvision.io: its decoders of JPEG, PNG, GIF and WebP, by the content of their input.

They are met in the operators that all functions of `torchvision.io` call (`read_image`, `decode_image`, ...),
so names that were imported before are met, too, and stay the same objects. Reading a file to memory is real.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from fastload.readers.decode_cache import remembering
from fastload.readers.identity import Identity, identify_content
from fastload.readers.patches import Patch
from fastload.readers.reasons import NOT_A_FILE
from fastload.readers.results import memory_of

_DECODERS = ("decode_image", "decode_jpeg", "decode_png", "decode_gif", "decode_webp")


def patches() -> list[Patch]:
    """What is replaced in torchvision: operators that were loaded."""
    versions = f"{sys.modules['torchvision'].__version__} {torch.__version__}"
    return [
        Patch(
            getattr(torch.ops.image, name), "_op", remembering(f"torchvision.io.{name} {versions}", _decode)
        )
        for name in _DECODERS
        if hasattr(torch.ops.image, name)
    ]


def _decode(*args: Any, **kwargs: Any) -> Any:
    if kwargs or not args or type(args[0]) is not torch.Tensor:
        return None
    data, *options = args
    return partial(_identify, data), (tuple(data.shape), *options), None


def _identify(data: torch.Tensor) -> Identity | str:
    is_plain = data.device.type == "cpu" and data.dtype == torch.uint8 and data.layout == torch.strided
    return identify_content(memory_of(data)) if is_plain and data.is_contiguous() else NOT_A_FILE
