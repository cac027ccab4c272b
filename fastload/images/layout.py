"""The meaning of an image array's dimensions: one rule for the loader and all transforms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

IMAGE_CHANNELS = (1, 3, 4)
MIN_SIDE = 8  # of what counts as an image unless declared: keypoints, poses and kernels are smaller

# Where C is 1, 3 or 4 and both sides have at least MIN_SIDE pixels, no shape has both layouts.
ImageLayout = Literal["HWC", "CHW"]


def fitting_layouts(
    shape: Sequence[int], channels: Collection[int] = IMAGE_CHANNELS, min_side: int = 0
) -> list[ImageLayout]:
    """The layouts that the last three dimensions of an array can have; none if they are not an image.

    Args:
        shape: At least three dimensions.
        channels: The numbers of channels that an image can have.
        min_side: The minimum of height and width, in pixels.
    """
    first, middle, last = shape[-3:]
    layouts: list[ImageLayout] = []
    if last in channels and min(first, middle) >= min_side:
        layouts.append("HWC")
    if first in channels and min(middle, last) >= min_side:
        layouts.append("CHW")
    return layouts


def image_layout(shape: Sequence[int], *, is_pixels: bool) -> ImageLayout | None:
    """The layout of an array as an image; None if it is not one.

    An image is uint8 or floating-point, has 1, 3 or 4 channels, and at least 8 x 8 pixels.

    Args:
        shape: Three dimensions of a sample, or the last three of a batch.
        is_pixels: Whether the dtype is uint8 or floating.
    """
    layouts = fitting_layouts(shape, min_side=MIN_SIDE) if is_pixels and len(shape) == 3 else []
    return layouts[0] if layouts else None
