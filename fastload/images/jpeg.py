"""Ordinary JPEGs: what their segments say, and a decoder that is faster than Pillow's with equal pixels.

Rules:

1. OpenCV decodes if its pixels equal Pillow's: each process compares them once, on a small picture of each
   kind. So it does not matter how the libjpeg of either was built.
2. Only ordinary files are decoded here: 8 bits, gray or colors of a common sampling, and an end marker.
   OpenCV gets no other file, because it does not raise all of Pillow's errors: it does not look after the
   last pixel, and old releases fill gaps with gray.
3. Whatever is rejected here is left to Pillow, which decodes it or raises.
"""

from __future__ import annotations

import functools
import io
import struct
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from PIL import Image

from fastload.system.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    Pixels = npt.NDArray[np.uint8]
    Content = bytes | bytearray | memoryview

START, END = b"\xff\xd8", b"\xff\xd9"
_BLOCK_SIDE = 8  # pixels
_TAIL_BYTES = 64  # some cameras pad files with zeros

# A JPEG is a sequence of segments: 0xFF, kind, length. A frame's segment continues with precision, height,
# width, the number of components, and three bytes per component (ITU-T T.81, annex B).
_MARKER = 0xFF
_FRAME = struct.Struct(">BBHBHHB")
_PROGRESSIVE_KIND = 0xC2
_FRAME_KINDS = (0xC0, 0xC1, _PROGRESSIVE_KIND)  # baseline and extended: one scan
_SCAN_KIND = 0xDA  # the compressed data follow
_TAGS_KIND = 0xE1  # EXIF or XMP
_INDEX_KIND = 0xE2  # of the pictures in a multi-picture file, and the like
_RESTARTS_KIND = 0xDD
_SKIPPED_KINDS = {0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)}  # tables, restart interval, comments, and APPn
MAX_PIXELS = 1 << 26  # below the size at which Pillow warns of a decompression bomb

# Of the three components of a picture: 4:4:4, 4:2:2, 4:2:0, 4:1:1, 4:4:0.
_SAMPLINGS = tuple((factors, 0x11, 0x11) for factors in (0x11, 0x21, 0x22, 0x41, 0x12))
_PROBE_SIDES = (67, 83)


class JpegHeader(NamedTuple):
    """What the segments before the compressed data say.

    Attributes:
        height: Of the stored picture, in pixels.
        width: The same.
        sampling: Horizontal and vertical factor of each component, in four bits each.
        frame_at: Where the frame's segment begins, in bytes.
        tags_at: Where segments begin that Pillow must read: EXIF and XMP can rotate the picture, and a
            damaged index of several pictures is an error.
        is_one_scan: Whether all components are in one scan; otherwise several scans follow.
        restart_interval: How many MCUs (the smallest units of a scan) lie between two restart markers; 0
            without them.
        scan_at: Where the compressed data begin, in bytes.
    """

    height: int
    width: int
    sampling: tuple[int, ...]
    frame_at: int
    tags_at: list[int]
    is_one_scan: bool
    restart_interval: int
    scan_at: int

    @property
    def mcu_sides(self) -> tuple[int, int]:
        """Width and height of an MCU, in pixels; the first component has the highest resolution."""
        if len(self.sampling) == 1:
            return _BLOCK_SIDE, _BLOCK_SIDE
        return _BLOCK_SIDE * (self.sampling[0] >> 4), _BLOCK_SIDE * (self.sampling[0] & 15)

    @property
    def num_mcus(self) -> tuple[int, int]:
        """MCUs per row, and number of rows."""
        width, height = self.mcu_sides
        return -(-self.width // width), -(-self.height // height)


def parse_jpeg(data: Content) -> JpegHeader | None:
    """The header of an ordinary JPEG, in a tenth of the time that Pillow takes; None: Pillow must read it.

    All segments up to the compressed data are read, because EXIF can follow the frame's.
    """
    if data[:2] != START:
        return None
    at = 2
    frame: tuple[int, int, tuple[int, ...], int] | None = None
    tags_at: list[int] = []
    is_progressive = False
    restart_interval = 0
    while at + _FRAME.size <= len(data):
        marker, kind, nbytes, precision, height, width, components = _FRAME.unpack_from(data, at)
        if marker != _MARKER:
            return None
        if kind == _SCAN_KIND:
            if frame is None:
                return None
            is_one_scan = not is_progressive and precision == len(frame[2])  # here: components of the scan
            return JpegHeader(*frame, tags_at, is_one_scan, restart_interval, at + 2 + nbytes)
        if kind in _FRAME_KINDS and frame is None:
            if precision != 8 or components not in (1, 3) or not 0 < height * width < MAX_PIXELS:
                return None
            first = at + _FRAME.size + 1
            sampling = tuple(data[first : first + 3 * components : 3])
            if len(sampling) != components or (components == 3 and sampling not in _SAMPLINGS):
                return None
            frame = height, width, sampling, at
            is_progressive = kind == _PROGRESSIVE_KIND
        elif kind not in _SKIPPED_KINDS:
            return None
        if kind == _TAGS_KIND or (kind == _INDEX_KIND and data[at + 4 : at + 8] == b"MPF\0"):
            tags_at.append(at)
        if kind == _RESTARTS_KIND:
            restart_interval = int.from_bytes(data[at + 4 : at + 6], "big")
        at += 2 + nbytes
    return None


def is_whole(data: Content) -> bool:
    """Whether a file has an end marker; a file without one is truncated."""
    return bytes(data[-_TAIL_BYTES:]).rstrip(b"\0").endswith(END)


def markers(data: Content, header: JpegHeader) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.uint8]]:
    """The offset of each marker in the compressed data, and its kind."""
    scan = np.frombuffer(data, np.uint8)[header.scan_at :]
    begins = scan[:-1] == _MARKER
    begins &= scan[1:] != 0  # a 0 after 0xFF: not a marker
    places = begins.nonzero()[0]
    return places, scan[1:].take(places)


