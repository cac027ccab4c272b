"""Random crops and flips of whole batches, each image with its own parameters, on the device of the batch.

1. The parameters are drawn on the host for all images at once (rng/batch_draws.py), and reach the device in
   one asynchronous copy.
2. No operation makes the host wait for the device.
3. Inside a loader the draws follow the rules of its `seeding=`; elsewhere they come from torch's default
   generator.
4. The results are the same in every pixel on every device; those of `RandomResizedCrop` within one gray
   level.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.device.devices import copy_parameters
from fastload.rng.batch_draws import draw_uniforms
from fastload.system.checks import as_int
from fastload.transforms.boxes import NUM_DRAWS, draw_boxes
from fastload.transforms.image_transform import (
    NUMPY_DTYPES,
    ImageTransform,
    copied,
    fill_values,
    height_and_width,
    new_images,
    probability,
    range_of,
)
from fastload.transforms.resample import resample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class RandomResizedCrop(ImageTransform):
    """Crops a random box from each image of a batch and resizes it: torchvision's and albumentations' crop.

    Takes ``(B, H, W, C)`` or ``(B, C, H, W)`` images, uint8 or floats, with any strides; returns a new batch
    in the same layout and dtype on the same device, ``(B, h, w, C)`` or ``(B, C, h, w)``, which the caller
    owns. The boxes have the distribution of albumentations' RandomResizedCrop, and the pixels are those of
    its bilinear interpolation (without antialiasing) within one gray level. Masks and bounding boxes are not
    supported, and gradients do not flow back. The module has no parameters and no state_dict entry, and can
    be pickled.

    As a `device_transform` of a `fastload.DataLoader`, it follows the loader's ``seeding=``; elsewhere each
    call takes one number from torch's default generator.

    If the batch is not a tensor, the result is a new batch of its type with the images replaced. The images
    are the first element of a list or tuple (also a namedtuple), the value of "image" or "images" in a
    mapping, or the value at ``key``. All other values of the batch are passed on unchanged.

    Args:
        size: Height and width of the results in pixels; an int stands for both.
        scale: The minimum and maximum area of a box, as shares of the image's area.
        ratio: The minimum and maximum ratio of a box's width to its height.
        layout: The meaning of the dimensions: "HWC", "CHW", or "auto": the layout whose C is 1, 3 or 4.
        key: Where the images are in a batch: an index, or the key of a mapping.

    Raises:
        TypeError: ``size`` is not an int or two ints; or, when called, there is no tensor of uint8 or floats
            in the images' place.
        ValueError: An argument is out of its range; or, when called, the shape fits no layout or both, or the
            images have no pixels, or the batch has no ``key``, or neither or both of "image" and "images".
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        *,
        layout: str = "auto",
        key: Any = None,
    ) -> None:
        super().__init__(layout, key)
        self.size = height_and_width(size)
        self.scale = range_of("scale", scale, maximum=1)
        self.ratio = range_of("ratio", ratio)

    def extra_repr(self) -> str:
        """The arguments, for the module's repr."""
        return f"size={self.size}, scale={self.scale}, ratio={self.ratio}"

    def _transformed(self, pixels: torch.Tensor, where: str) -> torch.Tensor:
        if pixels.dtype != torch.uint8 and not pixels.is_floating_point():
            raise TypeError(
                f"RandomResizedCrop expects images of uint8 or floats at {where}, but got {pixels.dtype}"
            )
        num_images, height, width, _ = pixels.shape
        _expect_pixels(self, pixels)
        boxes = draw_boxes(draw_uniforms(num_images, NUM_DRAWS), (height, width), self.scale, self.ratio)
        return resample(pixels, boxes, self.size)


