"""Pillow images whose pixels are in a store: copied out only where, and when, something needs them.

A lazy image has a class of its own, which derives from the class that it stands for. `convert` to the same
mode, `copy`, `crop` and `numpy.asarray` take the pixels from the store. Anything else reads `_im`, Pillow's
own pixels: then they are copied out, and the image gets the class that it stands for. From then on it is a
plain Pillow image, with the attributes that it would have had. Rules:

1. What leaves the store is a private copy. A lazy image refers to the store's memory, which lives as long.
2. Becoming plain is atomic: the pixels are in place before the class changes, and threads take turns.
3. Bad arguments go to Pillow's own method, which raises its own error.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    import numpy.typing as npt

CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4, "CMYK": 4}  # of the modes that can be lazy: one byte each
_STATE = "_fastload"  # the attribute of an image that is not plain yet
_set_class = vars(object)["__class__"].__set__


class Pixels(NamedTuple):
    """A rectangle of stored pixels.

    Attributes:
        mode: Pillow's, one of `CHANNELS`.
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
    def of_array(cls, mode: str, array: npt.NDArray[np.uint8]) -> Pixels:
        """All pixels of a contiguous array `(H, W) uint8` or `(H, W, C) uint8`."""
        height, width = array.shape[:2]
        return cls(mode, (width, height), array.reshape(-1), 0, width * CHANNELS[mode])

    def crop(self, left: int, upper: int, right: int, lower: int) -> Pixels:
        """A rectangle inside this one."""
        offset = self.offset + upper * self.stride + left * CHANNELS[self.mode]
        return self._replace(size=(right - left, lower - upper), offset=offset)

    def tobytes(self) -> bytes:
        """A copy, row by row without gaps."""
        width, height = self.size
        shape, strides = (height, width * CHANNELS[self.mode]), (self.stride, 1)
        return np.ndarray(shape, np.uint8, self.memory, self.offset, strides).tobytes()

    def image(self) -> Image.Image:
        """A plain image with a copy."""
        width, height = self.size
        image = Image.new(self.mode, self.size, None)
        nbytes = (height - 1) * self.stride + width * CHANNELS[self.mode]
        rows: Any = memoryview(self.memory.data)[self.offset : self.offset + nbytes]
        image.frombytes(rows, "raw", self.mode, self.stride, 1)
        return image


class Pending(Protocol):
    """An opened file that is not loaded."""

    def load(self, image: Any) -> Pixels | None:
        """Load an image as far as its stored pixels; None: it became plain, and Pillow loads it if needed."""


class _State:
    """What a lazy image stands for: an opened file, then stored pixels."""

    def __init__(self, pending: Pending | None = None, pixels: Pixels | None = None) -> None:
        self.pending = pending
        self.pixels = pixels
        self.lock = threading.RLock()


class _Core:
    """The attribute `_im` of a lazy image."""

    def __get__(self, image: Any, owner: Any = None) -> Any:
        if image is None:
            return self
        core, state = vars(image).get("_im"), vars(image).get(_STATE)
        return core if core is not None or state is None or state.pixels is None else _materialized(image)

    def __set__(self, image: Any, core: Any) -> None:
        vars(image)["_im"] = core
        become_plain(image)


