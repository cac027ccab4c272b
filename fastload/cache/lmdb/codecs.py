"""How images are written in a record: as they are (`raw`), or as a jpeg, png or webp file, by Pillow.

Rules:

1. A codec is a wish for the whole record; what is done with a leaf follows from the leaf alone: C-contiguous
   arrays `(H, W, 3)`, `(H, W, 1)` and `(H, W)` of uint8 are encoded, everything else stays raw.
2. jpeg and webp change pixels, so they take `(H, W, 3)` only. One channel may be a mask, whose numbers must
   not change: it is written as png, which is exact. webp of quality 100 is exact, too.
3. Pillow is imported where it is used: whoever looks at a cache without decoding images does without it.
4. Decoding gives exactly the leaf's shape and dtype, or CacheCorruptError; half a file is never an image.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.errors import CacheCorruptError

if TYPE_CHECKING:
    from fastload.nested.leaves import Array, Leaf

CODECS = ("raw", "jpeg", "png", "webp")  # a record stores the position in this tuple
LOSSY = ("jpeg", "webp")  # these take a quality
BEST_QUALITY = 100

_MOST_SIDE = 16383  # what webp can hold; jpeg could hold 65535
_MOST_PIXELS = 1 << 26  # Pillow warns of a decompression bomb somewhat above that
_PNG_LEVEL = 1  # zlib's fastest: a cache is built by busy cores
_ENDS = {"jpeg": b"\xff\xd9", "png": b"IEND\xaeB`\x82", "webp": b""}
_RIFF_BYTES = 8  # in front of what a RIFF file's own length counts


def check_codec(codec: str, quality: int) -> None:
    """Check what a user asks for.

    Raises:
        ValueError: There is no such codec or quality.
    """
    if codec not in CODECS:
        raise ValueError(f"codec should be one of {', '.join(CODECS)}, but got {codec!r}")
    if isinstance(quality, bool) or not isinstance(quality, int) or not 1 <= quality <= BEST_QUALITY:
        raise ValueError(f"quality should be an int from 1 to {BEST_QUALITY}, but got {quality!r}")


def codec_of_leaf(codec: str, leaf: Leaf) -> str:
    """How this leaf is written in a record of this codec; see the rules above."""
    if codec == "raw" or leaf.kind != "array" or leaf.dtype != "|u1" or len(leaf.shape) not in (2, 3):
        return "raw"
    height, width = leaf.shape[:2]
    channels = leaf.shape[2] if len(leaf.shape) == 3 else 1
    if channels not in (1, 3) or not 0 < height <= _MOST_SIDE or not 0 < width <= _MOST_SIDE:
        return "raw"
    if height * width > _MOST_PIXELS:
        return "raw"
    return "png" if channels == 1 else codec


def encode_image(codec: str, array: Array, quality: int) -> bytes:
    """An image file of a `(H, W)`, `(H, W, 1)` or `(H, W, 3)` uint8 array.

    Args:
        codec: `"jpeg"`, `"png"` or `"webp"`.
        array: The pixels.
        quality: Of jpeg and webp, 1 to 100; png has none.
    """
    from PIL import Image

    image = Image.fromarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array)
    file = io.BytesIO()
    if codec == "png":
        image.save(file, "PNG", compress_level=_PNG_LEVEL)
    elif codec == "jpeg":
        image.save(file, "JPEG", quality=quality)
    else:
        image.save(file, "WEBP", quality=quality, lossless=quality == BEST_QUALITY)
    return file.getvalue()


def decode_image(codec: str, payload: bytes, leaf: Leaf) -> Array:
    """The pixels of an image file, read-only, in exactly the leaf's shape.

    Raises:
        CacheCorruptError: The payload is no whole image of that shape.
    """
    from PIL import Image

    if not payload.endswith(_ENDS[codec]) or (codec == "webp" and not _is_whole_riff(payload)):
        raise CacheCorruptError(f"a record's {codec} image of {len(payload):,} bytes is cut short")
    channels = leaf.shape[2] if len(leaf.shape) == 3 else 1
    mode = "RGB" if channels == 3 else "L"
    try:
        with Image.open(io.BytesIO(payload), formats=[codec.upper()]) as image:
            if (image.height, image.width) != leaf.shape[:2] or image.mode != mode:
                raise ValueError(f"it is {image.height} x {image.width} of mode {image.mode}")
            pixels = image.tobytes()
    except Exception as error:  # Pillow's readers raise whatever a broken byte leads them to
        raise CacheCorruptError(
            f"a record's {codec} image of shape {leaf.shape} cannot be read: {error}"
        ) from error
    array: np.ndarray[Any, Any] = np.frombuffer(pixels, np.uint8).reshape(leaf.shape)
    return array


def _is_whole_riff(payload: bytes) -> bool:
    return len(payload) >= _RIFF_BYTES and len(payload) == _RIFF_BYTES + int.from_bytes(
        payload[4:8], "little"
    )