class RandomCrop(ImageTransform):
    """Crops a random box of one size from each image of a batch, after padding: torchvision's transform.

    Takes ``(B, H, W, C)`` or ``(B, C, H, W)`` images of any dtype and strides; returns a new batch of the
    same layout and dtype on the same device, ``(B, h, w, C)`` or ``(B, C, h, w)``, which the caller owns.
    Random numbers and the images of a batch come from the same places as in `RandomResizedCrop`.

    Args:
        size: Height and width of the results in pixels; an int stands for both.
        padding: Pixels added on each side before the crop.
        padding_mode: "constant": added pixels have the value ``fill``; "reflect": they mirror the image,
            without its edge.
        fill: The value of added pixels: a number, or one per channel.
        layout: The meaning of the dimensions: "HWC", "CHW", or "auto": the layout whose C is 1, 3 or 4.
        key: Where the images are in a batch: an index, or the key of a mapping.

    Raises:
        TypeError: ``size`` or ``padding`` is not made of ints; or, when called, there is no tensor in the
            images' place.
        ValueError: An argument is out of its range; or, when called, the box is larger than the padded image,
            the images are smaller than their reflection or cannot have the value ``fill``, the shape fits no
            layout or both, or the batch has no ``key``, or neither or both of "image" and "images".
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        padding: int = 0,
        *,
        padding_mode: str = "constant",
        fill: float | Sequence[float] = 0,
        layout: str = "auto",
        key: Any = None,
    ) -> None:
        super().__init__(layout, key)
        self.size = height_and_width(size)
        self.padding = as_int("padding", padding)
        if self.padding < 0:
            raise ValueError(f"padding should be at least 0 pixels, but got {padding}")
        if padding_mode not in ("constant", "reflect"):
            raise ValueError(f'padding_mode should be "constant" or "reflect", but got {padding_mode!r}')
        self.padding_mode = padding_mode
        self.fill = fill

    def extra_repr(self) -> str:
        """The arguments, for the module's repr."""
        return f"size={self.size}, padding={self.padding}, padding_mode={self.padding_mode}"

    def _transformed(self, pixels: torch.Tensor, where: str) -> torch.Tensor:
        num_images, height, width, _ = pixels.shape
        _expect_pixels(self, pixels)
        room = [side + 2 * self.padding - size for side, size in zip((height, width), self.size, strict=True)]
        if min(room) < 0:
            raise ValueError(
                f"RandomCrop expects images of at least {self.size[0]} x {self.size[1]} pixels with their "
                f"padding at {where}, but got {height} x {width} pixels and a padding of {self.padding}"
            )
        reflects = self.padding_mode == "reflect"
        if reflects and self.padding >= min(height, width):
            raise ValueError(
                f"RandomCrop reflects images larger than their padding, but got {height} x {width} pixels at "
                f"{where} and a padding of {self.padding}"
            )
        draws = draw_uniforms(num_images, 2)
        tops, lefts = (np.floor(draws[i] * (room[i] + 1)).astype(np.int64) for i in (0, 1))
        fill = None if reflects or not self.padding else fill_values(self.fill, pixels)
        if pixels.device.type == "cpu" and pixels.dtype in NUMPY_DTYPES:
            return _cut(pixels, tops, lefts, self.size, self.padding, fill)
        corners = copy_parameters(torch.from_numpy(np.stack([tops, lefts]) - self.padding), pixels.device)
        return _gathered(pixels, corners[0], corners[1], self.size, fill)


