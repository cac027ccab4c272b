"""EncodedImage: an image file that is decoded when, and as far as, its pixels are needed.

This module imports Pillow only when an image is decoded. Rules:

1. Boxes and shapes are those of the image as a viewer shows it, after its EXIF orientation.
2. If the file is intact, ``image.decode(box)`` has the same pixels as that box of ``image.decode()``. Damage
   outside the box can go unnoticed.
3. An object made from a path keeps the header of the file, never its content: a dataset can keep such objects
   for all of its files.
"""

from __future__ import annotations

import operator
import os
from typing import TYPE_CHECKING, Any

from fastload.errors import ImageReadError
from fastload.images.geometry import Box, ImageHeader, apply_orientation

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class EncodedImage:
    """An undecoded image file: a value of a sample, instead of the image's array.

    A `CachedDataset` decodes it. If the first transform of its albumentations pipeline is a crop, only the
    crop is decoded, which is faster for large JPEGs. With ``cache="ram-encoded"`` the file's
    bytes are cached.

    Args:
        source: The path of the file, read when needed; or the content of a file.

    Attributes:
        path: The path, or None.

    Raises:
        TypeError: `source` is neither a path nor bytes.
    """

    __slots__ = ("_content", "_header", "_is_file", "path")

    def __init__(self, source: str | os.PathLike[str] | bytes | bytearray | memoryview) -> None:
        self.path: str | None = None
        self._content: bytes | memoryview | None = None
        self._header: ImageHeader | None = None
        self._is_file = False
        if isinstance(source, (bytes, bytearray, memoryview)):
            self._content = bytes(source) if isinstance(source, bytearray) else source
        elif isinstance(source, (str, os.PathLike)):
            self.path = os.fsdecode(source)
            self._is_file = True
        else:
            raise TypeError(
                f"EncodedImage expects the path of an image file, or its content as bytes, got {source!r:.80}"
            )

    @classmethod
    def of(cls, content: bytes | memoryview, path: str | None) -> EncodedImage:
        """The content of a file already read from this path."""
        image = cls(content)
        image.path = path
        return image

    def content(self) -> bytes | memoryview:
        """The bytes of the file; a path is read on every call.

        Raises:
            ImageReadError: The file cannot be read.
        """
        if self._content is not None:
            return self._content
        try:
            with open(self._name, "rb", buffering=0) as file:
                return file.readall()
        except (OSError, ValueError) as error:  # ValueError: a null byte in the path
            raise ImageReadError(self._name, getattr(error, "strerror", None) or str(error)) from error

    def opened(self) -> EncodedImage:
        """This image with the content of its file, read now and kept by the result.

        Raises:
            ImageReadError: The file cannot be read.
        """
        return self if self._content is not None else EncodedImage.of(self.content(), self.path)

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(height, width, 3)` of the decoded image, read from the header.

        Raises:
            ImageReadError: The file cannot be read, or has no header of an image.
        """
        header = self._read_header()
        return header.height, header.width, 3

    def decode(self, box: Box | None = None) -> npt.NDArray[np.uint8]:
        """The pixels as C-contiguous `(height, width, 3) uint8` RGB, as `read_image` reads them.

        Args:
            box: `(x_min, y_min, x_max, y_max)`: only this region, which must lie in the image.

        Returns:
            A new, writable array that the caller owns.

        Raises:
            ImageReadError: The file cannot be read or decoded.
            TypeError: The box has values other than ints.
            ValueError: The box is empty or exceeds the image.
        """
        if self._content is None:
            return self.opened().decode(box)
        from fastload.images.decode import decode
        from fastload.images.regions import decode_region

        if box is None:
            return decode(self._content, self._name)
        header = self._read_header()
        x_min, y_min, x_max, y_max = box = _checked_box(box, header)
        if header.is_jpeg:
            region = decode_region(self._content, header.stored_box(box))
            if region is not None:
                return apply_orientation(region, header.orientation)
        whole = decode(self._content, self._name)
        return whole[y_min:y_max, x_min:x_max].copy()

    @property
    def _name(self) -> str:
        return "<bytes>" if self.path is None else self.path

    def _read_header(self) -> ImageHeader:
        if self._header is None:
            from fastload.images.decode import read_header

            self._header = read_header(self.content(), self._name)
        return self._header

    def __reduce__(self) -> tuple[Any, ...]:
        if self._is_file:
            return EncodedImage, (self.path,)
        return EncodedImage.of, (bytes(self.content()), self.path)

    def __repr__(self) -> str:
        return f"EncodedImage({f'{len(self.content()):,} bytes' if self.path is None else repr(self.path)})"


def _checked_box(box: Box, header: ImageHeader) -> Box:
    """The box as plain ints."""
    try:
        x_min, y_min, x_max, y_max = (operator.index(side) for side in box)
    except TypeError:
        raise TypeError(f"a box should be four ints (x_min, y_min, x_max, y_max), but got {box!r}") from None
    if not (0 <= x_min < x_max <= header.width and 0 <= y_min < y_max <= header.height):
        raise ValueError(
            f"the box (x_min, y_min, x_max, y_max) = {box} is empty or exceeds the image of "
            f"{header.height} x {header.width} pixels (height x width)"
        )
    return x_min, y_min, x_max, y_max
