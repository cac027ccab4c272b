"""Where the pixels of an image are: its header, its EXIF orientation, boxes in it, and its dimensions.

A file stores an image in one orientation, and a viewer displays it in the one that its EXIF tag names.
For the dimensions of an array there is one rule, for the loader and all transforms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import numpy.typing as npt

IMAGE_CHANNELS = (1, 3, 4)
MIN_SIDE = 8  # of what counts as an image unless declared: keypoints, poses and kernels are smaller

# Where C is 1, 3 or 4 and both sides have at least MIN_SIDE pixels, no shape has both layouts.
ImageLayout = Literal["HWC", "CHW"]

# `(x_min, y_min, x_max, y_max)` in pixels; the last two are exclusive.
Box = tuple[int, int, int, int]

# By the value of the EXIF tag: the stored image with its axes swapped or not, then flipped along y, x.
ORIENTATIONS = {
    1: (False, False, False),
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, False, True),
    7: (True, True, True),
    8: (True, True, False),
}


def apply_orientation(pixels: npt.NDArray[np.uint8], orientation: int) -> npt.NDArray[np.uint8]:
    """Stored pixels as a viewer displays them, C-contiguous."""
    if orientation == 1:
        return np.ascontiguousarray(pixels)
    is_swapped, flips_y, flips_x = ORIENTATIONS[orientation]
    if is_swapped:
        pixels = pixels.swapaxes(0, 1)
    return np.ascontiguousarray(pixels[:: -1 if flips_y else 1, :: -1 if flips_x else 1])


class ImageHeader(NamedTuple):
    """What the header of an image file says.

    Attributes:
        height: Of the displayed image, in pixels.
        width: The same.
        orientation: The value of the EXIF tag, 1 to 8.
        is_jpeg: Whether this is a JPEG with 8-bit RGB or gray values.
    """

    height: int
    width: int
    orientation: int
    is_jpeg: bool

    def stored_box(self, box: Box) -> Box:
        """A box of the displayed image, in the stored one."""
        x_min, y_min, x_max, y_max = box
        is_swapped, flips_y, flips_x = ORIENTATIONS[self.orientation]
        if flips_y:
            y_min, y_max = self.height - y_max, self.height - y_min
        if flips_x:
            x_min, x_max = self.width - x_max, self.width - x_min
        return (y_min, x_min, y_max, x_max) if is_swapped else (x_min, y_min, x_max, y_max)


# --- in an array -----------------------------------------------------------------------------------------


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
