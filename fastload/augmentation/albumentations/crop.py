"""Moves the crop at the start of an albumentations pipeline into the decoder.

A crop's box depends on the image's height and width, which are in the file's header. So the first transform
chooses its box before the image is decoded, and only that region is decoded. Rules:

1. albumentations itself draws all parameters, from its own generators and in its own order, so they are
   those of the whole image.
2. Only the image's own part of the first transform is replaced; the rest of the pipeline runs as usual.
3. Only classes of the one release of albumentations that the tests compare in both ways are treated so.
   Everything else is decoded in full, and `explain` gives the reason.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.augmentation.albumentations import pipelines
from fastload.augmentation.regions import name_of_decoder

if TYPE_CHECKING:
    import numpy.typing as npt

    from fastload.augmentation.encoded import EncodedImage

# Transforms of an image alone that first cut out the box `crop_coords`; some then resize it.
_CROPS = frozenset(
    ("RandomResizedCrop", "RandomSizedCrop", "RandomCrop", "CenterCrop", "Crop", "RandomCropFromBorders")
)


class CropInDecoder:
    """An albumentations pipeline that decodes the image of its sample, as far as it needs the pixels.

    Args:
        pipeline: A Compose, or a single transform.

    Attributes:
        pipeline: As given; `targets` asks it what moves.
        why_whole: Why images are decoded in full; None if they are not.
    """

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        self._is_compose = type(pipeline).__name__ == "Compose"
        transforms = pipeline.transforms if self._is_compose else [pipeline]
        self._first: Any = transforms[0] if transforms else None
        self.why_whole = self._find_why_whole()

    def explain(self) -> str:
        """What is decoded, in one clause."""
        if self.why_whole is not None:
            return f"whole images are decoded: {self.why_whole}"
        name = type(self._first).__name__
        decoder = name_of_decoder()
        if decoder is None:
            return "whole images are decoded: pip install 'fastload-torch[regions]' decodes regions of JPEGs"
        return f"{decoder} decodes the region of {name}"

    def __call__(self, **data: Any) -> dict[str, Any]:
        """The pipeline's output for these targets, of which `image` is an `EncodedImage`; see `run`."""
        return self.run(self.pipeline, **data)

    def run(self, pipeline: Any, /, **data: Any) -> dict[str, Any]:
        """The output of the pipeline, or of a copy of it that has the same first transform.

        Raises:
            ImageReadError: The image cannot be decoded.
            Exception: An error of the pipeline.
        """
        image = data["image"]
        if self.why_whole is not None:
            return dict(pipeline(**{**data, "image": image.decode()}))
        stand_in = np.empty(image.shape, np.uint8)  # never read or written, so it takes no memory
        apply = functools.partial(_apply, self._first, image)
        first = cropping = pipelines.with_image_part(self._first, apply)
        if self._is_compose:
            cropping = pipelines.shallow_copy(pipeline)
            cropping.transforms = [first, *pipeline.transforms[1:]]
        output = dict(cropping(**{**data, "image": stand_in}))
        self._first.params = first.params
        if output.get("image") is stand_in:  # the pipeline was not applied
            output["image"] = image.decode()
        return output

    def _find_why_whole(self) -> str | None:
        first = self._first
        if first is None:
            return "the pipeline is empty"
        name = type(first).__name__
        if not pipelines.is_tested_release():
            return "crops are decoded alone with albumentations 2.0.8, and this is a different release"
        if any(not pipelines.is_of_albumentations(part) for part in (self.pipeline, first)):
            return f"{name} is not a class of albumentations itself"
        if name not in _CROPS:
            return f"the first transform is {name}; only a crop at the start of the pipeline is decoded alone"
        if getattr(first, "p", 0) < 1:
            return f"{name} has p={first.p}, so some images are not cropped"
        if pipelines.is_replayed(first):
            return "the pipeline is replayed"
        return None


def _apply(first: Any, image: EncodedImage, _: Any, **params: Any) -> npt.NDArray[np.uint8]:
    """The first transform's `apply`, for an undecoded image instead of its argument."""
    height, width, _channels = image.shape
    x_min, y_min, x_max, y_max = box = params.get("crop_coords") or (0, 0, 0, 0)
    is_inside = 0 <= x_min < x_max <= width and 0 <= y_min < y_max <= height
    if not is_inside or params.get("pad_params") is not None:
        pixels = first.apply(image.decode(), **params)
    else:
        whole = (0, 0, x_max - x_min, y_max - y_min)
        pixels = first.apply(image.decode(box), **{**params, "crop_coords": whole})
    return np.ascontiguousarray(pixels)