class _Lazy:
    """What is different in a lazy image; comes before the class that it stands for."""

    _im = _Core()
    _plain_class: type

    @property
    def __class__(self) -> Any:
        """The class that the image stands for."""
        return type(self)._plain_class

    @__class__.setter
    def __class__(self, cls: type) -> None:
        # Pillow makes an MPO of an opened JPEG this way.
        _set_class(self, lazy_class(cls) if _STATE in vars(self) else cls)

    def load(self) -> Any:
        _plain(self)
        return self.load()

    def convert(self, mode: Any = None, matrix: Any = None, *args: Any, **kwargs: Any) -> Any:
        if mode is None or (mode == self.mode and not matrix):  # type: ignore[attr-defined]
            pixels = _pixels(self)
            if pixels is not None:
                return _new(self, pixels)
        return _plain(self).convert(mode, matrix, *args, **kwargs)

    def copy(self) -> Any:
        pixels = _pixels(self)
        return _plain(self).copy() if pixels is None else _new(self, pixels)

    def crop(self, box: Any = None) -> Any:
        if box is not None and not _is_box(box):
            become_plain(self)  # Pillow raises before it loads
            return self.crop(box)
        if type(box) is tuple and len(box) == 4 and all(type(edge) in (int, float) for edge in box):
            left, upper, right, lower = (round(edge) for edge in box)
            width, height = self.size  # type: ignore[attr-defined]
            if 0 <= left < right <= width and 0 <= upper < lower <= height:
                pixels = _pixels(self)
                if pixels is not None:
                    Image._decompression_bomb_check((right - left, lower - upper))
                    return _new(self, pixels.crop(left, upper, right, lower))
        return _plain(self).crop(box)

    @property
    def __array_interface__(self) -> Any:
        pixels = _pixels(self)
        if pixels is None:
            return _plain(self).__array_interface__
        shape, typestr = Image._conv_type_shape(self)  # type: ignore[arg-type]
        return {"version": 3, "shape": shape, "typestr": typestr, "data": pixels.tobytes()}

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.load()
        return _plain(self).__reduce_ex__(protocol)


@functools.cache
def lazy_class(cls: Any) -> Any:
    """The class of lazy images that stand for images of a class."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_plain_class": cls}
    return type(cls)(cls.__name__, (_Lazy, cls), names)


def defer(image: Any, pending: Pending) -> None:
    """Let an opened image be loaded by ``pending`` when something needs its pixels."""
    vars(image)[_STATE] = _State(pending)
    cls: Any = type(image)
    _set_class(image, lazy_class(cls))


def become_plain(image: Any) -> None:
    """Give an image the class that it stands for."""
    vars(image).pop(_STATE, None)
    cls = type(image)
    if issubclass(cls, _Lazy):
        _set_class(image, cls._plain_class)


def without_lazy(sample: Any) -> Any:
    """The sample, whose lazy images are plain now: for code that asks for `type(image)`."""
    if isinstance(sample, _Lazy):
        state: _State | None = vars(sample).get(_STATE)
        if state is not None and state.pixels is not None:
            _materialized(sample)
        become_plain(sample)
    elif isinstance(sample, dict):
        for value in sample.values():
            without_lazy(value)
    elif isinstance(sample, (list, tuple)):
        for value in sample:
            without_lazy(value)
    return sample


def _pixels(image: Any) -> Pixels | None:
    """The stored pixels of a lazy image; None if it is plain, or becomes plain because it has none."""
    state: _State | None = vars(image).get(_STATE)
    if state is None:
        return None
    if state.pending is not None:
        with state.lock:
            pending = state.pending
            if pending is not None:
                state.pixels = pending.load(image)
                state.pending = None
    return state.pixels if vars(image).get("_im") is None else None


def _plain(image: Any) -> Any:
    """The image after it became plain; then it is loaded, or Pillow has to load it."""
    if _pixels(image) is not None:
        _materialized(image)
    become_plain(image)
    return image


def _materialized(image: Any) -> Any:
    """Pillow's own pixels of a lazy image, which becomes plain."""
    state: _State | None = vars(image).get(_STATE)
    if state is not None:
        with state.lock:
            if vars(image).get("_im") is None and state.pixels is not None:
                vars(image)["_im"] = state.pixels.image()._im
            become_plain(image)
    return vars(image)["_im"]


def _is_box(box: Any) -> bool:
    try:
        return bool(box[2] >= box[0] and box[3] >= box[1])
    except (TypeError, IndexError, KeyError, ValueError):
        return False


# The attributes of a new image, in every release of Pillow.
_NEW = {name: value for name, value in vars(Image.Image()).items() if name != "info"}
_LazyImage = lazy_class(Image.Image)


def _new(image: Any, pixels: Pixels) -> Any:
    """A lazy image with pixels of another one, and with its `info`, as Pillow's copies have."""
    new: Any = object.__new__(_LazyImage)
    vars(new).update(_NEW, _mode=pixels.mode, _size=pixels.size, info=_info(image))
    vars(new)[_STATE] = _State(pixels=pixels)
    return new


def _info(image: Any) -> dict[Any, Any]:
    copy_info = getattr(image, "_copy_info", None)  # since Pillow 12
    info: dict[Any, Any] = image.info.copy() if copy_info is None else copy_info()
    return info
