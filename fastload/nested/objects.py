"""Objects that a sample can hold, as plain values and back: Pillow's images and torchvision's tv_tensors.

The set is closed: a file names an object of the table below, and only that library is imported to read it.
Rules:

1. An image comes back as `image.copy()` gives it: a plain `PIL.Image.Image` with its mode, size, pixels,
   palette and `info`. It has no file and no format. Of `info`, numbers, texts, bytes and None under names are
   kept, and lists, tuples and dicts of these: EXIF data, transparency, color profiles.
2. A tv_tensor comes back in its class, with its attributes. One that carries other attributes, and a subclass
   of the user's, is refused: they would be lost.
3. What comes back is private: pixels are copied.
"""

from __future__ import annotations

import importlib
import numbers
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastload.errors import CacheCorruptError, CacheError, UnsupportedSampleError

if TYPE_CHECKING:
    from collections.abc import Callable


class KnownObject(NamedTuple):
    """How objects of one class are taken apart and put together.

    Attributes:
        name: In files: the module that is imported to put them together, a colon, and the class.
        take_apart: Returns the parts of an object, by name; the first one is an array or a tensor.
        put_together: Returns the object, from the class that `name` says and the parts.
    """

    name: str
    take_apart: Callable[[Any], dict[str, Any]]
    put_together: Callable[[Any, dict[str, Any]], Any]


# --- Pillow's images --------------------------------------------------------------------------------------

# In these, the bytes of `tobytes` are all there is of an image, beside its palette.
_MODES = frozenset(
    {
        *("1", "L", "P", "LA", "PA", "La", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"),
        *("I", "F", "I;16", "I;16L", "I;16B", "I;16N"),
    }
)
_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})
_LEFT_OUT = object()


