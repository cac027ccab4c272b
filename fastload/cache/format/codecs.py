"""Encodes the images in a record: unchanged (`raw`), or as jpeg, png or webp files.

Rules:

1. A codec is requested for the whole record; the leaf alone determines whether it is encoded: C-contiguous
   uint8 arrays `(H, W, 3)`, `(H, W, 1)` and `(H, W)` are, and all other leaves stay raw.
2. jpeg and webp change pixels, so only `(H, W, 3)` uses them. One channel can be a mask, whose values must
   not change: it is encoded as png, which is lossless. webp of quality 100 is lossless, too.
3. Pillow is imported only when it is used: code that inspects a cache without decoding does not need it.
4. Decoding returns exactly the leaf's shape and dtype, or raises CacheCorruptError; a truncated file is never
   decoded.
5. jpeg files have restart markers, which change no pixel, so a crop decodes only the part around it.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from fastload.errors import CacheCorruptError
from fastload.images.encoded import EncodedImage

if TYPE_CHECKING:
    from fastload.nested.leaf import Array, Leaf

CODECS = ("raw", "jpeg", "png", "webp")  # a record stores the position in this tuple
# The codec of a whole cache whose records hold the dataset's undecoded images. Its records are "raw".
SOURCE = "source"
CACHE_CODECS = (*CODECS, SOURCE)
LOSSY = ("jpeg", "webp")  # these codecs have a quality
BEST_QUALITY = 100

# Of an image handed out undecoded: crops of smaller ones are no faster than the whole.
_MIN_PIXELS = 1 << 16
_MCU_SIDE = 16  # of the JPEGs that Pillow writes by default (4:2:0), in pixels
_MAX_SIDE = 16383  # the limit of webp; the limit of jpeg is 65535
_MAX_PIXELS = 1 << 26  # somewhat below the size at which Pillow warns of a decompression bomb
_PNG_LEVEL = 1  # zlib's fastest level, because a build keeps all cores busy
_ENDS = {"jpeg": b"\xff\xd9", "png": b"IEND\xaeB`\x82", "webp": b""}
_RIFF_BYTES = 8  # at the start of a RIFF file, which the length in its header does not count


def check_codec(codec: str, quality: int) -> None:
    """Check the codec and the quality that a user requests.

    Raises:
        ValueError: There is no such codec or quality.
    """
    if codec not in CACHE_CODECS:
        raise ValueError(f"codec should be one of {', '.join(CACHE_CODECS)}, but got {codec!r}")
    if isinstance(quality, bool) or not isinstance(quality, int) or not 1 <= quality <= BEST_QUALITY:
        raise ValueError(f"quality should be an int from 1 to {BEST_QUALITY}, but got {quality!r}")


def codec_of_leaf(codec: str, leaf: Leaf) -> str:
    """The encoding of this leaf in a record of this codec; see the rules above."""
    if codec == "raw" or leaf.kind != "array" or leaf.dtype != "|u1" or len(leaf.shape) not in (2, 3):
        return "raw"
    height, width = leaf.shape[:2]
    channels = leaf.shape[2] if len(leaf.shape) == 3 else 1
    if channels not in (1, 3) or not 0 < height <= _MAX_SIDE or not 0 < width <= _MAX_SIDE:
        return "raw"
    if height * width > _MAX_PIXELS:
        return "raw"
    return "png" if channels == 1 else codec


def encode_image(codec: str, array: Array, quality: int) -> bytes:
    """An image file of a `(H, W)`, `(H, W, 1)` or `(H, W, 3)` uint8 array.

    Args:
        codec: `"jpeg"`, `"png"` or `"webp"`.
        array: The pixels.
        quality: Quality of jpeg and webp, 1 to 100; png has none.
    """
    from PIL import Image

    from fastload.images.restart_markers import choose_interval

    image = Image.fromarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array)
    file = io.BytesIO()
    if codec == "png":
        image.save(file, "PNG", compress_level=_PNG_LEVEL)
    elif codec == "jpeg":
        interval = choose_interval(-(-image.width // _MCU_SIDE))
        image.save(file, "JPEG", quality=quality, subsampling="4:2:0", restart_marker_blocks=interval)
    else:
        image.save(file, "WEBP", quality=quality, lossless=quality == BEST_QUALITY)
    return file.getvalue()


def encoded_image(codec: str, payload: memoryview, leaf: Leaf) -> EncodedImage | None:
    """An image file as an undecoded image; None if `decode_image` should decode it now."""
    from fastload.images.jpeg import parse_jpeg

    if codec != "jpeg" or leaf.shape[0] * leaf.shape[1] < _MIN_PIXELS:
        return None
    header = parse_jpeg(payload)
    is_of_leaf = header is not None and (header.height, header.width, len(header.sampling)) == leaf.shape
    return EncodedImage.of(payload, None) if is_of_leaf else None


def decode_image(codec: str, payload: bytes, leaf: Leaf) -> Array:
    """The pixels of an image file, read-only, in exactly the leaf's shape.

    Raises:
        CacheCorruptError: The payload is not a complete image of that shape.
    """
    from PIL import Image

    from fastload.images.jpeg import decode_jpeg, parse_jpeg

    if not payload.endswith(_ENDS[codec]) or (codec == "webp" and not _is_whole_riff(payload)):
        raise CacheCorruptError(f"a record's {codec} image of {len(payload):,} bytes is cut short")
    channels = leaf.shape[2] if len(leaf.shape) == 3 else 1
    mode = "RGB" if channels == 3 else "L"
    header = parse_jpeg(payload)
    if header is not None and len(header.sampling) == 3 and (header.height, header.width, 3) == leaf.shape:
        array = decode_jpeg(payload, header)
        if array is not None:
            array.flags.writeable = False
            return array
    try:
        with Image.open(io.BytesIO(payload), formats=[codec.upper()]) as image:
            if (image.height, image.width) != leaf.shape[:2] or image.mode != mode:
                raise ValueError(f"it is {image.height} x {image.width} of mode {image.mode}")
            pixels = image.tobytes()
    except Exception as error:  # Pillow raises many types of errors for broken files
        raise CacheCorruptError(
            f"a record's {codec} image of shape {leaf.shape} cannot be read: {error}"
        ) from error
    return np.frombuffer(pixels, np.uint8).reshape(leaf.shape)


def _is_whole_riff(payload: bytes) -> bool:
    return len(payload) >= _RIFF_BYTES and len(payload) == _RIFF_BYTES + int.from_bytes(
        payload[4:8], "little"
    )
