"""Pillow images whose pixels are in a store: copied out only where, and when, something needs them.

A lazy image is exactly what Pillow would have made, of the same class and with the same attributes; only its
core, `_im`, is a `LazyCore`. Whatever asks for the core by Pillow's property `im` gets a real one, made then.
`copy`, `crop`, `convert` to the same mode, and resizes do without it: Pillow's own methods run on a `_View`
of the image, which shows them the lazy core. So does `tobytes` (and `numpy.asarray`, and pickle). Rules:

1. What leaves the store is a private copy. A lazy core refers to the store's memory, which lives as long.
2. A lazy core makes one real core, which all threads get, and stays in its image: nothing is exchanged.
3. A lazy core belongs to one image, and an image with a palette has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from PIL import Image

from fastload.readers.original import REDUCE, Original, Pixels
from fastload.readers.patches import Patch

if TYPE_CHECKING:
    from collections.abc import Callable

OPENED = "_fastload"  # the attribute of an image that is opened, and can be loaded from a cache


def _is_size(size: Any) -> bool:
    """Whether it is a pair of positive numbers, which every version of the C code takes as they are."""
    return (
        type(size) is tuple
        and len(size) == 2
        and all(type(length) is int and 0 < length < 1 << 31 for length in size)
    )


class LazyCore:
    """Stands for the core of an image until something needs it, with the methods that need no core.

    Args:
        mode: Pillow's.
        size: Width and height.
        source: Where the pixels are.
    """

    readonly = 0

    def __init__(self, mode: str, size: Any, source: Pixels | Original) -> None:
        self.mode = mode
        self.size = size
        self.source: Pixels | Original | None = source

    @property
    def real(self) -> Any:
        """The real core, made when it is first asked for."""
        attributes, source = vars(self), self.source
        if source is not None:
            attributes.setdefault("_real", source.core())  # atomic: the first thread's counts
            self.source = None
        return attributes["_real"]

    @property
    def pixels(self) -> Pixels | None:
        """What is stored of it, if there is no real core."""
        source = self.source
        return source.pixels if isinstance(source, Original) else source

    def copy(self) -> Any:
        """A core of its own; lazy as this one."""
        source = self.source
        if source is None:
            return self.real.copy()
        return LazyCore(self.mode, self.size, source.copy() if isinstance(source, Original) else source)

    def crop(self, box: tuple[int, int, int, int]) -> Any:
        """A core of its own with a rectangle; lazy if the rectangle is inside, and the pixels are stored."""
        pixels, (left, upper, right, lower) = self.pixels, box
        if box == (0, 0, *self.size):
            return self.copy()
        is_inside = 0 <= left < right <= self.size[0] and 0 <= upper < lower <= self.size[1]
        if pixels is None or not is_inside:
            return self.real.crop(box)
        return LazyCore(self.mode, (right - left, lower - upper), pixels.crop(*box))

    def resize(self, size: Any, resample: Any, box: Any) -> Any:
        """A resized core; lazy if it is remembered."""
        filter_ = resample.value if type(resample) is Image.Resampling else resample
        # A draft is rounded up, so the box of a thumbnail may end in its last pixels.
        is_whole = (
            type(box) is tuple
            and [*box[:2]] == [0, 0]
            and all(0 <= length - edge < 1 for length, edge in zip(self.size, box[2:], strict=False))
        )
        is_plain = is_whole and _is_size(size) and type(filter_) is int and 0 <= filter_ < REDUCE
        return self._resized(size if is_plain else None, filter_, "resize", size, filter_, box)

    def reduce(self, factor: Any, box: Any) -> Any:
        """A reduced core; lazy if it is remembered."""
        is_plain = type(box) is tuple and box == (0, 0, *self.size) and _is_size(factor)
        lengths = zip(self.size, factor, strict=True) if is_plain else ()
        size = tuple(-(-length // times) for length, times in lengths)
        return self._resized(size or None, REDUCE, "reduce", factor, box)

    def _resized(self, size: Any, method: Any, name: str, *arguments: Any) -> Any:
        """The core of this size that a method of the real core returns; None: do not remember it."""
        source = self.source
        if size is None or type(source) is not Original:
            return getattr(self.real, name)(*arguments)
        result = source.resized(self.mode, size, method, name, arguments)
        return LazyCore(self.mode, size, result) if type(result) is Pixels else result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.real, name)


class _View(Image.Image):
    """An image as Pillow's methods see it, with its lazy core: they share the attributes."""

    __slots__ = ("_image",)
    _image: Any
    # Methods of Pillow call these, which then see it, too.
    convert, copy = Image.Image.convert, Image.Image.copy

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
    opened = attributes.get(OPENED)
    if opened is not None:
        opened.load(image)
    core = attributes.get("_im")
    return core if type(core) is LazyCore and core.source is not None else None


def _is_pillows(image: Any) -> bool:
    """Whether its methods are Pillow's; those of other classes could do something else."""
    return type(image).__module__.startswith("PIL.")


def is_possible() -> bool:
    """Whether the installed Pillow keeps cores as this module expects."""
    return isinstance(vars(Image.Image).get("im"), property) and "_im" in vars(Image.Image())


def patches() -> list[Patch]:
    """The methods of all images that need no core."""
    _install_im()
    whole = [Patch(Image.Image, name, _on_view, _is_whole) for name in ("reduce", "resize")]
    methods = [Patch(Image.Image, name, _on_view, is_lazy) for name in ("convert", "copy", "crop")]
    return [*whole, *methods, Patch(Image.Image, "tobytes", _tobytes, is_lazy)]


def is_lazy(image: Any) -> bool:
    """Whether an image has a lazy core, or could have one once it is loaded."""
    attributes = image.__dict__
    return type(attributes.get("_im")) is LazyCore or OPENED in attributes


def _is_whole(image: Any) -> bool:
    """The same, of all its pixels: for methods that always need the core of a crop."""
    attributes = image.__dict__
    core = attributes.get("_im")
    return (type(core) is LazyCore and type(core.source) is Original) or OPENED in attributes


def _on_view(real: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return real(_View.of(self) if _is_pillows(self) else self, *args, **kwargs)

    return method


def _tobytes(real: Callable[..., Any]) -> Callable[..., Any]:
    def tobytes(self: Any, encoder_name: Any = "raw", *args: Any) -> Any:
        if encoder_name == "raw" and not args:
            core = lazy_core(self)
            pixels = core and core.pixels
            if pixels:
                return pixels.tobytes()
        return real(self, encoder_name, *args)

    return tobytes


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
