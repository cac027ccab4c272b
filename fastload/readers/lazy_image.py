"""Pillow images whose pixels are in a store: copied out only where, and when, something needs them.

A lazy image is exactly what Pillow would have made, of the same class and with the same attributes; only its
core, `_im`, is a `LazyCore`. Whatever asks for the core by Pillow's property `im` gets a real one, made then.
`copy`, `crop`, `convert` to the same mode, and `tobytes` (so `numpy.asarray`, and pickle) do without it:
Pillow's own methods run on a `_View` of the image, which shows them the lazy core. Rules:

1. What leaves the store is a private copy. A lazy core refers to the store's memory, which lives as long.
2. A lazy core makes one real core, which all threads get, and stays in its image: nothing is exchanged.
3. A lazy core belongs to one image, and an image with a palette has none.
"""

from __future__ import annotations

import threading
import weakref
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from PIL import Image

from fastload.readers.patch import Patch

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from fastload.readers.front import Origin

# Bytes of a pixel, by Pillow's raw modes.
PIXEL_BYTES = {"L": 1, "LA": 2, "RGB": 3, "RGBX": 4, "RGBA": 4, "CMYK": 4, "I;16": 2, "I": 4, "F": 4}
OPENED = "_fastload"  # the attribute of an opened image that can be loaded from a cache


class Opened(Protocol):
    """What an opened image that is not loaded has as its attribute `OPENED`."""

    def load(self, image: Any) -> None:
        """Load the image from the cache, or by Pillow; returns at once if it is being loaded."""


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
        offset = self.offset + upper * self.stride + left * PIXEL_BYTES[self.raw]
        return self._replace(size=(right - left, lower - upper), offset=offset)

    def copy(self) -> Pixels:
        """Themselves: they do not change."""
        return self

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


class Share:
    """What one of several images has of the real core that they show.

    An image that needs a core of its own gets this one if it is the last of them, and else a copy.

    Args:
        core: The real core.
        shares: All shares of it, and what serializes them; None: this is the first one.
    """

    def __init__(
        self, core: Any, shares: tuple[weakref.WeakSet[Share], threading.Lock] | None = None
    ) -> None:
        self.mode = core.mode
        self.size = core.size
        self._core = core
        self._own: Any = None
        self._all, self._lock = self._shares = shares or (weakref.WeakSet(), threading.Lock())
        self._all.add(self)

    def copy(self) -> Share | None:
        """Another share; None if the image has got its core."""
        with self._lock:
            return Share(self._core, self._shares) if self._own is None else None

    def crop(self, left: int, upper: int, right: int, lower: int) -> Any:
        """A real core with a rectangle."""
        return self._core.crop((left, upper, right, lower))

    def tobytes(self) -> None:
        """None: Pillow makes them of a real core."""

    def core(self) -> Any:
        """The core of this image alone."""
        with self._lock:
            if self._own is None:
                self._all.discard(self)
                self._own = self._core.copy() if self._all else self._core
            return self._own


def raw_mode(mode: str) -> str:
    """What bytes hold all of a core: in the mode RGB there is a fourth one, which Arrow shows."""
    return "RGBX" if mode == "RGB" else mode


def bytes_of(core: Any) -> bytes:
    """All of a core."""
    return Image.Image()._new(core).tobytes("raw", raw_mode(core.mode))


def core_of(mode: str, raw: str, size: Any, memory: npt.NDArray[np.uint8], stride: int = 0) -> Any:
    """A core with a copy of pixels whose rows are ``stride`` bytes apart."""
    image = Image.new(mode, size, None)
    rows: Any = memory  # any contiguous buffer
    image.frombytes(rows, "raw", raw, stride, 1)
    return image.im


def _is_size(size: Any) -> bool:
    """Whether it is a pair of positive numbers, which every version of the C code takes as they are."""
    return (
        type(size) is tuple and len(size) == 2 and all(type(length) is int and length > 0 for length in size)
    )


