"""Pixels: a rectangle of stored pixels, of which a core can be made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    import numpy.typing as npt

# Bytes of a pixel, by Pillow's modes.
PIXEL_BYTES = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4, "I;16": 2, "I": 4, "F": 4}
_BITS = {"1": 1, "PA": 16}


def nbytes_of(mode: str, size: tuple[int, int]) -> int:
    """The bytes of all pixels of an image."""
    width, height = size
    return (width * _BITS.get(mode, 8 * PIXEL_BYTES.get(mode, 1)) + 7) // 8 * height


class Pixels(NamedTuple):
    """A rectangle of stored pixels.

    Attributes:
        mode: One of `PIXEL_BYTES`.
        size: Width and height.
        memory: `(n,) uint8`, the store's, read-only.
        offset: Of the first pixel in it.
        stride: Bytes from one row to the next.
    """

    mode: str
    size: tuple[int, int]
    memory: npt.NDArray[np.uint8]
    offset: int
    stride: int

    @classmethod
    def of(cls, mode: str, size: Any, memory: npt.NDArray[np.uint8]) -> Pixels:
        """All pixels of an image."""
        return cls(mode, size, memory, 0, size[0] * PIXEL_BYTES[mode])

    def crop(self, left: int, upper: int, right: int, lower: int) -> Pixels:
        """A rectangle inside this one."""
        mode, _, memory, offset, stride = self
        offset += upper * stride + left * PIXEL_BYTES[mode]
        return Pixels(mode, (right - left, lower - upper), memory, offset, stride)

    def tobytes(self) -> bytes:
        """A copy, row by row without gaps."""
        width, height = self.size
        shape, strides = (height, width * PIXEL_BYTES[self.mode]), (self.stride, 1)
        return np.ndarray(shape, np.uint8, self.memory, self.offset, strides).tobytes()

    def core(self) -> Any:
        """A core with a copy."""
        width, height = self.size
        nbytes = (height - 1) * self.stride + width * PIXEL_BYTES[self.mode]
        rows = self.memory[self.offset : self.offset + nbytes]
        return core_of(self.mode, self.size, rows, self.stride)


def core_of(mode: str, size: Any, memory: npt.NDArray[np.uint8], stride: int = 0) -> Any:
    """A core with a copy of pixels whose rows are ``stride`` bytes apart."""
    core = Image.core.new(mode, size)  # type: ignore[attr-defined]
    decoder: Any = Image._getdecoder(mode, "raw", (mode, stride, 1))
    decoder.setimage(core, (0, 0, *size))
    if decoder.decode(memory) != (-1, 0):  # all of it, without an error
        raise ValueError(f"{memory.nbytes} bytes are no image of the mode {mode} and the size {size}")
    return core
