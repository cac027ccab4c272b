"""Decodes a region of a JPEG, without the pixels around it.

nvImageCodec (the extra ``regions``) decodes it, on the CPU with libjpeg-turbo, as Pillow does. Rules:

1. A region has exactly the pixels of Pillow's full decode, for all intact files that `decode_region` accepts
   (benchmarks/NOTES.md: 0 differences in 15,000 crops of 20 kinds of JPEGs). For corrupt data, both decoders
   make up pixels, which can differ.
2. A file that nvImageCodec rejects, and a truncated file, is left to Pillow, so both decoders raise the same
   errors.
3. Each thread of each process has its own decoder, because a decoder serves one thread at a time.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.images.jpeg import is_whole
from fastload.system.logs import log

if TYPE_CHECKING:
    import numpy.typing as npt

    from fastload.images.geometry import Box

# At the first and the last column, libjpeg-turbo upsamples the colors of a region of one column without
# interpolation, so they differ by up to 16 levels. Wider regions were equal; 4 leaves a margin.
_MIN_WIDTH = 4


class _Decoders(threading.local):
    """The decoder of this thread."""

    decoder: Any = None
    pid = 0


_decoders = _Decoders()


def name_of_decoder() -> str | None:
    """The library that decodes regions, with its version; None if no such library is installed."""
    codec = _codec()
    return None if codec is None else f"nvImageCodec {codec.__version__}"


def decode_region(data: bytes | memoryview, box: Box) -> npt.NDArray[np.uint8] | None:
    """A region of a JPEG with 8-bit RGB or gray values, as `(height, width, 3) uint8` RGB.

    Args:
        data: The content of the file.
        box: `(x_min, y_min, x_max, y_max)` in the stored image, before its EXIF orientation.

    Returns:
        A new array that the caller owns; None if nvImageCodec is not installed, or rejects the file: the
        whole file has to be decoded.
    """
    codec = _codec()
    x_min, y_min, x_max, y_max = box
    if codec is None or x_max - x_min < _MIN_WIDTH or not is_whole(data):
        return None
    if _decoders.pid != os.getpid():
        _decoders.decoder = codec.Decoder(
            device_id=codec.NVIMGCODEC_DEVICE_CPU_ONLY,
            backends=[codec.Backend(codec.CPU_ONLY)],
            max_num_cpu_threads=1,
        )
        _decoders.pid = os.getpid()
    try:
        stream = codec.CodeStream(np.frombuffer(data, np.uint8))
        part = stream.get_sub_code_stream(region=codec.Region(y_min, x_min, y_max, x_max))
        image = _decoders.decoder.decode(part, params=_parameters())
    except (RuntimeError, ValueError):  # its own errors; Pillow raises ours
        return None
    if image is None:
        return None
    pixels = np.asarray(image)
    return pixels if pixels.shape == (y_max - y_min, x_max - x_min, 3) else None


@functools.cache
def _codec() -> Any:
    """The module nvidia.nvimgcodec, or None."""
    try:
        return importlib.import_module("nvidia.nvimgcodec")
    except ImportError as error:
        log.debug("regions of JPEGs cannot be decoded: %s", error)
        return None


@functools.cache
def _parameters() -> Any:
    codec = _codec()
    return codec.DecodeParams(apply_exif_orientation=False, color_spec=codec.ColorSpec.SRGB)