class LazyCore:
    """Stands for the core of an image until something needs it, with the methods that need no core."""

    readonly = 0

    def __init__(self, pixels: Pixels | Share, origin: Origin | None = None) -> None:
        self.mode = pixels.mode
        self.size = pixels.size
        self.pixels: Pixels | Share | None = pixels
        self._origin = origin  # of the whole of an image

    @property
    def real(self) -> Any:
        """The real core, made when it is first asked for."""
        attributes, pixels = vars(self), self.pixels
        if pixels is not None:
            attributes.setdefault("_real", pixels.core())  # atomic: the first thread's counts
            self.pixels = None
        return attributes["_real"]

    def copy(self) -> Any:
        """A core of its own; lazy as this one."""
        pixels = self.pixels
        copy = None if pixels is None else pixels.copy()
        return self.real.copy() if copy is None else LazyCore(copy, self._origin)

    def crop(self, box: tuple[int, int, int, int]) -> Any:
        """A core of its own with a rectangle; lazy as this one if the rectangle is inside."""
        pixels, (left, upper, right, lower) = self.pixels, box
        if pixels is None or not (0 <= left < right <= self.size[0] and 0 <= upper < lower <= self.size[1]):
            return self.real.crop(box)
        part = pixels.crop(left, upper, right, lower)
        return LazyCore(part) if type(part) is Pixels else part

    def resize(self, size: Any, resample: Any, box: Any) -> Any:
        """A resized core; lazy if it is remembered."""
        filter_ = resample.value if type(resample) is Image.Resampling else resample
        # A draft is rounded up, so the box of a thumbnail may end in its last pixels.
        is_whole = (
            type(box) is tuple
            and [*box[:2]] == [0, 0]
            and all(0 <= length - edge < 1 for length, edge in zip(self.size, box[2:], strict=False))
        )
        is_front = is_whole and _is_size(size)
        return self._remembered(size if is_front else None, "resize", size, filter_, box)

    def reduce(self, factor: Any, box: Any) -> Any:
        """A reduced core; lazy if it is remembered."""
        is_front = type(box) is tuple and box == (0, 0, *self.size) and _is_size(factor)
        lengths = zip(self.size, factor, strict=True) if is_front else ()
        size = tuple(-(-length // times) for length, times in lengths)
        return self._remembered(size or None, "reduce", factor, box)

    def _remembered(self, size: tuple[int, ...] | None, name: str, *arguments: Any) -> Any:
        """The core of this size that a method of the real core returns; None: do not remember it."""

        def compute() -> Any:
            return getattr(self.real, name)(*arguments)

        pixels, origin = self.pixels, self._origin
        if size is None or pixels is None or origin is None:
            return compute()
        key, stored = origin.find(self.mode, size, (name, *arguments))
        if key is None:
            return compute()
        if stored is None:
            core = compute()
            if core.mode == self.mode and core.size == size:
                origin.keep(key, bytes_of(core))
            return core
        origin.check(stored, lambda: bytes_of(compute()))
        return LazyCore(Pixels.of(self.mode, raw_mode(self.mode), size, stored.array))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.real, name)


class _View(Image.Image):
    """An image as Pillow's methods see it, with its lazy core: they share the attributes."""

    __slots__ = ("_image",)
    _image: Any

    @classmethod
    def of(cls, image: Any) -> _View:
        view = cls.__new__(cls)
        view.__dict__ = vars(image)
        view._image = image
        return view

    def load(self) -> Any:
        return self._image.load() if lazy_core(self._image) is None else None

    @property  # type: ignore[misc]
    def im(self) -> Any:
        core: Any = self._im
        return core if type(core) is LazyCore else super().im


def lazy_core(image: Any) -> LazyCore | None:
    """The core of an image, if it is lazy; loads an opened image first."""
    attributes = vars(image)
    opened: Opened | None = attributes.get(OPENED)
    if opened is not None:
        opened.load(image)
    core = attributes.get("_im")
    return core if type(core) is LazyCore and core.pixels is not None else None


def _view(image: Any) -> Any:
    """A view, on which Pillow's methods run; methods of other classes could do something else."""
    return _View.of(image) if type(image).__module__.startswith("PIL.") else image


def is_possible() -> bool:
    """Whether the installed Pillow keeps cores as this module expects; it does from Pillow 11 on."""
    return isinstance(vars(Image.Image).get("im"), property) and "_im" in vars(Image.Image())


def patches() -> list[Patch]:
    """The methods of all images that need no core."""
    _install_im()
    wraps = {
        **dict.fromkeys(("copy", "crop", "resize", "reduce"), _on_view),
        "convert": _convert,
        "tobytes": _tobytes,
    }
    return [Patch(Image.Image, name, wrap) for name, wrap in wraps.items()]


class LazyMethod:
    """A method that is another one for images that could be lazy.

    For all others, and as an attribute of the class, it is Pillow's own, so a dataset that holds Pillow's
    function can be pickled.
    """

    def __init__(self, real: Callable[..., Any], lazy: Callable[..., Any]) -> None:
        self._real = real
        self._lazy = lazy

    def __get__(self, image: Any, owner: Any = None) -> Any:
        if image is None:
            return self._real
        attributes = image.__dict__
        if type(attributes.get("_im")) is LazyCore or OPENED in attributes:
            return MethodType(self._lazy, image)
        return MethodType(self._real, image)


def _on_view(real: Callable[..., Any]) -> LazyMethod:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return real(_view(self), *args, **kwargs)

    return LazyMethod(real, method)


def _convert(real: Callable[..., Any]) -> LazyMethod:
    def convert(self: Any, mode: Any = None, matrix: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_copy = matrix is None and (mode is None or (type(mode) is str and mode == self.mode))
        return real(_view(self) if is_copy else self, mode, matrix, *args, **kwargs)

    return LazyMethod(real, convert)


def _tobytes(real: Callable[..., Any]) -> LazyMethod:
    def tobytes(self: Any, encoder_name: Any = "raw", *args: Any) -> Any:
        if encoder_name == "raw" and not args:
            core = lazy_core(self)
            pixels = core and core.pixels
            content = pixels and pixels.tobytes()
            if content is not None:
                return content
        return real(self, encoder_name, *args)

    return LazyMethod(real, tobytes)


def _install_im() -> None:
    """Let `Image.im` make real cores; this stays, because lazy images can outlive all caches."""
    real: Any = vars(Image.Image)["im"]
    if getattr(real.fget, "makes_cores", False):
        return

    def im(self: Any) -> Any:
        core = self._im
        return core.real if type(core) is LazyCore else real.fget(self)

    im.makes_cores = True  # type: ignore[attr-defined]
    Image.Image.im = property(im, real.fset, real.fdel, real.__doc__)  # type: ignore[method-assign, assignment]
