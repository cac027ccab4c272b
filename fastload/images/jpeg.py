"""OpenCV in Pillow's place, for JPEGs of which both make the same pixels.

Rules:

1. OpenCV decodes if its pixels equal Pillow's: each process compares them once, on a small picture of each
   kind. So it does not matter how the libjpeg of either was built.
2. Only ordinary files are decoded here: a baseline, extended or progressive frame, gray or colors of a common
   sampling, and nothing but restart markers before the end marker. OpenCV gets no other file, because it does
   not raise all of Pillow's errors: it does not look after the last pixel, and old releases fill gaps with
   gray.
3. Whatever is rejected here is left to Pillow, which decodes it or raises.
"""

from __future__ import annotations

import functools
import io
import struct
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from PIL.JpegImagePlugin import JpegImageFile

from fastload.system.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt
    from PIL import Image

    Pixels = npt.NDArray[np.uint8]

_END = b"\xff\xd9"
_TAIL_BYTES = 64  # some cameras pad files with zeros
# A frame's segment: kind, length, bits a value, height, width, number of components (ITU-T T.81, annex B).
_FRAME = struct.Struct(">HBHHB")
_PROGRESSIVE = b"\xff\xc2"
_FRAME_KINDS = (b"\xff\xc0", b"\xff\xc1", _PROGRESSIVE)
# Horizontal and vertical factor of the first of three components: 4:4:4, 4:2:2, 4:2:0, 4:1:1, 4:4:0.
_SAMPLINGS = ((1, 1), (2, 1), (2, 2), (4, 1), (1, 2))
_PROBE_SIDES = (67, 83)


def is_whole(content: bytes | memoryview) -> bool:
    """Whether a file has an end marker; a file without one is truncated."""
    return bytes(content[-_TAIL_BYTES:]).rstrip(b"\0").endswith(_END)


def opencv_pixels(image: Image.Image) -> Pixels | None:
    """The stored picture of an ordinary JPEG as `(height, width, 3) uint8` RGB, before its EXIF orientation.

    Args:
        image: As `Image.open` returns it, which reads the header up to the compressed data.

    Returns:
        A new array that the caller owns; None if Pillow has to decode this file.
    """
    if type(image) is not JpegImageFile or image.fp is None or (decode := _decoder()) is None:
        return None
    factors = [(across, down) for _, across, down, _ in image.layer]
    if len(factors) != 1 and (
        len(factors) != 3 or factors[0] not in _SAMPLINGS or {*factors[1:]} != {(1, 1)}
    ):
        return None
    scan_at = image.fp.tell()
    image.fp.seek(0)
    content = image.fp.read()
    frame = _FRAME.pack(8 + 3 * len(factors), 8, image.height, image.width, len(factors))
    frame_at = content.find(frame, 0, scan_at)
    kind = content[frame_at - 2 : frame_at]
    if kind not in _FRAME_KINDS or not _is_intact(content, scan_at, is_progressive=kind == _PROGRESSIVE):
        return None
    pixels = decode(content)
    return pixels if pixels is not None and pixels.shape == (image.height, image.width, 3) else None


def _is_intact(content: bytes, scan_at: int, *, is_progressive: bool) -> bool:
    """Whether Pillow would find nothing wrong behind the header."""
    if is_progressive:  # both libraries read all scans before the first pixel
        return is_whole(content)
    scan = np.frombuffer(content, np.uint8)[scan_at:]
    is_marker = scan[:-1] == 0xFF
    is_marker &= scan[1:] != 0  # a 0 after 0xFF: not a marker
    kinds = scan[1:][is_marker]
    return bool(kinds.size and kinds[(kinds & 0xF8 != 0xD0).argmax()] == _END[1])  # 0xD0 to 0xD7: restarts


@functools.cache
def _decoder() -> Callable[[bytes], Pixels | None] | None:
    """OpenCV's decoder; None without OpenCV, or if its pixels are not those of Pillow."""
    try:
        import cv2

        flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    except (ImportError, AttributeError) as error:  # AttributeError: a release before 4.11, or a broken one
        log.debug("Pillow decodes JPEGs, because OpenCV cannot: %s", str(error))
        return None

    def decode(content: bytes) -> Pixels | None:
        try:
            return cast("Pixels | None", cv2.imdecode(np.frombuffer(content, np.uint8), flags))
        except cv2.error:
            return None

    for content in _probe_images(cv2):
        # Unlike Image.open, the class does not compare the size with the user's limit, MAX_IMAGE_PIXELS.
        pixels, expected = decode(content), JpegImageFile(io.BytesIO(content)).convert("RGB")
        if pixels is None or not np.array_equal(pixels, np.asarray(expected)):
            log.debug("Pillow decodes JPEGs, because OpenCV %s decodes different pixels", cv2.__version__)
            return None
    return decode


def _probe_images(cv2: Any) -> Iterator[bytes]:
    """A small JPEG of each kind: every sampling and gray, sequential and progressive."""
    noise = np.random.default_rng(0).integers(0, 256, (*_PROBE_SIDES, 3), np.uint8)
    pictures = [(noise, across << 20 | down << 16 | 0x1111) for across, down in _SAMPLINGS]
    for picture, sampling in [*pictures, (noise[..., 0], 0x111111)]:
        for is_progressive in (0, 1):
            options = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling]
            options += [cv2.IMWRITE_JPEG_PROGRESSIVE, is_progressive]
            yield cv2.imencode(".jpg", picture, options)[1].tobytes()
