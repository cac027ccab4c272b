"""A record: an array and its note of plain values as bytes, in a closed format without pickle.

    head      plain values as JSON: the dtype, the shape, the order in memory ("C" or "F"), the note
    zeros     to a multiple of 64 bytes
    pixels    the elements, in that order

The checksum finds what a power failure leaves, such as pages of zeros, and any changed bit. It protects
against accidents only, so what a record says is checked before it is used.
"""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastload.cache.plain_text import parse_plain_text, plain_text
from fastload.memory.segment import round_up
from fastload.nested.leaf import numpy_dtype
from fastload.readers.decode_cache import Stored

if TYPE_CHECKING:
    import numpy.typing as npt

ALIGNMENT_BYTES = 64
_BLOCK_WORDS = 512  # one sum each: four times as fast as a CRC of the pixels


class Record(NamedTuple):
    """An array and its note, as they are stored.

    Attributes:
        head: With the zeros after it.
        pixels: `(n,) uint8`.
        head_bytes: Without the zeros.
        checksum: Of both.
    """

    head: bytes
    pixels: npt.NDArray[np.uint8]
    head_bytes: int
    checksum: int

    @property
    def nbytes(self) -> int:
        """Of the whole record."""
        return len(self.head) + self.pixels.nbytes


def encode(array: npt.NDArray[Any], note: Any) -> Record | None:
    """The record of an array and a note; None if they would not come back as they are."""
    dtype = array.dtype if type(array) is np.ndarray else np.dtype(object)
    if dtype.hasobject or not dtype.itemsize or np.dtype(dtype.str) != dtype:
        return None
    order = "F" if array.flags.fnc else "C"
    text = plain_text((dtype.str, array.shape, order, note))
    if text is None:
        return None
    pixels = np.ascontiguousarray(array.T if order == "F" else array).reshape(-1).view(np.uint8)
    head = text.ljust(round_up(len(text), ALIGNMENT_BYTES), b"\0")
    return Record(head, pixels, len(text), _checksum(head, pixels))


def decode(data: memoryview, head_bytes: int, checksum: int) -> Stored | None:
    """What a record holds, as views of it; None if it is damaged."""
    pixels_at = round_up(head_bytes, ALIGNMENT_BYTES)
    if not 0 < pixels_at <= len(data):
        return None
    # Not np.ndarray(buffer=data): that would not keep the view, and the memory would be read to again.
    pixels = np.frombuffer(data, np.uint8)[pixels_at:]
    if _checksum(data[:pixels_at], pixels) != checksum:
        return None
    try:
        text, shape, order, note = parse_plain_text(data[:head_bytes])
        dtype = numpy_dtype(text)
        if math.prod(shape) * dtype.itemsize != pixels.nbytes:
            return None
        return Stored(pixels.view(dtype).reshape(shape, order=order), note)
    except (ValueError, TypeError, OverflowError):  # written by something else
        return None


def _checksum(head: bytes | memoryview, pixels: npt.NDArray[np.uint8]) -> int:
    block_bytes = 8 * _BLOCK_WORDS
    whole_bytes = pixels.nbytes // block_bytes * block_bytes
    words = pixels[:whole_bytes].view(np.uint64).reshape(-1, _BLOCK_WORDS)
    sums = np.add.reduce(words, axis=1)
    return zlib.crc32(pixels[whole_bytes:].data, zlib.crc32(sums.data, zlib.crc32(head)))
