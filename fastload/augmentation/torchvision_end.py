"""The end of torchvision's pipelines, in a fraction of its time: ToTensor, Normalize, and their likes.

To make floats of an image, torchvision writes it five times, to fresh memory, and pixel by pixel where the
channels are not planes. Here the bytes of a Pillow image are written to the memory of the result once, and
the same operations follow in place, along planes or whole rows. They are met at `Compose`, v1's and v2's,
which calls all other steps as usual. Rules:

1. The result has the same bits, type and strides: the same operations, in the same order. For each sequence
   of steps, that is tried once, on all 256 levels of each channel.
2. Arguments such as `Normalize.mean` are read at every call. Nothing is written into objects of the user.
3. This is for steps as torchvision made them. A subclass, a class or function that other code has replaced,
   a module with hooks, and what is no plain image take the ordinary way. So does whatever would raise.
4. An image in a container, or beside its target, takes the ordinary way through v2's steps.
5. A plain image is Pillow's in RGB or L, an `(H, W, 3) uint8` array, or a `(3, H, W) uint8` tensor whose
   channels come last in memory, as those of Pillow's images do. Of planes, the steps take no longer.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from fastload.readers.patches import package_of
from fastload.readers.results import memory_of
from fastload.system.torch_private import has_hooks_or_modes, plain_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

_V1, _V2 = "torchvision.transforms", "torchvision.transforms.v2"
_BANDS = {"RGB": ("R", "G", "B"), "L": ("L",)}
_MIN_PIXELS = 4096  # to ask what the steps are takes as long as is gained on less
_NUM_AXES, _NUM_COLORS = 3, 3
_MIN_SIDE = 2  # the stride along a side of one pixel is arbitrary
_NUM_LEVELS = 256
_TINY, _MAX = 1e-37, 2.0**53  # beyond, torch and NumPy can make other floats of a number


def composed(steps: Any, value: Any) -> Any:
    """What the steps make of a value, one after another."""
    if type(steps) not in (list, tuple):
        for step in steps:
            value = step(value)
        return value
    number = 0
    while number < len(steps):  # as a loop over them: a step can change the list
        fused = _fused(steps, number, value)
        if fused is not None:
            value, number = fused
        else:
            value = steps[number](value)
            number += 1
    return value


# --- what steps do ----------------------------------------------------------------------------------------

# What classes do, by module and name, and the function that does it.
# "planes": to scaled floats, in planes. "rows", "image": to bytes, in rows; the latter as a tv_tensors.Image.
_STEPS = {
    (f"{_V1}.transforms", "ToTensor"): ("planes", (f"{_V1}.functional", "to_tensor")),
    ("timm.data.transforms", "MaybeToTensor"): ("planes", (f"{_V1}.functional", "to_tensor")),
    (f"{_V2}._deprecated", "ToTensor"): ("planes", (f"{_V1}.functional", "to_tensor")),
    (f"{_V1}.transforms", "PILToTensor"): ("rows", (f"{_V1}.functional", "pil_to_tensor")),
    (f"{_V2}._type_conversion", "PILToTensor"): ("rows", (f"{_V2}.functional", "pil_to_tensor")),
    (f"{_V2}._type_conversion", "ToImage"): ("image", (f"{_V2}.functional", "to_image")),
    (f"{_V1}.transforms", "ConvertImageDtype"): ("divide", (f"{_V1}.functional", "convert_image_dtype")),
    (f"{_V2}._misc", "ConvertImageDtype"): ("multiply", (f"{_V2}.functional", "to_dtype")),
    (f"{_V2}._misc", "ToDtype"): ("multiply", (f"{_V2}.functional", "to_dtype")),
    (f"{_V1}.transforms", "Normalize"): ("normalize", (f"{_V1}.functional", "normalize")),
    (f"{_V2}._misc", "Normalize"): ("normalize v2", (f"{_V2}.functional", "normalize")),
    (f"{_V2}._type_conversion", "ToPureTensor"): ("pure", None),
}
_BEGIN, _OF_ARRAYS = frozenset({"planes", "rows", "image"}), frozenset({"planes", "image"})
_SCALES = frozenset({"divide", "multiply"})
_ATTRIBUTES = {
    "ConvertImageDtype": {"dtype"},
    "ToDtype": {"dtype", "scale"},
    "Normalize": {"mean", "std", "inplace"},
}
_METHODS = (
    *("__call__", "_call_impl", "__getattr__", "forward", "transform"),
    *("check_inputs", "make_params", "_call_kernel", "_needs_transform_list"),
)
_HOOKS = ("_backward_pre_hooks", "_backward_hooks", "_forward_pre_hooks", "_forward_hooks")


class _Class(NamedTuple):
    """A class of steps, as its library made it.

    Attributes:
        does: What its steps do.
        attributes: Those of an instance that was not changed.
        hooks: Those of them that must be empty.
        functions: What a step calls, with owners and names.
    """

    does: str
    attributes: frozenset[str]
    hooks: tuple[str, ...]
    owners: tuple[Any, ...]
    names: tuple[str, ...]
    functions: tuple[Any, ...]

    @classmethod
    def of(cls, kind: type) -> _Class | None:
        """None for a class that is no step of an end, or that other code has changed."""
        does, function = _STEPS.get((kind.__module__, kind.__qualname__), ("", None))
        if not does:
            return None
        is_module = issubclass(kind, torch.nn.Module)
        attributes = {*(vars(torch.nn.Module()) if is_module else ()), *_ATTRIBUTES.get(kind.__name__, ())}
        places: list[tuple[Any, str]] = [(kind, name) for name in _METHODS if hasattr(kind, name)]
        places += [] if function is None else [(sys.modules[function[0]], function[1])]
        functions = tuple(getattr(owner, name) for owner, name in places)
        if not all(package_of(value) in ("torch", "torchvision", "timm") for value in functions):
            return None
        owners, names = tuple(owner for owner, _ in places), tuple(name for _, name in places)
        return cls(does, frozenset(attributes), _HOOKS if is_module else (), owners, names, functions)

    @property
    def is_current(self) -> bool:
        """Whether a step still calls these functions."""
        current = map(getattr, self.owners, self.names, itertools.repeat(None))
        return all(map(operator.is_, current, self.functions))

    def made(self, step: Any) -> bool:
        """Whether a step of this class is as it was made."""
        attributes = vars(step)
        return attributes.keys() == self.attributes and not any(map(attributes.get, self.hooks))


_classes: dict[type, _Class] = {}
_tried: dict[Any, bool] = {}  # whether an end of some steps gives what the steps give


def _class_of(kind: type) -> _Class | None:
    known = _classes.get(kind)
    if known is not None and known.is_current:
        return known
    found = _Class.of(kind)
    if found is not None:
        _tried.clear()
        _classes[kind] = found
    return found


class _End(NamedTuple):
    """Steps that are done at once.

    Attributes:
        steps: What each does; with them, all but the numbers is known.
        mean: Of the channels, or of all; empty: the image is not normalized.
        std: The same.
    """

    steps: tuple[str, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


def _end_at(
    steps: Sequence[Any],
    number: int,
    num_channels: int,
    begun: tuple[str, ...] = (),
) -> _End | None:
    """The longest end that begins with a step, after what was begun; None if there is none of use."""
    does = [*begun]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    for step in steps[number:]:
        known = _class_of(type(step))
        if known is None or (known.does in _BEGIN) != (not does) or not known.made(step):
            break
        is_image, is_float = does[:1] == ["image"], does[:1] == ["planes"] or len(does) > 1
        if known.does in _SCALES:
            # v1's steps know nothing of tv_tensors
            if is_float or (is_image and known.does == "divide") or step.dtype is not torch.float32:
                break
            if getattr(step, "scale", True) is not True:
                break
        elif known.does in ("normalize", "normalize v2"):
            if not is_float or mean or (is_image and known.does == "normalize") or "pure" in does:
                break
            if not (_is_usable(step.mean, num_channels) and _is_usable(step.std, num_channels)):
                break
            if min(map(abs, step.std)) < _TINY:
                break  # it can raise
            mean, std = tuple(step.mean), tuple(step.std)
        elif known.does == "pure" and not is_float:
            break
        does.append(known.does)
    is_float = does[:1] == ["planes"] or len(does) > 1
    return _End(tuple(does), mean, std) if is_float else None


def _is_usable(numbers: Any, num_channels: int) -> bool:
    return (
        type(numbers) in (list, tuple)
        and len(numbers) in (1, num_channels)
        and all(isinstance(number, (int, float)) and abs(number) < _MAX for number in numbers)
    )


# --- doing it ---------------------------------------------------------------------------------------------


class _Source(NamedTuple):
    """What an end begins with.

    Attributes:
        kind: "RGB" or "L" of Pillow, "array", "Tensor", or "Image" of torchvision.
        is_dense: Whether a tensor has no gaps.
        size: Channels, height and width.
    """

    kind: str
    is_dense: bool
    size: tuple[int, int, int]

    @classmethod
    def of(cls, value: Any, does: str) -> _Source | None:
        """None for what is no plain image for a step that does this."""
        kind = type(value)
        if kind is Image.Image:
            mode, (width, height) = value.mode, value.size
            return cls(mode, True, (len(mode), height, width)) if does in _BEGIN and mode in _BANDS else None
        if kind is np.ndarray:
            if does not in _OF_ARRAYS or value.dtype != np.uint8 or value.shape[2:] != (_NUM_COLORS,):
                return None
            if not value.flags.writeable or min(value.strides) < 0:
                return None  # torch warns, or raises
            return cls("array", True, (_NUM_COLORS, *value.shape[:2]))
        if does not in _SCALES or (kind is not torch.Tensor and kind is not _class_of_images()):
            return None
        plain = value if kind is torch.Tensor else plain_tensor(value)
        if plain.dtype is not torch.uint8 or plain.layout is not torch.strided or plain.is_nested:
            return None
        if plain.is_contiguous() or plain.dim() != _NUM_AXES or plain.device.type != "cpu":
            return None
        (channels, height, width), (by_channel, by_row, by_pixel) = plain.shape, plain.stride()
        row = width * channels
        if channels != _NUM_COLORS or (by_channel, by_pixel) != (1, channels) or by_row < row:
            return None
        return cls(kind.__name__, by_row == row, (channels, height, width))

    @property
    def begun(self) -> tuple[str, ...]:
        """What was done already."""
        return {"Tensor": ("rows",), "Image": ("image",)}.get(self.kind, ())


def _class_of_images() -> Any:
    """torchvision's, of tensors; None where it is not imported."""
    return getattr(sys.modules.get("torchvision.tv_tensors"), "Image", None)


