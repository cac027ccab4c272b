"""What all image transforms share: checks of arguments, the images of a batch, the memory of their results.

The layout is never guessed: if the shape fits both layouts, the user must name one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fastload.images.geometry import IMAGE_CHANNELS, fitting_layouts
from fastload.memory.lease import current_allocator
from fastload.nested.tree import map_device_leaves
from fastload.system.checks import check_size

LAYOUTS = ("auto", "HWC", "CHW")
# Tensors of these dtypes are NumPy's arrays, too.
NUMPY_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64),
)

_IMAGE_KEYS = ("image", "images")


def find_images(batch: Any, key: Any, asker: str, expected: str = "a tensor") -> tuple[str, torch.Tensor]:
    """Where the images are in a batch, for messages, and the images.

    Args:
        batch: A tensor, a sequence, or a mapping.
        key: An index, or the key of a mapping; None: the first of a sequence, or "image" or "images" in a
            mapping.
        asker: The subject of messages.
        expected: What messages say that images are.

    Raises:
        TypeError: There is no tensor in the images' place.
        ValueError: The batch has no such place.
    """
    where, images = _look_up(batch, key, asker)
    if not isinstance(images, torch.Tensor):
        raise TypeError(
            f"{asker} expects images as {expected} at {where}, but got {type(images).__name__}; pass a "
            f"different key=, or write a function that calls {asker} on the images of your batch"
        )
    return where, images


def _look_up(batch: Any, key: Any, asker: str) -> tuple[str, Any]:
    if isinstance(batch, torch.Tensor):
        if key is not None:
            raise ValueError(f"{asker} has key={key!r}, but the batch is a tensor; leave out key=")
        return "batch", batch
    if isinstance(batch, Mapping):
        if key is None:
            keys = [name for name in _IMAGE_KEYS if name in batch]
            if len(keys) != 1:
                raise ValueError(
                    f'{asker} expects "image" or "images" in a mapping, but got the keys '
                    f"{list(batch)}; pass the key of the images as key="
                )
            key = keys[0]
        elif key not in batch:
            raise ValueError(f"{asker} has key={key!r}, but the batch has the keys {list(batch)}")
        return f"batch[{key!r}]", batch[key]
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        index = 0 if key is None else key
        if not isinstance(index, int) or not -len(batch) <= index < len(batch):
            raise ValueError(f"{asker} has key={index!r}, but the batch is a sequence of {len(batch)}")
        return f"batch[{index}]", batch[index]
    return "batch", batch


def check_layout(layout: str) -> str:
    """``layout`` itself.

    Raises:
        ValueError: It is not in `LAYOUTS`.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout should be one of {', '.join(LAYOUTS)}, but got {layout!r}")
    return layout


def layout_of(images: torch.Tensor, where: str, layout: str, asker: str, num_channels: int = 0) -> str:
    """The layout of a batch of images: "HWC" or "CHW".

    Args:
        images: The batch.
        where: Its place, for messages.
        layout: What the user says, one of `LAYOUTS`.
        asker: The subject of messages.
        num_channels: How many channels images have; 0: "auto" means 1, 3 or 4, a named layout any number.

    Raises:
        ValueError: There are not four dimensions, or the shape fits no layout or both.
    """
    if layout != "auto" and not num_channels and images.ndim == 4:
        return layout
    shape = tuple(images.shape)
    channels = (num_channels,) if num_channels else IMAGE_CHANNELS
    if images.ndim != 4:
        raise ValueError(
            f"{asker} expects images of shape (B, H, W, C) or (B, C, H, W) at {where}, but got {shape}: it "
            "transforms whole batches; pass one image as image[None]"
        )
    fitting = fitting_layouts(shape, channels)
    named = [fit for fit in fitting if layout in (fit, "auto")]
    if len(named) != 1:
        cure = 'pass layout="HWC" or layout="CHW"'
        if num_channels and not fitting:
            cure = "its constants and the images should have equally many channels"
        raise ValueError(
            f"{asker} expects images of shape (B, H, W, C) or (B, C, H, W) at {where}, but got {shape}: with "
            f"{' or '.join(map(str, channels))} channels and layout={layout!r} it fits "
            f"{' and '.join(named) or 'neither'}; {cure}"
        )
    return named[0]


