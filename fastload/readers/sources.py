"""Sources: stored pixels, and files that were opened, of which cores can be made."""

from __future__ import annotations

import os
import struct
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from fastload.readers.identity import facts_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from fastload.readers.identity import Facts

# Bytes of a pixel, by Pillow's raw modes.
PIXEL_BYTES = {"L": 1, "LA": 2, "RGB": 3, "RGBX": 4, "RGBA": 4, "CMYK": 4, "I;16": 2, "I": 4, "F": 4}


class Pixels(NamedTuple):
    """A rectangle of stored pixels.

    Attributes:
        mode: Pillow's.
        raw: What the bytes are, one of `PIXEL_BYTES`.
        size: Width and height.
        memory: `(n,) uint8`, the store's, read-only.
        offset: Of the first pixel in it.
        stride: Bytes from one row to the next.
    """

    mode: str
    raw: str
    size: tuple[int, int]
    memory: npt.NDArray[np.uint8]
    offset: int
    stride: int

    @classmethod
    def of(cls, mode: str, raw: str, size: Any, memory: npt.NDArray[np.uint8]) -> Pixels:
        """All pixels of an image."""
        return cls(mode, raw, size, memory, 0, size[0] * PIXEL_BYTES[raw])

    def crop(self, left: int, upper: int, right: int, lower: int) -> Pixels:
        """A rectangle inside this one."""
        mode, raw, _, memory, offset, stride = self
        offset += upper * stride + left * PIXEL_BYTES[raw]
        return Pixels(mode, raw, (right - left, lower - upper), memory, offset, stride)

    def tobytes(self) -> bytes | None:
        """A copy, row by row without gaps; None if the bytes are others."""
        width, height = self.size
        shape, strides = (height, width * PIXEL_BYTES[self.raw]), (self.stride, 1)
        if self.raw != self.mode:
            return None
        return np.ndarray(shape, np.uint8, self.memory, self.offset, strides).tobytes()

    def core(self) -> Any:
        """A core with a copy."""
        width, height = self.size
        nbytes = (height - 1) * self.stride + width * PIXEL_BYTES[self.raw]
        rows = self.memory[self.offset : self.offset + nbytes]
        return core_of(self.mode, self.raw, self.size, rows, self.stride)


def raw_mode(mode: str) -> str:
    """What bytes hold all of a core: in the mode RGB there is a fourth one, which Arrow shows."""
    return "RGBX" if mode == "RGB" else mode


def core_of(mode: str, raw: str, size: Any, memory: npt.NDArray[np.uint8], stride: int = 0) -> Any:
    """A core with a copy of pixels whose rows are ``stride`` bytes apart."""
    core = Image.core.new(mode, size)  # type: ignore[attr-defined]
    decoder: Any = Image._getdecoder(mode, "raw", (raw, stride, 1))
    decoder.setimage(core, (0, 0, *size))
    if decoder.decode(memory) != (-1, 0):  # all of it, without an error
        raise ValueError(f"{memory.nbytes} bytes are no image of the mode {raw} and the size {size}")
    return core


class Descriptor:
    """A file that was opened, and may be closed, renamed or deleted since."""

    def __init__(self, descriptor: int, facts: Facts) -> None:
        self._descriptor = descriptor
        self._facts = facts
        weakref.finalize(self, os.close, descriptor).atexit = False

    @classmethod
    def of(cls, descriptor: int, facts: Facts) -> Descriptor:
        """The file of another descriptor.

        Raises:
            OSError: No descriptor is left, or this process has locked the file, which closing it would end.
        """
        import fcntl  # not on Windows, where no file is identified

        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        if struct.unpack_from("h", fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, lock))[0] != fcntl.F_UNLCK:
            raise OSError
        return cls(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC), facts)

    def content(self) -> tuple[bytes | bytearray, bool]:
        """All of the file, and whether its facts are those of when it was opened.

        Raises:
            OSError: It was written to.
        """
        num_bytes, content = self._facts[2], bytearray()
        while part := os.pread(self._descriptor, num_bytes + 1 - len(content), len(content)):
            content += part
        facts = facts_of(self._descriptor)
        if facts[:4] != self._facts[:4]:
            raise OSError("the file was written to after it was opened, and before its pixels were used")
        return content, facts == self._facts
