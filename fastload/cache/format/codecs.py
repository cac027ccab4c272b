"""Encodes the images in a record: unchanged (`raw`), or as jpeg, png or webp files.

Rules:

1. A codec is requested for the whole record; the leaf alone determines whether it is encoded: C-contiguous
   uint8 arrays `(H, W, 3)`, `(H, W, 1)` and `(H, W)` are, and all other leaves stay raw.
2. jpeg and webp change pixels, so one leaf `(H, W, 3)` uses them: the photograph. All others can be masks,
   whose values must not change: they are encoded as png, which is lossless. webp of quality 100 is lossless.
3. NumPy and Pillow are imported only when they are used: the command line offers the codecs without them.
4. Decoding returns exactly the leaf's shape and dtype, or raises CacheCorruptError; a truncated file is never
   decoded.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastload.errors import CacheCorruptError
from fastload.system.checks import integer, one_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.images.encoded import EncodedImage
    from fastload.nested.leaf import Array, Leaf

BEST_QUALITY = 100

# Of an image handed out undecoded: crops of smaller ones are no faster than the whole.
_MIN_PIXELS = 1 << 16
_MAX_SIDE = 16383  # the limit of webp; the limit of jpeg is 65535
_RIFF_BYTES = 8  # at the start of a RIFF file, which the length in its header does not count


@dataclass(frozen=True)
class _Codec:
    """A format of image files.

    Attributes:
        options: Takes the width of an image and the quality; returns the options with which Pillow saves it.
        is_whole: Whether bytes end as such a file does, so they are not cut short.
        is_lossy: Whether it changes pixels, and so has a quality.
    """

    options: Callable[[int, int], dict[str, Any]]
    is_whole: Callable[[bytes], bool]
    is_lossy: bool


def _jpeg_options(width: int, quality: int) -> dict[str, Any]:
    return {"quality": quality, "subsampling": "4:2:0"}


def _is_whole_riff(payload: bytes) -> bool:
    size = int.from_bytes(payload[4:_RIFF_BYTES], "little")
    return len(payload) >= _RIFF_BYTES and len(payload) == _RIFF_BYTES + size


# To add a codec, add it to the end of this table: a record stores its number, where 0 is "raw". All that
# offers codecs, such as the command line, reads the table.
_IMAGES = {
    "jpeg": _Codec(_jpeg_options, lambda payload: payload.endswith(b"\xff\xd9"), is_lossy=True),
    # 1 is zlib's fastest level: a build keeps all cores busy.
    "png": _Codec(
        lambda width, quality: {"compress_level": 1},
        lambda payload: payload.endswith(b"IEND\xaeB`\x82"),
        is_lossy=False,
    ),
    "webp": _Codec(
        lambda width, quality: {"quality": quality, "lossless": quality == BEST_QUALITY},
        _is_whole_riff,
        is_lossy=True,
    ),
}
CODECS = ("raw", *_IMAGES)
# The codec of a whole cache whose records hold the dataset's undecoded images. Its records are "raw".
SOURCE = "source"
CACHE_CODECS = (*CODECS, SOURCE)
LOSSY = tuple(name for name, codec in _IMAGES.items() if codec.is_lossy)
CODEC_CHECK = one_of(*CACHE_CODECS)
QUALITY_CHECK = integer(1, BEST_QUALITY + 1)


def is_lossy(codec: str, quality: int | None) -> bool:
    """Whether a codec changes pixels at this quality."""
    return codec in LOSSY and not (codec == "webp" and quality == BEST_QUALITY)


def codec_of_leaf(codec: str, leaf: Leaf) -> str:
    """The encoding of this leaf by a codec; see the rules above."""
    if codec == "raw" or leaf.kind != "array" or leaf.dtype != "|u1" or len(leaf.shape) not in (2, 3):
        return "raw"
    height, width = leaf.shape[:2]
    channels = leaf.shape[2] if len(leaf.shape) == 3 else 1
    if channels not in (1, 3) or not 0 < height <= _MAX_SIDE or not 0 < width <= _MAX_SIDE:
        return "raw"
    return "png" if channels == 1 else codec


def encode_image(codec: str, array: Array, quality: int) -> bytes:
    """An image file of a `(H, W)`, `(H, W, 1)` or `(H, W, 3)` uint8 array.

    Args:
        codec: The format of the file; not `"raw"`.
        array: The pixels.
        quality: Of a lossy codec, 1 to 100.
    """
    from PIL import Image

    image = Image.fromarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array)
    file = io.BytesIO()
    image.save(file, codec.upper(), **_IMAGES[codec].options(image.width, quality))
    return file.getvalue()


def encoded_image(codec: str, payload: memoryview, leaf: Leaf) -> EncodedImage | None:
    """An image file as an undecoded image; None if `decode_image` should decode it now."""
    from fastload.images.encoded import EncodedImage

    if codec != "jpeg" or leaf.shape[0] * leaf.shape[1] < _MIN_PIXELS:
        return None
    return EncodedImage.of(payload, None)


def decode_image(codec: str, payload: bytes, leaf: Leaf) -> Array:
    """The pixels of an image file, read-only, in exactly the leaf's shape.

    Raises:
        CacheCorruptError: The payload is not a complete image of that shape.
    """
    import numpy as np
    from PIL import Image

    if not _IMAGES[codec].is_whole(payload):
        raise CacheCorruptError(f"a record's {codec} image of {len(payload):,} bytes is cut short")
    channels = leaf.shape[2] if len(leaf.shape) == 3 else 1
    mode = "RGB" if channels == 3 else "L"
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
