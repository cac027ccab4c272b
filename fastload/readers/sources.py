"""Sources: where the pixels of a lazy image are, until a real core is made of them.

In the store (`Pixels`); in a core that was decoded, and is held back (`Decoded`); in a file of which only a
resized image is stored (`Undecoded`; see `front` for these two); or, without a cache, in a core that several
images show (`Share`).
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from PIL import Image

from fastload.readers.decode_cache import defer, inactive
from fastload.readers.identity import facts_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from fastload.readers.front import Origin
    from fastload.readers.identity import Facts

# Bytes of a pixel, by Pillow's raw modes.
PIXEL_BYTES = {"L": 1, "LA": 2, "RGB": 3, "RGBX": 4, "RGBA": 4, "CMYK": 4, "I;16": 2, "I": 4, "F": 4}


Content = tuple["bytes | bytearray", bool]


class Source(Protocol):
    """Where all pixels of an image are, until a real core is made of them."""

    def core(self) -> Any:
        """A real core, for the user."""

    def whole(self) -> Any:
        """A real core to read from."""

    def copy(self) -> Source:
        """For a copy of the image."""


class Pixels(NamedTuple):
    """A rectangle of stored pixels, a `Source`.

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

    def copy(self) -> Pixels:  # noqa: D102
        return self

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

    def whole(self) -> Any:  # noqa: D102
        return self.core()


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


class Decoded:
    """The pixels of a file that are held back: a `Source` that stores them before they can be changed."""

    def __init__(self, core: Any, origin: Origin) -> None:
        self._core = core
        self._origin = origin

    def core(self) -> Any:  # noqa: D102
        keep_whole(self._core, self._origin)
        return self._core

    def whole(self) -> Any:  # noqa: D102
        return self._core

    def copy(self) -> Decoded:  # noqa: D102
        return Decoded(self._core.copy(), self._origin)


class Undecoded:
    """The pixels of a file that only resized ones are stored of: a `Source` that decodes them if needed."""

    def __init__(self, image: Any, content: Callable[[], Content], origin: Origin) -> None:
        self._class = type(image)
        self._state = {name: vars(image)[name] for name in ("tile", "_size", "_mode", "decoderconfig")}
        self._content = content
        self._origin = origin
        self._core: Any = None
        defer(self)

    def core(self) -> Any:  # noqa: D102
        core = self.whole()
        keep_whole(core, self._origin)
        return core.copy() if core is self._core else core

    def whole(self) -> Any:  # noqa: D102
        content = self._content  # before the question: another thread can settle it in between
        if self._core is not None:
            return self._core
        with inactive():
            is_unchanged = False
            try:
                encoded, is_unchanged = content()
            finally:
                if not is_unchanged:
                    # It was renamed or deleted. If it was written to as well, its times may not tell.
                    self._origin.keep_nothing()
            image = self._class(io.BytesIO(encoded))
            vars(image).update(self._state, tile=[*self._state["tile"]])
            image.load()
        return image.im

    def copy(self) -> Undecoded:  # noqa: D102
        return self

    def settle(self) -> None:
        """Decode them now, so that no file is needed later."""
        with contextlib.suppress(Exception):  # it comes when the pixels are needed
            self._core = self.whole()
            self._content = lambda: (b"", True)  # lets go of the file


class Share:
    """What one of several images has of the core that they show: a `Source`.

    An image that needs a core of its own gets this one if it is the last of them, and else a copy.

    Args:
        core: The real core.
        shares: All shares of it, and what serializes them; None: this is the first one.
    """

    def __init__(
        self, core: Any, shares: tuple[weakref.WeakSet[Share], threading.Lock] | None = None
    ) -> None:
        self._core = core
        self._own: Any = None
        self._all, self._lock = self._shares = shares or (weakref.WeakSet(), threading.Lock())
        self._all.add(self)

    def core(self) -> Any:  # noqa: D102
        with self._lock:
            if self._own is None:
                self._all.discard(self)
                self._own = self._core.copy() if self._all else self._core
            return self._own

    def whole(self) -> Any:  # noqa: D102
        own = self._own
        return self._core if own is None else own

    def copy(self) -> Share:  # noqa: D102
        with self._lock:
            return Share(self._core, self._shares) if self._own is None else Share(self._own.copy())


def keep_whole(core: Any, origin: Origin) -> None:
    """Store all pixels of a file, if they are not stored."""
    nbytes = core.size[0] * core.size[1] * PIXEL_BYTES[core.mode]
    origin.keep_whole(nbytes, Image.Image()._new(core).tobytes)
