"""The pixels of a remembered file, of which what the first operation on them needs is stored.

`Resize(256)` costs as much as decoding a photograph, and its result takes a small part of the memory. The
result of a resize of all pixels is a pure function of the file and of the arguments. Rules:

1. If the first operation is a resize, and those of the loader's images repeat (see `lessons`), the result is
   stored, and not the original; while that is not known, nothing. Anything else stores the original.
2. An image with a stored result and no original is not decoded until something needs more. Then it is
   decoded from the file that was opened, and its first operation decides again.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from fastload.readers.decode_cache import current, is_equal
from fastload.readers.identity import digest
from fastload.readers.reasons import LEARNING, TOO_NEW

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from fastload.readers.decode_cache import DecodeCache, Stored

REDUCE = 6  # the filters of resizes are 0 to 5
# Bytes of a pixel, by Pillow's modes.
PIXEL_BYTES = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4, "I;16": 2, "I": 4, "F": 4}
_BITS = {"1": 1, "PA": 16}
_MODES = tuple(PIXEL_BYTES)


def nbytes_of(mode: str, size: tuple[int, int]) -> int:
    """The bytes of all pixels of an image."""
    width, height = size
    return (width * _BITS.get(mode, 8 * PIXEL_BYTES.get(mode, 1)) + 7) // 8 * height


def is_image(stored: Stored, mode: str, size: tuple[int, int]) -> bool:
    """Whether all pixels of an image are stored; a file from elsewhere can say so of anything."""
    array = stored.array
    return array.dtype == np.uint8 and array.shape == (nbytes_of(mode, size),)


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


class Original:
    """All pixels of a remembered file, for one image: stored, decoded, or in the file until they are needed.

    Args:
        cache: Where the file is.
        key: Its key there.
        note: What is to be stored beside its pixels; None if they are stored.
        pixels: The stored pixels.
        core: The decoded pixels.
        decode: Decodes the pixels; returns them, and whether the file is as it was when it was opened.
        result: What is stored instead of the pixels, with the note and its own key.
    """

    def __init__(
        self,
        cache: DecodeCache,
        key: bytes,
        note: Any = None,
        *,
        pixels: Pixels | None = None,
        core: Any = None,
        decode: Callable[[], tuple[Any, bool]] | None = None,
        result: Stored | None = None,
    ) -> None:
        self.pixels = pixels
        self._cache, self._key, self._note, self._result = cache, key, note, result
        self._core, self._decode = core, decode
        self._is_used, self._is_steady = False, True

    def copy(self) -> Original:
        """For a copy of the image."""
        other = copy.copy(self)
        if other._core is not None:
            other._core = other._core.copy()
        return other

    def core(self) -> Any:
        """A core for the user; the pixels are stored before they can be changed."""
        core, (note, self._note), cache = self._whole(), (self._note, None), self._cache
        if note is None:
            return core
        nbytes = nbytes_of(core.mode, core.size)
        cache.keep_made(self._key, nbytes, functools.partial(_bytes_of, core), note)
        return core

    def _whole(self) -> Any:
        """A core to read from."""
        decode = self._decode  # before the question: another thread can decode in between
        if self.pixels is not None:
            return self.pixels.core()
        if self._core is None and decode is not None:
            core, is_steady = decode()
            if not is_steady:  # renamed or deleted; if also written to, its times may not tell
                self._note, self._is_steady = None, False
            self._core, self._decode = core, None  # which lets go of the file
        return self._core

    def resized(self, mode: str, size: Any, method: int, name: str, arguments: Any) -> Any:
        """What a method of the core returns: a core, or its stored pixels.

        Args:
            mode: Of the image.
            size: Of the result.
            method: The filter; `REDUCE`.
            name: Of the method.
            arguments: Its arguments.
        """
        cache, key = self._cache, None
        if not self._is_used and current() is cache:
            key = digest("resized", self._key, mode, size, name, arguments)
        if key is None:
            return getattr(self.core(), name)(*arguments)
        self._is_used = True
        repeats = cache.lessons.learn(_MODES.index(mode) * (REDUCE + 1) + method, size)
        stored = self._result or cache.store.get(key_of_result(self._key))
        if stored is None or type(stored.note) is not tuple or stored.note[:1] != (key,):
            stored = cache.store.get(key)
        if stored is not None and is_image(stored, mode, size):
            if cache.is_verification_due():
                self._check(stored, name, arguments)
            return Pixels.of(mode, size, stored.array)
        core = getattr(self.core() if repeats is False else self._whole(), name)(*arguments)
        if repeats and core.mode == mode and core.size == size:
            self._keep_result(key, core)
        elif repeats is None and self._note is not None:
            self._note = None
            cache.missed(LEARNING)
        return core

    def _check(self, stored: Stored, name: str, arguments: Any) -> None:
        """Compute a result again, and compare it.

        Raises:
            DecodeMismatchError: They differ.
        """
        try:
            core = getattr(self._whole(), name)(*arguments)
        except OSError:
            return  # the file was written to since: there is nothing to compare with
        if self._is_steady and not is_equal(stored.array, _bytes_of(core)):
            self._cache.differs(self._key, "the result of a resize")

    def _keep_result(self, key: bytes, core: Any) -> None:
        """Store a result; the first one of a file whose pixels are not stored goes with its note."""
        if not self._is_steady:
            self._cache.missed(TOO_NEW)
        elif self._note is None:
            self._cache.store.put(key, _bytes_of(core), None)
        else:
            is_first = self._result is None
            name, note = (key_of_result(self._key), (key, self._note)) if is_first else (key, None)
            make = functools.partial(_bytes_of, core)
            self._cache.keep_made(name, nbytes_of(core.mode, core.size), make, note)


def _bytes_of(core: Any) -> Any:
    """All pixels of a core, `(n,) uint8`."""
    return np.frombuffer(Image.Image()._new(core).tobytes(), np.uint8)


def key_of_result(key: bytes) -> bytes:
    """The key of a result that is stored instead of the pixels with this key."""
    return digest("instead", key) or key