class ImageTransform(nn.Module):
    """Replaces the images of a batch with new ones of the same layout and dtype on the same device.

    Args:
        layout: The meaning of the dimensions: one of `LAYOUTS`.
        key: Where the images are in a batch: an index, or the key of a mapping.
    """

    def __init__(self, layout: str, key: Any) -> None:
        super().__init__()
        self.layout = check_layout(layout)
        self.key = key

    def forward(self, batch: Any) -> Any:
        """Transform the images of a batch; see the class."""
        asker = type(self).__name__
        where, images = find_images(batch, self.key, asker)
        is_hwc = layout_of(images, where, self.layout, asker) == "HWC"
        result = self._transformed(images if is_hwc else images.permute(0, 2, 3, 1), where)
        if not is_hwc:
            is_planar = images.is_contiguous()
            memory_format = torch.contiguous_format if is_planar else torch.channels_last
            result = result.permute(0, 3, 1, 2).contiguous(memory_format=memory_format)
        return map_device_leaves(batch, lambda leaf: result if leaf is images else leaf)

    def _transformed(self, pixels: torch.Tensor, where: str) -> torch.Tensor:
        """New images for ``(B, H, W, C)`` pixels of any strides, at ``where`` in the batch."""
        raise NotImplementedError


def new_images(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for a result: that of the batch, if this thread is making one on the CPU."""
    allocator = current_allocator()
    nbytes = math.prod(shape) * dtype.itemsize
    if allocator is None or device.type != "cpu" or not nbytes:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return torch.from_numpy(allocator.allocate(nbytes)).view(dtype).view(*shape)


def copied(pixels: torch.Tensor) -> torch.Tensor:
    """A copy of ``(B, H, W, C)`` pixels with dense strides in the same order, in memory of the batch."""
    is_planar = pixels.permute(0, 3, 1, 2).is_contiguous() and not pixels.is_contiguous()
    if is_planar:
        return torch.empty_like(pixels).copy_(pixels)
    return new_images(pixels.shape, pixels.dtype, pixels.device).copy_(pixels)


def fill_values(fill: float | Sequence[float], pixels: torch.Tensor) -> torch.Tensor:
    """``(C,)`` on the CPU: one value per channel of ``(B, H, W, C)`` pixels, in their dtype.

    Raises:
        ValueError: The pixels cannot have this value, or the number of channels differs.
    """
    num_channels = pixels.shape[3]
    exact = torch.as_tensor(fill, dtype=torch.float64, device="cpu")
    values = exact.to(pixels.dtype)
    is_exact = pixels.is_floating_point() or torch.equal(values.to(torch.float64), exact)
    if exact.shape not in ((), (num_channels,)) or not is_exact:
        raise ValueError(
            f"fill should be a value of {pixels.dtype}, or one for each of {num_channels} channels, but got "
            f"{fill!r}"
        )
    return values.expand(num_channels).contiguous()


# --- checks of arguments --------------------------------------------------------------------------------


def height_and_width(size: Any) -> tuple[int, int]:
    """Height and width from one or two ints; raises as `check_size`."""
    sides = check_size(size)
    return (sides, sides) if isinstance(sides, int) else sides


def range_of(name: str, values: Any, maximum: float = math.inf) -> tuple[float, float]:
    """Two positive numbers, the lower one first.

    Raises:
        ValueError: They are not.
    """
    try:
        low, high = (float(value) for value in values)
    except (TypeError, ValueError):
        low = high = math.nan
    if not (0 < low <= high <= maximum and high < math.inf):
        limit = "" if maximum == math.inf else f" and at most {maximum}"
        raise ValueError(
            f"{name} should be two numbers above 0{limit}, the lower one first, but got {values!r}"
        )
    return low, high


def probability(p: Any) -> float:
    """A number from 0 to 1.

    Raises:
        TypeError: It is not a number.
        ValueError: It is out of its range.
    """
    try:
        number = float(p)
    except (TypeError, ValueError):
        raise TypeError(f"p should be a probability from 0 to 1, but got {p!r:.200}") from None
    if not 0 <= number <= 1:
        raise ValueError(f"p should be a probability from 0 to 1, but got {p!r}")
    return number