def _fused(steps: Sequence[Any], number: int, value: Any) -> tuple[Any, int] | None:
    """What the end that begins with a step makes of an image, and the number of the step after it.

    None if the step is to be called.
    """
    known = _class_of(type(steps[number]))
    source = None if known is None else _Source.of(value, known.does)
    if source is None:
        return None
    channels, height, width = source.size
    if width * height < _MIN_PIXELS or min(width, height) < _MIN_SIDE:
        return None
    if torch.get_default_dtype() is not torch.float32 or has_hooks_or_modes():
        return None
    begun = source.begun
    end = _end_at(steps, number, channels, begun)
    if end is None or (begun and not end.mean):  # to scale takes the step no longer
        return None
    stop = number + len(end.steps) - len(begun)
    key = source[:2], end.steps, len(end.mean), len(end.std), *(type(step) for step in steps[number:stop])
    if key not in _tried:
        _tried[key] = _is_equal(steps[number:stop], end, source)
    return (_computed(end, source, value), stop) if _tried[key] else None


def _computed(end: _End, source: _Source, value: Any) -> torch.Tensor:
    """The floats of an image, `(C, H, W) float32`, in memory of their own."""
    (channels, height, width), kind = source.size, source.kind
    result: torch.Tensor
    if kind == "array" or (end.steps[0] == "planes" and channels > 1):
        result = work = torch.empty(source.size, dtype=torch.float32, device="cpu")
        floats = memory_of(result).view(np.float32).reshape(source.size)
        if kind == "array":
            np.copyto(floats, value.transpose(2, 0, 1))
        elif kind in _BANDS:
            for plane, band in zip(floats.reshape(channels, -1), _BANDS[kind], strict=True):
                np.copyto(plane, np.frombuffer(value.tobytes("raw", band), np.uint8))
        shape: tuple[int, ...] = channels, 1, 1
    else:
        strides = (1, channels * width, channels)
        result = torch.empty_strided(source.size, strides, dtype=torch.float32, device="cpu")
        work = result.permute(1, 2, 0).view(height, width * channels)
        if kind in _BANDS:
            np.copyto(memory_of(result).view(np.float32), np.frombuffer(value.tobytes(), np.uint8))
        shape = (width * channels,)  # the loops along a row are long
    if source.begun:
        result.copy_(plain_tensor(value))
    # A number of Python takes torch longer than a tensor.
    if "multiply" in end.steps:
        work.mul_(torch.from_numpy(_operand((1.0 / 255,), shape)))
    else:
        work.div_(torch.from_numpy(_operand((255.0,), shape)))
    if end.mean:
        work.sub_(torch.from_numpy(_operand(end.mean, shape)))
        work.div_(torch.from_numpy(_operand(end.std, shape)))
    if end.steps[0] == "image" and "pure" not in end.steps:
        result = result.as_subclass(_class_of_images())
    return result