def _parts_of_image(image: Any) -> dict[str, Any]:
    if image.format != "MPO" and getattr(image, "is_animated", False):  # MPO: a photograph, and its preview
        raise UnsupportedSampleError("an image of several frames cannot be cached: return image.copy()")
    image.load()
    mode, (width, height) = image.mode, image.size
    if mode not in _MODES:
        raise UnsupportedSampleError(f'an image of mode {mode} cannot be cached: return image.convert("RGB")')
    pixels = np.frombuffer(image.tobytes(), np.uint8)
    shape = (height, width, 3) if mode == "RGB" else (height, pixels.size // max(1, height))
    return {
        "pixels": pixels.reshape(shape),
        "mode": mode,
        "size": (width, height),
        "palette": _palette_of(image) if mode in ("P", "PA") else None,
        "info": _plain(image.info),
    }


def _palette_of(image: Any) -> tuple[Any, ...]:
    """The palette of the pixels, and that of the object in Python, which can be shorter."""
    core_mode = image.im.getpalettemode()
    palette = image.palette
    return (
        core_mode,
        bytes(image.im.getpalette(core_mode, core_mode)),
        None if palette is None else palette.mode,
        b"" if palette is None else palette.tobytes(),
    )


def _plain(value: Any) -> Any:
    """A value of plain types; `_LEFT_OUT` if it cannot be one."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, numbers.Real):  # a fraction of a TIFF
        return float(value)
    if isinstance(value, (list, tuple)):
        parts = [_plain(part) for part in value]
        is_whole = all(part is not _LEFT_OUT for part in parts)
        return (parts if isinstance(value, list) else tuple(parts)) if is_whole else _LEFT_OUT
    if isinstance(value, dict):
        entries = {name: _plain(part) for name, part in value.items() if type(name) is str}
        return {name: part for name, part in entries.items() if part is not _LEFT_OUT}
    return _LEFT_OUT


def _image_of(_: type, parts: dict[str, Any]) -> Any:
    from PIL import Image, ImagePalette

    pixels, mode, size = parts["pixels"], parts["mode"], parts["size"]
    if mode not in _MODES:
        raise ValueError(f"an image of mode {mode!r}")
    width, height = size
    if pixels.shape[0] != height or 8 * pixels.nbytes < width * height:  # before memory is taken
        raise ValueError(f"{pixels.nbytes:,} bytes are no image of {width:,} x {height:,} pixels")
    image = Image.new(mode, size, None)
    image.frombytes(pixels)
    image.info = parts["info"]
    if parts["palette"] is not None:
        core_mode, content, palette_mode, palette = parts["palette"]
        image.im.putpalette(core_mode, core_mode, content)
        image.palette = None if palette_mode is None else ImagePalette.ImagePalette(palette_mode, palette)
    return image


# --- torchvision's tv_tensors -----------------------------------------------------------------------------

# The attributes that each class has beside those of a tensor.
_TV_TENSORS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("Image", "Mask", "Video"), ()),
    "BoundingBoxes": ("format", "canvas_size", "clamping_mode"),
    "KeyPoints": ("canvas_size",),
}


def _parts_of_tensor(tensor: Any) -> dict[str, Any]:
    attributes = dict(vars(tensor))
    unknown = attributes.keys() - _TV_TENSORS[type(tensor).__name__]
    if unknown:
        names = ", ".join(sorted(unknown))
        raise UnsupportedSampleError(
            f"a {type(tensor).__name__} of torchvision with the attributes {names} cannot be cached: "
            "return them as values of the sample, beside it"
        )
    if "format" in attributes:
        attributes["format"] = attributes["format"].name
    if isinstance(attributes.get("canvas_size"), tuple):  # torch.Size is one
        attributes["canvas_size"] = tuple(attributes["canvas_size"])
    from fastload.system.torch_private import plain_tensor  # here: it imports torch

    return {"data": plain_tensor(tensor), **attributes}


def _tensor_of(cls: Any, parts: dict[str, Any]) -> Any:
    data = parts.pop("data")
    tensor = data.as_subclass(cls)
    if "format" in parts:
        parts["format"] = sys.modules[cls.__module__].BoundingBoxFormat[parts["format"]]
    if not parts.keys() <= {*_TV_TENSORS[cls.__name__]}:
        raise ValueError(f"a {cls.__name__} with {sorted(parts)}")
    vars(tensor).update(parts)
    return tensor


# --- the table --------------------------------------------------------------------------------------------

_IMAGE = KnownObject("PIL.Image:Image", _parts_of_image, _image_of)
_OBJECTS = {
    known.name: known
    for known in (
        _IMAGE,
        *(
            KnownObject(f"torchvision.tv_tensors:{name}", _parts_of_tensor, _tensor_of)
            for name in _TV_TENSORS
        ),
    )
}
NAMES = frozenset(_OBJECTS)


@lru_cache(maxsize=1024)
def known_object(cls: Any) -> KnownObject | None:
    """How objects of exactly this class are taken apart; None if they are not known."""
    package = cls.__module__.partition(".")[0]
    if package == "torchvision":
        is_public = cls.__module__.startswith("torchvision.tv_tensors.")
        return _OBJECTS.get(f"torchvision.tv_tensors:{cls.__name__}") if is_public else None
    image: Any = sys.modules.get("PIL.Image")
    if image is None or not issubclass(cls, image.Image):
        return None
    # Pillow's own, and what other packages have registered to open files.
    opener = image.OPEN.get(cls.format, (None,))[0] if cls is not image.Image else None
    return _IMAGE if package == "PIL" or opener is cls else None


def put_together(name: str, parts: Any) -> Any:
    """The object of these parts.

    Raises:
        CacheError: Its library cannot be imported.
        CacheCorruptError: The parts are not those of such an object.
    """
    module, _, class_name = name.partition(":")
    try:
        cls = getattr(importlib.import_module(module), class_name)
    except Exception as error:  # torchvision raises a RuntimeError beside another release of torch
        raise CacheError(
            f"a cached sample holds a {class_name} of {module}, which cannot be imported here: {error}. "
            f"Install {module.partition('.')[0]}, in the release that the cache was filled with"
        ) from error
    try:
        return _OBJECTS[name].put_together(cls, parts)
    except CacheError:
        raise
    except Exception as error:  # Pillow raises many types of errors
        raise CacheCorruptError(f"a record's {class_name} of {module} cannot be read: {error}") from error
