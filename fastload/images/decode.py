"""One image file to one C-contiguous ``(H, W, 3) uint8`` RGB array.

It keeps no state and no open file.

Rules:
1. One decoder, Pillow, on every machine: the same file gives the same pixels whatever else is installed.
   OpenCV holds the same libjpeg-turbo; it decoded 500 x 375 JPEGs to identical pixels at 1.17x the rate
   (1,350 against 1,150 a second on one core), which does not pay for a second path.
2. What comes back is what a viewer shows: turned by its EXIF tag, first frame, alpha dropped.
3. Every file that cannot be read raises :class:`ImageReadError` with its path, whatever the codec raised.
4. Raise ``DECODE_VERSION`` when the same file gives other pixels: caches are keyed by it.
"""

from __future__ import annotations

import operator
import os
import re
import warnings
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

from fastload.errors import ImageReadError

if TYPE_CHECKING:
    import numpy.typing as npt

DECODE_VERSION = 1

# How much larger than the result an image may be left for the last, exact step of a resize. Pillow's own
# thumbnail() uses 2: the result is within a level or two of the exact one, for a fraction of the work.
REDUCING_GAP = 2.0

_ORIENTATION = 0x0112  # the EXIF tag
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = {5, 6, 7, 8}  # width and height change places

# A damaged tag in one of a million files is no news, and under ``-W error`` it must not lose the picture.
_QUIET = ("ignore", None, Warning, re.compile(r"PIL\."), 0)


def read_image(
    path: str | os.PathLike[str], size: int | tuple[int, int] | None = None
) -> npt.NDArray[np.uint8]:
    """Read an image file as C-contiguous ``(H, W, 3) uint8`` RGB.

    Grey, palette, 1-bit and CMYK images become RGB, alpha is dropped, 16-bit values keep their high byte,
    an EXIF orientation is applied, and of an animation the first frame is read. Pillow's warnings about
    damaged metadata are switched off in the process that calls this.

    Args:
        path: The file.
        size: None leaves the image as it is. An int resizes the shorter side to it and keeps the aspect,
            the longer side rounded down; ``(height, width)`` resizes to just that. Both shrink and enlarge,
            bilinear with antialiasing. A JPEG much larger than ``size`` is decoded at a half, a quarter or
            an eighth of its size, which is faster and changes values by a level or two.

    Returns:
        A new, writable array that the caller owns.

    Raises:
        ImageReadError: if the file is missing, empty, cut short, too large to be believed or no image.
        TypeError: if ``size`` is not of the types above.
        ValueError: if ``size`` is not positive.
    """
    size = check_size(size)
    _quieten()
    try:
        with Image.open(path) as image:
            pixels = _read(image, size)
    except ImageReadError:
        raise
    except MemoryError:
        raise  # says more about this process than about the file
    except Exception as error:  # codecs raise what they like: SyntaxError, struct.error, IndexError ...
        raise ImageReadError(path, _reason(path, error)) from error
    return pixels


def check_size(size: object) -> int | tuple[int, int] | None:
    """``size`` as plain ints, or the error that says what it should be.

    Raises:
        TypeError: if it is neither None, nor an int, nor a pair of ints.
        ValueError: if a side is not positive.
    """
    if size is None:
        return None
    sides = size if isinstance(size, (tuple, list)) else (size,)
    expected = f"size must be None, an int or (height, width), got {size!r}"
    try:
        numbers = [operator.index(side) for side in sides]
    except TypeError:
        raise TypeError(expected) from None
    if sides is size and len(numbers) != 2:
        raise TypeError(expected)
    if min(numbers) < 1:
        msg = f"size must be at least 1 pixel, got {size!r}"
        raise ValueError(msg)
    return (numbers[0], numbers[1]) if sides is size else numbers[0]


def _quieten() -> None:
    """Have the warnings of Pillow's modules ignored from now on.

    A filter set and reset around each image would make every other module's "warn once" start anew, and
    is not safe between threads.
    """
    if _QUIET not in warnings.filters:
        warnings.filterwarnings("ignore", module=_QUIET[3].pattern)


def _read(image: Image.Image, size: int | tuple[int, int] | None) -> npt.NDArray[np.uint8]:
    target = box = None
    if size is not None and isinstance(image, JpegImageFile):
        # The only format that can be decoded to a smaller size at once, and faster for it.
        target = width, height = _stored_size(image, size)
        drafted = image.draft(None, (round(REDUCING_GAP * width), round(REDUCING_GAP * height)))
        box = drafted[1] if drafted else None  # where the picture lies in the rounded-up small image
    image.load()  # now: loading a TIFF turns it and takes its tag away
    if size is not None and target is None:
        target = _stored_size(image, size)
    orientation = _orientation(image)
    picture = _to_rgb(image)
    if target is not None and picture.size != target:
        picture = picture.resize(target, Image.Resampling.BILINEAR, box=box, reducing_gap=REDUCING_GAP)
    if orientation in _TURNS:
        picture = picture.transpose(_TURNS[orientation])
    return np.array(picture)


def _orientation(image: Image.Image) -> int:
    try:
        tag = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001  # damaged metadata fails in many ways; the picture itself is whole
        return 1
    return tag if isinstance(tag, int) else 1


def _stored_size(image: Image.Image, size: int | tuple[int, int]) -> tuple[int, int]:
    """The (width, height) to resize to before the picture is turned."""
    if isinstance(size, int):
        short, long = sorted(image.size)
        long = size * long // short
        return (size, long) if image.width <= image.height else (long, size)
    height, width = size
    return (height, width) if _orientation(image) in _SIDEWAYS else (width, height)


def _to_rgb(image: Image.Image) -> Image.Image:
    mode = image.mode
    if mode == "RGB":
        return image
    if mode.startswith("I;16") or (mode == "I" and image.format in ("PNG", "PPM")):
        # convert() would clip all above 255 to white. The high byte is what Pillow keeps of 16-bit RGB.
        high = np.asarray(image).astype(np.int32) >> 8
        return Image.fromarray(high.clip(0, 255).astype(np.uint8)).convert("RGB")
    if mode in ("I", "F"):
        msg = (
            f"its pixels are 32-bit numbers (mode {mode}) without an agreed range; scale them to 8 bits first"
        )
        raise ValueError(msg)
    if mode in ("P", "PA"):
        return image.convert("RGBA").convert("RGB")  # straight to RGB a transparent colour may be replaced
    image.info.pop("transparency", None)  # convert() would translate it, with a warning
    return image.convert("RGB")


def _reason(path: str | os.PathLike[str], error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return (
            "the file is empty" if os.path.getsize(path) == 0 else "not an image of a kind that Pillow reads"
        )
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # "No such file or directory", "Is a directory", "Permission denied"
    if isinstance(error, (OSError, ValueError, Image.DecompressionBombError)):
        return str(error)
    return f"{type(error).__name__}: {error}"
