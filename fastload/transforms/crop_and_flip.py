"""Random crops and flips of whole batches, each image with its own parameters, on the device of the batch.

1. The parameters are drawn on the host for all images at once (rng/batch_draws.py), and reach the device in
   one copy, for which the host does not wait.
2. No operation makes the host wait for the device.
3. Inside a loader the draws follow the rules of its `rng=`; elsewhere they come from torch's default
   generator.
4. The layout is never guessed: if the shape fits both layouts, the user must name one.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from fastload.device.cuda import copy_parameters
from fastload.nested.device_tree import map_movable
from fastload.rng.batch_draws import draw_uniforms
from fastload.transforms.boxes import NUM_DRAWS, draw_boxes
from fastload.transforms.images import check_layout, find_images, layout_of
from fastload.transforms.resample import resample

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


class RandomResizedCrop(nn.Module):
    """Crops a random box from each image of a batch and resizes it: torchvision's and albumentations' crop.

    Takes ``(B, H, W, C)`` or ``(B, C, H, W)`` images, uint8 or floats, with any strides; returns a new batch
    in the same layout and dtype on the same device, ``(B, h, w, C)`` or ``(B, C, h, w)``, which the caller
    owns. The boxes have the distribution of albumentations' RandomResizedCrop, and the pixels are those of
    its bilinear interpolation (without antialiasing) within one grey level. Masks and bounding boxes of
    objects are not supported, and gradients do not flow back. The module has no parameters and no state_dict
    entry, and can be pickled.

    As a `device_transform` of a `fastload.DataLoader`, its draws follow the rules of the loader's ``rng=``;
    elsewhere each call takes one number from torch's default generator.

    If the batch is not a tensor, the result is a new batch of its type with the images replaced. The images
    are the first element of a list or tuple (also a namedtuple), the value of "image" or "images" in a
    mapping, or the value at ``key``. All other values of the batch are passed on unchanged.

    Args:
        size: Height and width of the results in pixels; an int stands for both.
        scale: The least and the largest area of a box, as shares of the image's area.
        ratio: The least and the largest ratio of a box's width to its height.
        layout: The meaning of the dimensions: "HWC", "CHW", or "auto": the layout whose C is 1, 3 or 4.
        key: The place of the images in a batch: an index, or the key of a mapping.

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
        super().__init__()
        self.size = _height_and_width(size)
        self.scale = _range("scale", scale)
        self.ratio = _range("ratio", ratio)
        if self.scale[1] > 1:
            raise ValueError(f"scale should be shares of the image's area, at most 1, but got {scale!r}")
        self.layout = check_layout(layout)
        self.key = key

    def forward(self, batch: Any) -> Any:
        """Crop and resize the images of a batch; see the class."""
        return self._crop_batch(batch, None)

    def extra_repr(self) -> str:
        """The text that `print` shows between the brackets."""
        return f"size={self.size}, scale={self.scale}, ratio={self.ratio}"

    def _with_flip(self, flip: RandomHorizontalFlip) -> Callable[[Any], Any]:
        """A function that crops and then flips, with the draws and the values of two calls, in one pass."""
        return functools.partial(self._crop_batch, flip=flip)

    def _crop_batch(self, batch: Any, flip: RandomHorizontalFlip | None) -> Any:
        where, images = find_images(batch, self.key, "RandomResizedCrop")
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise TypeError(
                f"RandomResizedCrop expects images of uint8 or floats at {where}, but got {images.dtype} of "
                f"shape {tuple(images.shape)}"
            )
        is_hwc = layout_of(images, where, self.layout, "RandomResizedCrop") == "HWC"
        cropped = self._crop(images, flip, is_hwc=is_hwc)
        return map_movable(batch, lambda leaf: cropped if leaf is images else leaf)

    def _crop(self, images: torch.Tensor, flip: RandomHorizontalFlip | None, *, is_hwc: bool) -> torch.Tensor:
        pixels = images if is_hwc else images.permute(0, 2, 3, 1)
        num_images, height, width, _ = pixels.shape
        if not height or not width:
            raise ValueError(
                f"RandomResizedCrop expects images with pixels, but got the shape {tuple(images.shape)}"
            )
        boxes = draw_boxes(draw_uniforms(num_images, NUM_DRAWS), (height, width), self.scale, self.ratio)
        flips = np.zeros(num_images) if flip is None else flip._draw(num_images)
        result = resample(pixels, np.vstack([boxes, flips]), self.size)
        if is_hwc:
            return result
        is_chw_in_memory = images.is_contiguous()
        memory_format = torch.contiguous_format if is_chw_in_memory else torch.channels_last
        return result.permute(0, 3, 1, 2).contiguous(memory_format=memory_format)


