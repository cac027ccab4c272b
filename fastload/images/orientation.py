"""The EXIF orientation: how viewers rotate a stored image."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

# By the value of the EXIF tag: the stored image with its axes swapped or not, then flipped along y, x.
TURNS = {
    1: (False, False, False),
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, False, True),
    7: (True, True, True),
    8: (True, True, False),
}


def turned(pixels: npt.NDArray[np.uint8], orientation: int) -> npt.NDArray[np.uint8]:
    """Stored pixels as a viewer shows them, C-contiguous."""
    if orientation == 1:
        return np.ascontiguousarray(pixels)
    is_swapped, flips_y, flips_x = TURNS[orientation]
    if is_swapped:
        pixels = pixels.swapaxes(0, 1)
    return np.ascontiguousarray(pixels[:: -1 if flips_y else 1, :: -1 if flips_x else 1])