@functools.lru_cache(maxsize=64)
def _operand(numbers: tuple[float, ...], shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Numbers of the channels, repeated to this shape."""
    return np.resize(np.array(numbers, np.float32), shape)


def _is_equal(steps: Sequence[Any], end: _End, source: _Source) -> bool:
    """Whether the steps make of all levels what their end makes of them."""
    levels = np.arange(_NUM_LEVELS, dtype=np.uint8).reshape(8, -1)
    value = expected = _like(source, [np.roll(levels, 85 * number) for number in range(source.size[0])])
    try:
        for step in steps:
            expected = step(expected)
        result = _computed(end, source._replace(size=(source.size[0], *levels.shape)), value)
    except Exception:  # noqa: BLE001  # the steps raise it again
        return False
    return _facts(result) == _facts(expected)


def _like(source: _Source, planes: list[npt.NDArray[np.uint8]]) -> Any:
    """An image of these planes, like the source of an end in all but its size."""
    pixels = np.stack(planes, axis=2)
    if source.kind == "array":
        return pixels
    if source.kind in _BANDS:
        return Image.fromarray(pixels if len(planes) > 1 else planes[0])
    tensor = torch.from_numpy(pixels if source.is_dense else np.repeat(pixels, 2, 1)).permute(2, 0, 1)
    tensor = tensor[..., : pixels.shape[1]]
    return tensor.as_subclass(_class_of_images()) if source.kind == "Image" else tensor


def _facts(tensor: Any) -> tuple[Any, ...]:
    plain = tensor.as_subclass(torch.Tensor)
    facts = type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad
    return *facts, plain.contiguous().numpy().tobytes()
