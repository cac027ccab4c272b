"""The boxes of random resized crops, drawn on the host for a whole batch with NumPy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NUM_TRIES = 10
NUM_DRAWS = 2 * _NUM_TRIES + 2  # an area and a ratio for each try, then the position of the box


def draw_boxes(
    uniforms: NDArray[np.float64],
    image_size: tuple[int, int],
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> NDArray[np.float64]:
    """One box for each image, by the algorithm of albumentations' RandomResizedCrop.

    A try draws an area and a ratio of width to height. The first box that fits into the image counts; if none
    of ten does, it is the largest centred box whose ratio is in the range.

    Args:
        uniforms: ``(NUM_DRAWS, num_images)`` numbers in [0, 1).
        image_size: Height and width of the images in pixels, each at least 1.
        scale: The minimum and maximum area of a box, as shares of the image's area.
        ratio: The minimum and maximum ratio of width to height.

    Returns:
        ``(4, num_images)`` whole numbers: top, left, height, and width of each box in pixels.
    """
    image_height, image_width = image_size
    areas, logs = uniforms[: 2 * _NUM_TRIES].reshape(_NUM_TRIES, 2, -1).swapaxes(0, 1)
    area = image_height * image_width
    areas = _between(areas, scale[0] * area, scale[1] * area)
    ratios = np.exp(_between(logs, math.log(ratio[0]), math.log(ratio[1])))
    widths = np.rint(np.sqrt(areas * ratios))
    heights = np.rint(np.sqrt(areas / ratios))
    fits = (widths > 0) & (widths <= image_width) & (heights > 0) & (heights <= image_height)
    first = fits.argmax(axis=0)
    columns = np.arange(uniforms.shape[1])
    height, width = heights[first, columns], widths[first, columns]
    top = np.floor((image_height - height + 1) * uniforms[-2])
    left = np.floor((image_width - width + 1) * uniforms[-1])
    boxes = np.stack([top, left, height, width])
    return np.where(fits[first, columns], boxes, np.array(_central_box(image_size, ratio))[:, None])


def _central_box(image_size: tuple[int, int], ratio: tuple[float, float]) -> tuple[int, int, int, int]:
    image_height, image_width = height, width = image_size
    if image_width / image_height < ratio[0]:
        height = max(1, round(image_width / ratio[0]))
    elif image_width / image_height > ratio[1]:
        width = max(1, round(image_height * ratio[1]))
    return (image_height - height) // 2, (image_width - width) // 2, height, width


def _between(uniforms: NDArray[np.float64], low: float, high: float) -> NDArray[np.float64]:
    return low + (high - low) * uniforms