def _cut(
    pixels: torch.Tensor,
    tops: NDArray[np.int64],
    lefts: NDArray[np.int64],
    size: tuple[int, int],
    padding: int,
    fill: torch.Tensor | None,
) -> torch.Tensor:
    """Boxes of padded images, on the CPU.

    A row of a box is one item of a self-overlapping array, so one indexing operation copies whole rows: for
    32 x 32 images, in a third of the time of a loop. A few images are padded at a time, into memory that
    stays in the CPU's cache.
    """
    num_images, height, width, num_channels = pixels.shape
    result = new_images((num_images, *size, num_channels), pixels.dtype, pixels.device)
    row_bytes = size[1] * num_channels * pixels.itemsize
    targets = result.numpy()
    shape = (height + 2 * padding, width + 2 * padding, num_channels)
    count = max(1, _CACHED_BYTES // (math.prod(shape) * pixels.itemsize))
    padded = np.zeros((min(count, max(1, num_images)), *shape), targets.dtype)
    if fill is not None and fill.any():
        padded.reshape(-1, shape[1] * num_channels)[:] = np.tile(fill.numpy(), shape[1])
    inner = padded[:, padding : padding + height, padding : padding + width]
    rows = np.ndarray(padded.nbytes - row_bytes + 1, f"V{row_bytes}", padded, 0, (1,))
    image_stride, row_stride, pixel_stride, _ = padded.strides
    starts = tops * row_stride + lefts * pixel_stride
    starts += np.arange(num_images) % count * image_stride
    places = starts[:, None] + np.arange(size[0]) * row_stride
    source = pixels.numpy()
    for first in range(0, num_images, count):
        part = slice(first, first + count)
        images = source[part]
        if padding and fill is None:
            sides = (padding, padding)
            padded[: len(images)] = np.pad(images, ((0, 0), sides, sides, (0, 0)), "reflect")
        else:
            inner[: len(images)] = images
        targets[part] = rows[places[part]].view(targets.dtype).reshape(len(images), *result.shape[1:])
    return result


def _gathered(
    pixels: torch.Tensor,
    tops: torch.Tensor,
    lefts: torch.Tensor,
    size: tuple[int, int],
    fill: torch.Tensor | None,
) -> torch.Tensor:
    """Boxes of images, on any device; pixels outside an image are ``fill``, or its reflection."""
    num_images, height, width, num_channels = pixels.shape
    places = []
    inside = []
    for corners, length, side in ((tops, size[0], height), (lefts, size[1], width)):
        place = corners[:, None] + torch.arange(length, device=pixels.device)
        inside.append((place >= 0) & (place < side))
        if fill is None:
            place = (side - 1) - ((side - 1) - place.abs()).abs()
        places.append(place.clamp(0, side - 1))
    first = torch.arange(num_images, device=pixels.device)[:, None] * height
    numbers = ((first + places[0]) * width)[:, :, None] + places[1][:, None]
    flat = pixels.reshape(num_images * height * width, num_channels)
    result = flat.index_select(0, numbers.flatten()).view(num_images, *size, num_channels)
    if fill is None:
        return result
    is_inside = (inside[0][:, :, None] & inside[1][:, None])[..., None]
    return torch.where(is_inside, result, copy_parameters(fill, pixels.device))


class RandomHorizontalFlip(ImageTransform):
    """Flips each image of a batch from left to right with probability ``p``.

    Takes ``(B, H, W, C)`` or ``(B, C, H, W)`` images of any dtype and strides; returns a new batch of the
    same layout and dtype on the same device, which the caller owns. Random numbers and the images of a batch
    come from the same places as in `RandomResizedCrop`.

    Args:
        p: The probability of a flip, from 0 to 1.
        layout: The meaning of the dimensions: "HWC", "CHW", or "auto": the layout whose C is 1, 3 or 4.
        key: Where the images are in a batch: an index, or the key of a mapping.

    Raises:
        TypeError: ``p`` is not a number; or, when called, there is no tensor in the images' place.
        ValueError: ``p`` is not from 0 to 1; or, when called, the shape fits no layout or both, or the batch
            has no ``key``, or neither or both of "image" and "images".
    """

    def __init__(self, p: float = 0.5, *, layout: str = "auto", key: Any = None) -> None:
        super().__init__(layout, key)
        self.p = probability(p)

    def extra_repr(self) -> str:
        """The arguments, for the module's repr."""
        return f"p={self.p}"

    def _transformed(self, pixels: torch.Tensor, where: str) -> torch.Tensor:
        is_flipped = draw_uniforms(len(pixels), 1)[0] < self.p
        if pixels.device.type == "cpu" and pixels.dtype in NUMPY_DTYPES:
            result = copied(pixels)
            images, numbers = result.numpy(), np.flatnonzero(is_flipped)
            images[numbers] = _mirrored(images[numbers])
            return result
        chosen = copy_parameters(torch.from_numpy(is_flipped), pixels.device)[:, None, None, None]
        return torch.where(chosen, pixels.flip(2), pixels)


def _mirrored(images: NDArray[Any]) -> NDArray[Any]:
    """``(B, H, W, C)`` images, mirrored; OpenCV flips them all in a seventh of NumPy's time."""
    num_images, height, width, num_channels = images.shape
    pixel_bytes = num_channels * images.itemsize
    cv2 = _opencv()
    if cv2 is None or pixel_bytes > _MAX_PIXEL_BYTES or not images.size or not images.flags.c_contiguous:
        return images[:, :, ::-1]
    rows = images.view(np.uint8).reshape(num_images * height, width, pixel_bytes)
    mirrored: NDArray[Any] = cv2.flip(rows, 1).view(images.dtype).reshape(images.shape)
    return mirrored


_CACHED_BYTES = 512 << 10  # of images that are padded at a time
_MAX_PIXEL_BYTES = 16  # OpenCV flips larger ones no faster


@functools.cache
def _opencv() -> Any:
    """OpenCV, which albumentations needs; None without it."""
    try:
        import cv2
    except ImportError:
        return None
    return cv2


def _expect_pixels(asker: ImageTransform, pixels: torch.Tensor) -> None:
    if not all(pixels.shape[1:3]):
        name, shape = type(asker).__name__, tuple(pixels.shape)
        raise ValueError(f"{name} expects images with pixels, but got the shape {shape}")
