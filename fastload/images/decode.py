"""Decodes one image file to one C-contiguous ``(H, W, 3) uint8`` RGB array.

The module keeps no state and no open file.

Rules:
1. The pixels are Pillow's, whatever else is installed. It opens every file. Whole JPEGs are decoded by
   `fastload.images.jpeg`, which is faster; Pillow decodes everything else, and raises all errors.
2. The result is the image as a viewer shows it: turned by its EXIF tag, first frame, alpha dropped.
3. Every file that cannot be read raises `ImageReadError` with its path, for any error of the codec.
4. Increase ``DECODE_VERSION`` when a file decodes to different pixels: the fingerprints of caches contain it.
"""

from __future__ import annotations

import io
import os
import re
import warnings
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

from fastload.errors import ImageReadError
from fastload.images.geometry import ORIENTATIONS, ImageHeader, apply_orientation
from fastload.images.jpeg import opencv_pixels
from fastload.system.checks import check_size
from fastload.system.notes import short_repr

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

T = TypeVar("T")

# A file: its path, or its content.
Source = str | os.PathLike[str] | bytes | memoryview

DECODE_VERSION = 1

# A resize first shrinks the image coarsely to this multiple of the result's size, then resizes it exactly.
# Pillow's thumbnail() also uses 2: values are within a level or two of an exact resize, at a fraction of the
# work.
REDUCING_GAP = 2.0

_JPEG_START = b"\xff\xd8"

_ORIENTATION = 0x0112  # the EXIF tag
_BITS_PER_SAMPLE = 0x0102  # the TIFF tag

# Warnings about damaged tags are not useful, and under ``-W error`` they would make the image unreadable.
# The warning of a decompression bomb is of another class, and stays.
_QUIET = ("ignore", None, UserWarning, re.compile(r"PIL\."), 0)


def read_image(
    path: str | os.PathLike[str], size: int | tuple[int, int] | None = None
) -> npt.NDArray[np.uint8]:
    """Read an image file as C-contiguous ``(H, W, 3) uint8`` RGB.

    Gray, palette, 1-bit and CMYK images become RGB, alpha is dropped, 16-bit values keep their high byte, the
    EXIF orientation is applied, and the first frame of an animation is read. Calling this function switches
    off Pillow's warnings about damaged metadata in this process; those about too many pixels stay.

    Args:
        path: The file.
        size: None keeps the image's size. An int resizes the shorter side to it and keeps the aspect ratio,
            with the longer side rounded down; ``(height, width)`` resizes to exactly that. Both shrink and
            enlarge, bilinear with antialiasing. A JPEG much larger than ``size`` is decoded at a half, a
            quarter or an eighth of its size, which is faster and changes values by a level or two.

    Returns:
        A new, writable array that the caller owns.

    Raises:
        ImageReadError: if the file is missing, empty, cut short, implausibly large or not an image.
        TypeError: if ``path`` or ``size`` is not of the types above.
        ValueError: if ``size`` is not positive.
    """
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"path should be a path, as a str or a pathlib.Path, but got {short_repr(path)}")
    return decode(path, path, size)


def decode(
    source: Source, path: str | os.PathLike[str], size: int | tuple[int, int] | None = None
) -> npt.NDArray[np.uint8]:
    """Decode a file, or the content of a file; see `read_image`.

    Args:
        source: The path, or the content.
        path: For errors.
        size: As for `read_image`.
    """
    size = None if size is None else check_size(size)
    return _opened(source, path, lambda image: _read(image, size))