def _is_intact(data: Content, header: JpegHeader) -> bool:
    if not header.is_one_scan:
        return is_whole(data)
    kinds = markers(data, header)[1]
    return bool(kinds.size and kinds[(kinds & 0xF8 != 0xD0).argmax()] == END[1])  # 0xD0 to 0xD7 are restarts


def decode_jpeg(data: Content, header: JpegHeader, *, is_checked: bool = False) -> Pixels | None:
    """The stored picture as `(height, width, 3) uint8` RGB, before its EXIF orientation.

    Args:
        data: The content of the file.
        header: As returned by `parse_jpeg`.
        is_checked: Whether the markers are known to be in order.

    Returns:
        A new array that the caller owns; None if Pillow has to decode this file.
    """
    decode = _decoder()
    pixels = decode(data) if decode is not None and (is_checked or _is_intact(data, header)) else None
    return pixels if pixels is not None and pixels.shape == (header.height, header.width, 3) else None


@functools.cache
def _decoder() -> Callable[[Content], Pixels | None] | None:
    """OpenCV's decoder; None without OpenCV, or if its pixels are not those of Pillow."""
    try:
        import cv2

        flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    except (ImportError, AttributeError) as error:  # AttributeError: a release before 4.11, or a broken one
        log.debug("Pillow decodes JPEGs, because OpenCV cannot: %s", error)
        return None

    def decode(data: Content) -> Pixels | None:
        try:
            return cast("Pixels | None", cv2.imdecode(np.frombuffer(data, np.uint8), flags))
        except cv2.error:
            return None

    for content in _probe_images(cv2):
        pixels, expected = decode(content), Image.open(io.BytesIO(content)).convert("RGB")
        if pixels is None or not np.array_equal(pixels, np.asarray(expected)):
            log.debug("Pillow decodes JPEGs, because OpenCV %s decodes different pixels", cv2.__version__)
            return None
    return decode


def _probe_images(cv2: Any) -> Iterator[bytes]:
    """A small JPEG of each kind: every sampling and gray, sequential and progressive."""
    noise = np.random.default_rng(0).integers(0, 256, (*_PROBE_SIDES, 3), np.uint8)
    pictures = [(noise, sampling) for sampling in _SAMPLINGS]
    for picture, sampling in [*pictures, (noise[..., 0], _SAMPLINGS[0])]:
        for is_progressive in (0, 1):
            options = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, int.from_bytes(sampling, "big")]
            options += [cv2.IMWRITE_JPEG_PROGRESSIVE, is_progressive]
            yield cv2.imencode(".jpg", picture, options)[1].tobytes()
