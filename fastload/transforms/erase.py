"""Random boxes of whole batches of images, filled with one value: `RandomErasing` and `Cutout`.

The boxes are drawn on the host for all images at once. No operation makes the host wait for the device, and
the results are the same in every pixel on every device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.device.devices import copy_parameters
from fastload.rng.batch_draws import draw_uniforms
from fastload.transforms.boxes import NUM_DRAWS, draw_boxes
from fastload.transforms.image_transform import (
    NUMPY_DTYPES,
    ImageTransform,
    copied,
    fill_values,
    height_and_width,
    probability,
    range_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class RandomErasing(ImageTransform):
    """Fills a random box of each image of a batch with probability ``p``: torchvision's transform.

    Takes ``(B, H, W, C)`` or ``(B, C, H, W)`` images of any dtype and strides; returns a new batch of the
    same layout and dtype on the same device, which the caller owns. Random numbers and the images of a batch
    come from the same places as in `RandomResizedCrop`.

    Args:
        p: The probability of a box, from 0 to 1.
        scale: The minimum and maximum area of a box, as shares of the image's area.
        ratio: The minimum and maximum ratio of a box's width to its height.
        fill: The value of the box: a number, or one per channel.
        layout: The meaning of the dimensions: "HWC", "CHW", or "auto": the layout whose C is 1, 3 or 4.
        key: Where the images are in a batch: an index, or the key of a mapping.

    Raises:
        TypeError: ``p`` is not a number; or, when called, there is no tensor in the images' place.
        ValueError: An argument is out of its range; or, when called, the images cannot have the value
            ``fill``, the shape fits no layout or both, or the batch has no ``key``, or neither or both of
            "image" and "images".
    """

    def __init__(
        self,
        p: float = 0.5,
        scale: tuple[float, float] = (0.02, 0.33),
        ratio: tuple[float, float] = (0.3, 3.3),
        *,
        fill: float | Sequence[float] = 0,
        layout: str = "auto",
        key: Any = None,
    ) -> None:
        super().__init__(layout, key)
        self.p = probability(p)
        self.scale = range_of("scale", scale, maximum=1)
        self.ratio = range_of("ratio", ratio)
        self.fill = fill

    def extra_repr(self) -> str:
        """The arguments, for the module's repr."""
        return f"p={self.p}, scale={self.scale}, ratio={self.ratio}, fill={self.fill}"

    def _transformed(self, pixels: torch.Tensor, where: str) -> torch.Tensor:
        num_images, height, width, _ = pixels.shape
        if not height or not width:
            return pixels.clone()
        draws = draw_uniforms(num_images, NUM_DRAWS + 1)
        boxes = draw_boxes(draws[:-1], (height, width), self.scale, self.ratio).astype(np.int64)
        boxes[2] *= draws[-1] < self.p
        return _filled(pixels, boxes, fill_values(self.fill, pixels))


class Cutout(ImageTransform):
    """Fills a square of each image of a batch, whose center is a random pixel (DeVries and Taylor, 2017).

    The part of the square outside the image is ignored. Images, random numbers and errors are those of
    `RandomErasing`.

    Args:
        size: Height and width of the box in pixels; an int stands for both.
        fill: The value of the box: a number, or one per channel.
        layout: The meaning of the dimensions: "HWC", "CHW", or "auto": the layout whose C is 1, 3 or 4.
        key: Where the images are in a batch: an index, or the key of a mapping.
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        *,
        fill: float | Sequence[float] = 0,
        layout: str = "auto",
        key: Any = None,
    ) -> None:
        super().__init__(layout, key)
        self.size = height_and_width(size)
        self.fill = fill

    def extra_repr(self) -> str:
        """The arguments, for the module's repr."""
        return f"size={self.size}, fill={self.fill}"

    def _transformed(self, pixels: torch.Tensor, where: str) -> torch.Tensor:
        sides = np.array(pixels.shape[1:3])[:, None]
        sizes = np.array(self.size)[:, None]
        starts = np.floor(draw_uniforms(len(pixels), 2) * sides).astype(np.int64) - sizes // 2
        ends = np.minimum(starts + sizes, sides)
        starts = np.maximum(starts, 0)
        return _filled(pixels, np.vstack([starts, ends - starts]), fill_values(self.fill, pixels))


def _filled(pixels: torch.Tensor, boxes: NDArray[np.int64], fill: torch.Tensor) -> torch.Tensor:
    """New ``(B, H, W, C)`` images in which ``(4, B)`` boxes have one value: top, left, height and width."""
    tops, lefts, heights, widths = boxes
    if pixels.device.type == "cpu" and pixels.dtype in NUMPY_DTYPES:
        result = copied(pixels)
        images, value = result.numpy(), fill.numpy()
        places = np.stack([tops, tops + heights, lefts, lefts + widths]).T.tolist()
        for image, (top, bottom, left, right) in zip(images, places, strict=True):
            image[top:bottom, left:right] = value
        return result
    corners = copy_parameters(torch.from_numpy(boxes), pixels.device)[:, :, None]
    _, height, width, _ = pixels.shape
    rows, columns = (torch.arange(side, device=pixels.device) for side in (height, width))
    is_row = (rows >= corners[0]) & (rows < corners[0] + corners[2])
    is_column = (columns >= corners[1]) & (columns < corners[1] + corners[3])
    is_filled = (is_row[:, :, None] & is_column[:, None])[..., None]
    return torch.where(is_filled, copy_parameters(fill, pixels.device), pixels)