def decode_image(data: bytes | bytearray | memoryview | npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Decode the content of an image file as `read_image` reads the file.

    Args:
        data: The bytes, or an array ``(num_bytes,) uint8`` of them, as ``ImageFolder(decode=False)`` has.

    Returns:
        A new, writable, C-contiguous array `(H, W, 3) uint8` RGB that the caller owns.

    Raises:
        ImageReadError: if the content is empty, cut short, implausibly large or not an image.
        TypeError: if ``data`` is of another type, shape or dtype.
    """
    is_array = isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 1
    if not is_array and not isinstance(data, (bytes, bytearray, memoryview)):
        expected = "data should be the content of an image file, as bytes or as an array (num_bytes,) uint8"
        is_array = isinstance(data, np.ndarray)
        found = f"an array {data.shape} {data.dtype}" if is_array else short_repr(data)
        raise TypeError(f"{expected}, but got {found}: for a path, use fastload.read_image")
    content = bytes(data)
    return decode(content, f"<{len(content):,} bytes>")


def read_file(path: str | os.PathLike[str]) -> bytes:
    """The content of a file.

    Raises:
        ImageReadError: if it cannot be read.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            return file.readall()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise ImageReadError(path, getattr(error, "strerror", None) or str(error)) from error


def read_header(source: Source, path: str | os.PathLike[str]) -> ImageHeader:
    """Read the header of a file, or of the content of a file.

    Raises:
        ImageReadError: as for `read_image`; damage after the header is not seen.
    """
    return _opened(source, path, _header)


def _header(image: Image.Image) -> ImageHeader:
    if image.format == "TIFF":
        image.load()  # turns the image, and removes the tag
    orientation = _orientation(image)
    width, height = image.size
    if ORIENTATIONS[orientation][0]:
        width, height = height, width
    is_jpeg = isinstance(image, JpegImageFile) and image.mode in ("RGB", "L")
    return ImageHeader(height, width, orientation, is_jpeg)


def _opened(source: Source, path: str | os.PathLike[str], read: Callable[[Image.Image], T]) -> T:
    _quieten()
    try:
        if not isinstance(source, (bytes, memoryview)):
            with open(source, "rb", buffering=0) as file:
                start = file.read(len(_JPEG_START))
                if start == _JPEG_START:  # needed whole, and Pillow reads a header in memory in half the time
                    source = start + file.readall()
        with Image.open(io.BytesIO(source) if isinstance(source, (bytes, memoryview)) else source) as image:
            return read(image)
    except (MemoryError, Image.DecompressionBombWarning):
        raise  # the cause is this process's memory; or the user made an error of the warning
    except Exception as error:  # codecs raise many types: SyntaxError, struct.error, IndexError ...
        raise ImageReadError(path, _reason(source, error)) from error


def _quieten() -> None:
    """Ignore the warnings of Pillow's modules from now on.

    Setting and resetting the filter for each image would make other modules repeat their "warn once"
    warnings, and is not thread-safe.
    """
    if _QUIET not in warnings.filters:
        warnings.filterwarnings("ignore", category=_QUIET[2], module=_QUIET[3].pattern)


def _read(image: Image.Image, size: int | tuple[int, int] | None) -> npt.NDArray[np.uint8]:
    pixels = opencv_pixels(image) if size is None else None
    if pixels is not None:
        return apply_orientation(pixels, _orientation(image))
    target = box = None
    if size is not None and isinstance(image, JpegImageFile):
        # Only JPEGs can be decoded directly to a smaller size, which is also faster.
        target = width, height = _stored_size(image, size)
        drafted = image.draft(None, (round(REDUCING_GAP * width), round(REDUCING_GAP * height)))
        box = drafted[1] if drafted else None  # where the picture is in the small image
    image.load()  # before the tag is read: loading a TIFF applies and removes it
    if size is not None and target is None:
        target = _stored_size(image, size)
    orientation = _orientation(image)
    picture = _to_rgb(image)
    if target is not None and picture.size != target:
        picture = picture.resize(target, Image.Resampling.BILINEAR, box=box, reducing_gap=REDUCING_GAP)
    return apply_orientation(np.array(picture), orientation)


def _orientation(image: Image.Image) -> int:
    if isinstance(image, JpegImageFile) and "APP1" not in image.app:  # saves 2% of a photograph's time
        return 1
    try:
        tag = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001  # damaged metadata fails in many ways; the picture is intact
        return 1
    return tag if isinstance(tag, int) and tag in ORIENTATIONS else 1


def _stored_size(image: Image.Image, size: int | tuple[int, int]) -> tuple[int, int]:
    """The (width, height) to resize to before the picture is rotated."""
    if isinstance(size, int):
        short, long = sorted(image.size)
        long = size * long // short
        return (size, long) if image.width <= image.height else (long, size)
    height, width = size
    return (height, width) if ORIENTATIONS[_orientation(image)][0] else (width, height)


def _to_rgb(image: Image.Image) -> Image.Image:
    mode = image.mode
    if mode == "RGB":
        return image
    if mode.startswith("I;16") or (mode == "I" and image.format in ("PNG", "PPM")):
        # convert() would clip values above 255 to white. For 16-bit RGB, Pillow also keeps the high byte.
        high = np.asarray(image).astype(np.int32) >> 8
        return Image.fromarray(high.clip(0, 255).astype(np.uint8)).convert("RGB")
    if mode in ("I", "F"):
        bits = getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, (32,))[0]
        kind = "signed 16-bit" if bits == 16 else f"{bits}-bit"
        raise ValueError(
            f"its pixels are {kind} numbers (mode {mode}) without an agreed range; scale them to 8 bits first"
        )
    if mode in ("P", "PA"):
        return image.convert("RGBA").convert("RGB")  # P to RGB directly can replace a transparent color
    image.info.pop("transparency", None)  # convert() would convert it, with a warning
    return image.convert("RGB")


def _reason(source: Source, error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        nbytes = len(source) if isinstance(source, (bytes, memoryview)) else os.path.getsize(source)
        return "the file is empty" if nbytes == 0 else "not an image of a format that Pillow reads"
    has_reason = isinstance(error, (OSError, ValueError, Image.DecompressionBombError))
    return getattr(error, "strerror", None) or (
        str(error) if has_reason else f"{type(error).__name__}: {error}"
    )
