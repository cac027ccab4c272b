"""An image whose last step is deferred until it is written into its batch.

A pipeline's last step often reads the whole image only to write it again in another type or order, and the
batch then copies the result. A `DeferredImage` stands for that result, and writes it once, into its row.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt


class DeferredImage:
    """A `(3, H, W)` tensor or `(H, W, 3)` array, not computed yet.

    Args:
        pixels: The C-contiguous `(H, W, 3) uint8` image before its last step; only read.
        tables: What each level of each channel becomes, `(3, 256) float32`; None: it stays the level.
        is_tensor: Whether the result is a `(3, H, W)` tensor.
        compute: Makes the result from the pixels, in memory of its own.

    Attributes:
        kind: The type of the result.
        shape: The shape of the result.
        dtype: The dtype of the result.
        row_dtype: The same as NumPy's.
    """

    __slots__ = ("_compute", "_pixels", "_tables", "dtype", "kind", "row_dtype", "shape")

    def __init__(
        self,
        pixels: npt.NDArray[np.uint8],
        tables: npt.NDArray[np.float32] | None,
        compute: Callable[[npt.NDArray[np.uint8]], Any],
        *,
        is_tensor: bool,
    ) -> None:
        self._pixels = pixels
        self._tables = tables
        self._compute = compute
        height, width, channels = pixels.shape
        self.kind: type[Any] = torch.Tensor if is_tensor else np.ndarray
        self.shape = (channels, height, width) if is_tensor else (height, width, channels)
        self.row_dtype: np.dtype[Any] = pixels.dtype if tables is None else tables.dtype
        self.dtype: Any = getattr(torch, self.row_dtype.name) if is_tensor else self.row_dtype

    def value(self) -> Any:
        """The result."""
        return self._compute(self._pixels)

    def write(self, row: npt.NDArray[Any]) -> None:
        """Write the bits of `value()` into a row of its shape and dtype, with any strides."""
        cv2 = sys.modules["cv2"]  # the pipeline has imported it
        if self.kind is torch.Tensor and row.flags.c_contiguous:
            # Three tables over three planes take less time than one over pixels.
            planes = cv2.split(self._pixels)
            for number, plane in enumerate(planes):
                if self._tables is None:
                    row[number] = plane
                else:
                    _look_up(cv2, plane, self._tables[number], row[number])
            return
        rows = row.transpose(1, 2, 0) if self.kind is torch.Tensor else row
        if self._tables is None:
            rows[...] = self._pixels
        else:
            _look_up(cv2, self._pixels, self._tables.T[None], rows)


def _look_up(cv2: Any, levels: Any, table: Any, out: Any) -> None:
    result = cv2.LUT(levels, table, dst=out)
    if result is not out:  # OpenCV writes elsewhere if it cannot use the memory
        out[...] = result


def computed(value: Any) -> Any:
    """A leaf of a sample, with the result if it is deferred."""
    return value.value() if type(value) is DeferredImage else value
