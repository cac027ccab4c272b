"""EncodedImage: an image file that is decoded when, and as far as, its pixels are needed.

A `CachedDataset` with `cache=None` reads these from an ImageFolder. This module imports Pillow only when an
image is decoded. Rules:

1. Boxes and shapes are those of the image as a viewer shows it, after its EXIF orientation.
2. If the file is intact, ``image.decode(box)`` has the same pixels as that box of ``image.decode()``. Damage
   outside the box can go unnoticed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastload.images.geometry import Box, ImageHeader, apply_orientation
from fastload.system.cached_property import cached_property

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class EncodedImage:
    """An undecoded image file.

    Args:
        path: The file, for errors too.
        content: Its content; None reads it when it is needed.
    """

    def __init__(self, path: str, content: bytes | None = None) -> None:
        self.path = path
        if content is not None:
            self.content = content

    @cached_property
    def content(self) -> bytes:
        """The bytes of the file.

        Raises:
            ImageReadError: The file cannot be read.
        """
        from fastload.images.decode import read_file

        return read_file(self.path)

    @cached_property
    def _header(self) -> ImageHeader:
        from fastload.images.decode import read_header

        return read_header(self.content, self.path)

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(height, width, 3)` of the decoded image, read from the header.

        Raises:
            ImageReadError: The file cannot be read, or has no header of an image.
        """
        return self._header.height, self._header.width, 3

    def decode(self, box: Box | None = None) -> npt.NDArray[np.uint8]:
        """The pixels as C-contiguous `(height, width, 3) uint8` RGB, as `read_image` reads them.

        Args:
            box: `(x_min, y_min, x_max, y_max)`: only this region, which lies in the image and is not empty.

        Returns:
            A new, writable array that the caller owns.

        Raises:
            ImageReadError: The file cannot be read or decoded.
        """
        from fastload.augmentation.regions import decode_region
        from fastload.images.decode import decode

        if box is None:
            return decode(self.content, self.path)
        header = self._header
        if header.is_jpeg:
            region = decode_region(self.content, header.stored_box(box))
            if region is not None:
                return apply_orientation(region, header.orientation)
        x_min, y_min, x_max, y_max = box
        return decode(self.content, self.path)[y_min:y_max, x_min:x_max].copy()


def decoded(sample: Any) -> Any:
    """The sample of an ImageFolder with its image decoded, `(height, width, 3) uint8` RGB.

    Raises:
        ImageReadError: The image cannot be decoded.
    """
    is_undecoded = type(sample) is tuple and sample and type(sample[0]) is EncodedImage
    return (sample[0].decode(), *sample[1:]) if is_undecoded else sample