class RandomHorizontalFlip(nn.Module):
    """Flips each image of a batch from left to right with probability ``p``.

    Takes ``(B, H, W, C)`` or ``(B, C, H, W)`` images of any dtype and strides; returns a new batch of the
    same layout and dtype on the same device, which the caller owns. In a list of transforms, a flip right
    after a `RandomResizedCrop` is computed in the same pass. Random numbers come from where those of
    `RandomResizedCrop` come from, and the images are found in a batch by the same rules.

    Args:
        p: The probability of a flip, from 0 to 1.
        layout: The meaning of the dimensions: "HWC", "CHW", or "auto": the layout whose C is 1, 3 or 4.
        key: The place of the images in a batch: an index, or the key of a mapping.

    Raises:
        TypeError: ``p`` is not a number; or, when called, there is no tensor in the images' place.
        ValueError: ``p`` is not from 0 to 1; or, when called, the shape fits no layout or both, or the batch
            has no ``key``, or neither or both of "image" and "images".
    """

    def __init__(self, p: float = 0.5, *, layout: str = "auto", key: Any = None) -> None:
        super().__init__()
        try:
            self.p = float(p)
        except (TypeError, ValueError):
            raise TypeError(f"p should be a probability from 0 to 1, but got {p!r:.200}") from None
        if not 0 <= self.p <= 1:
            raise ValueError(f"p should be a probability from 0 to 1, but got {p!r}")
        self.layout = check_layout(layout)
        self.key = key

    def forward(self, batch: Any) -> Any:
        """Flip some images of a batch; see the class."""
        where, images = find_images(batch, self.key, "RandomHorizontalFlip")
        is_hwc = layout_of(images, where, self.layout, "RandomHorizontalFlip") == "HWC"
        flips = torch.from_numpy(self._draw(len(images)))
        is_flipped = copy_parameters(flips, images.device)[:, None, None, None]
        flipped = torch.where(is_flipped, images.flip(2 if is_hwc else 3), images)
        return map_movable(batch, lambda leaf: flipped if leaf is images else leaf)

    def extra_repr(self) -> str:
        """The text that `print` shows between the brackets."""
        return f"p={self.p}"

    def _draw(self, num_images: int) -> NDArray[np.bool_]:
        """``(num_images,)``: which images are flipped."""
        is_flipped: NDArray[np.bool_] = draw_uniforms(num_images, 1)[0] < self.p
        return is_flipped


def chained(transforms: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """One function that applies all transforms in their order.

    A `RandomHorizontalFlip` right after a `RandomResizedCrop` of the same images becomes a part of the crop,
    which saves a pass over memory. Draws and values stay the same. Subclasses are called as they are.
    """
    steps: list[Callable[[Any], Any]] = []
    for transform in transforms:
        last = steps[-1] if steps else None
        if (
            type(last) is RandomResizedCrop
            and type(transform) is RandomHorizontalFlip
            and last.key == transform.key
            and transform.layout in ("auto", last.layout)
        ):
            steps[-1] = last._with_flip(transform)
        else:
            steps.append(transform)

    def apply(batch: Any) -> Any:
        for step in steps:
            batch = step(batch)
        return batch

    return apply


def _height_and_width(size: Any) -> tuple[int, int]:
    sizes = tuple(size) if isinstance(size, Sequence) and not isinstance(size, (str, bytes)) else (size, size)
    try:
        numbers = tuple(operator.index(number) for number in sizes)
    except TypeError:
        numbers = ()
    if len(numbers) != 2:
        raise TypeError(
            f"size should be an int, or the height and the width, two ints, but got {size!r:.200}"
        )
    if min(numbers) < 1:
        raise ValueError(f"size should be at least 1 pixel, but got {size!r}")
    return numbers[0], numbers[1]


def _range(name: str, values: Any) -> tuple[float, float]:
    try:
        low, high = (float(value) for value in values)
    except (TypeError, ValueError):
        low = high = math.nan
    if not 0 < low <= high < math.inf:
        raise ValueError(f"{name} should be two numbers above 0, the lower one first, but got {values!r}")
    return low, high
