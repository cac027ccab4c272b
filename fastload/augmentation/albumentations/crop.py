"""Moves the crop at the start of an albumentations pipeline into the decoder.

A crop's box depends on the image's height and width, which are in the file's header. So the first transform
chooses its box before the image is decoded, and only that region is decoded. Of a large image that is resized
and then cropped at its center, as for validation, only the part that the crop keeps is decoded. Rules:

1. albumentations itself draws all parameters, from its own generators and in its own order. Boxes, flips and
   the transformed masks, bounding boxes and keypoints are bit-identical to those of the whole image.
2. Only the image's own part of the first transform is replaced; the rest of the pipeline runs as usual.
3. Only classes of the one release of albumentations that the tests compare in both ways are treated so.
   Everything else is decoded in full, and `explain` gives the reason.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.augmentation.albumentations import pipelines
from fastload.images.regions import name_of_decoder

if TYPE_CHECKING:
    import numpy.typing as npt

    from fastload.images.encoded import EncodedImage, Reduced
    from fastload.images.geometry import Box

    Pixels = npt.NDArray[np.uint8]

# Transforms that first cut out the box `crop_coords`. Some then resize it to the size in these attributes, so
# a region of reduced size is enough.
_CROPS: dict[str, tuple[str, ...]] = {
    "RandomResizedCrop": ("size",),
    "RandomSizedCrop": ("size",),
    "RandomSizedBBoxSafeCrop": ("height", "width"),
    "RandomCrop": (),
    "CenterCrop": (),
    "Crop": (),
    "RandomCropNearBBox": (),
    "BBoxSafeRandomCrop": (),
    "AtLeastOneBBoxRandomCrop": (),
    "CropNonEmptyMaskIfExists": (),
    "RandomCropFromBorders": (),
}
# Transforms that resize the whole image: `decode="fast"` saves work there, and a CenterCrop after them.
_SCALINGS = ("Resize", "SmallestMaxSize", "LongestMaxSize")
# Smaller images gain less than the extra copy costs (benchmarks/NOTES.md, "Validation of large images").
_MIN_PIXELS = 500_000
# Pixels around the part that a CenterCrop keeps: a kernel of OpenCV reads up to four, INTER_AREA one step.
# Sides are multiples of 8, so a reduced part has the scale of the reduced whole.
_MARGIN, _ALIGNMENT = 8, 8
_INTER_AREA = 3  # of OpenCV
_SAMPLED = (0, 1, 2, 4)  # nearest, linear, cubic and Lanczos


class CropInDecoder:
    """An albumentations pipeline that decodes the image of its sample, as far as it needs the pixels.

    Args:
        pipeline: A Compose, or a single transform.
        reduces: Whether to decode JPEGs at a half, a quarter or an eighth of their size if the first
            transform shrinks them anyway.

    Attributes:
        pipeline: As given; `targets` asks it what moves.
        why_whole: Why images are decoded in full; None if they are not.
    """

    def __init__(self, pipeline: Any, *, reduces: bool) -> None:
        self.pipeline = pipeline
        self._reduces = reduces
        self._is_compose = type(pipeline).__name__ == "Compose"
        transforms = pipeline.transforms if self._is_compose else [pipeline]
        self._first: Any = transforms[0] if transforms else None
        self._center: Any = transforms[1] if len(transforms) > 1 and _keeps_center(*transforms[:2]) else None
        self.why_whole = self._find_why_whole()

    def explain(self) -> str:
        """What is decoded, in one clause."""
        if self.why_whole is not None:
            return f"whole images are decoded: {self.why_whole}"
        name = type(self._first).__name__
        decoder = name_of_decoder()
        ways = []
        if name not in _SCALINGS or self._center is not None:
            crop = name if self._center is None else "CenterCrop in large images"
            no_region = "whole JPEGs are decoded (pip install 'fastload-torch[regions]' decodes regions)"
            ways.append(f"{decoder} decodes the region of {crop}" if decoder else no_region)
            ways.append(f"of JPEGs with restart markers, only the part around {crop} is decoded")
        if self._reduces:
            ways.append(f"Pillow decodes JPEGs at a reduced size where {name} shrinks them")
        return "; ".join(ways)

    def __call__(self, **data: Any) -> dict[str, Any]:
        """The pipeline's output for these targets, of which `image` is an `EncodedImage`; see `run`."""
        return self.run(self.pipeline, **data)

    def run(self, pipeline: Any, /, **data: Any) -> dict[str, Any]:
        """The output of the pipeline, or of a copy of it that has the same first transform.

        Raises:
            ImageReadError: The image cannot be decoded.
            Exception: An error of the pipeline.
        """
        image = data["image"].opened()
        if self.why_whole is not None:
            return dict(pipeline(**{**data, "image": image.decode()}))
        stand_in = np.empty(image.shape, np.uint8)  # never read or written, so it takes no memory
        first = _first_with(self._first, image, self._center, reduces=self._reduces)
        cropping = first
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
        if name in _SCALINGS:
            if not self._reduces and self._center is None:
                return f'{name} needs all pixels; decode="fast" can decode JPEGs at a reduced size'
        elif name not in _CROPS:
            return f"the first transform is {name}; only a crop at the start of the pipeline is decoded alone"
        if getattr(first, "p", 0) < 1:
            return f"{name} has p={first.p}, so some images are not cropped"
        if pipelines.is_replayed(first):
            return "the pipeline is replayed"
        return None


def _keeps_center(first: Any, second: Any) -> bool:
    """Whether the second transform keeps only the center of what the first one has resized."""
    is_center = type(second).__name__ == "CenterCrop" and pipelines.is_of_albumentations(second)
    return is_center and type(first).__name__ in _SCALINGS and second.p >= 1 and not second.pad_if_needed


def _first_with(first: Any, image: Any, center: Any, *, reduces: bool) -> Any:
    """The first transform, applied to this image instead of its argument."""
    return pipelines.with_image_part(first, functools.partial(_apply, first, image, center, reduces))


def _apply(first: Any, image: EncodedImage, center: Any, reduces: bool, _: Any, **params: Any) -> Pixels:
    """The first transform's `apply`, for an undecoded image."""
    height, width, _channels = image.shape
    if type(first).__name__ in _SCALINGS:
        return _scaled(first, image, center, params, reduces=reduces)
    x_min, y_min, x_max, y_max = box = params.get("crop_coords") or (0, 0, 0, 0)
    is_inside = 0 <= x_min < x_max <= width and 0 <= y_min < y_max <= height
    if not is_inside or params.get("pad_params") is not None:
        return _pixels(first.apply(image.decode(), **params))
    minimum = _target_size(first)
    if reduces and minimum is not None:
        return _resized(first, image.decode_reduced(box, minimum), minimum, params)
    region = image.decode(box)
    whole = (0, 0, region.shape[1], region.shape[0])
    return _pixels(first.apply(region, **{**params, "crop_coords": whole}))


def _scaled(first: Any, image: Any, center: Any, params: dict[str, Any], *, reduces: bool) -> Pixels:
    """The image resized as `first` resizes it; outside of what `center` keeps, pixels are arbitrary."""
    height, width, _ = image.shape
    scale = params.get("scale")
    if type(first).__name__ == "Resize" or scale is None:
        target, interpolation = (first.height, first.width), first.interpolation
        is_smaller = target[0] < height or target[1] < width
    else:
        target = max(1, round(height * scale)), max(1, round(width * scale))
        interpolation, is_smaller = first.interpolation, scale < 1
    if is_smaller and getattr(first, "area_for_downscale", None) in ("image", "image_mask"):
        interpolation = _INTER_AREA
    kept, sides = None, (height, width)
    if center is not None and height * width >= _MIN_PIXELS:
        kept = _kept_box(center, target, sides)
    if not reduces or height < 2 * target[0] or width < 2 * target[1]:
        whole = image.decode() if kept is None else image.decode_within(kept)
        return _pixels(first.apply(whole, **params))
    if kept is not None and interpolation in _SAMPLED:
        x_min, y_min, x_max, y_max = kept
        min_size = -(-(y_max - y_min) * target[0] // height), -(-(x_max - x_min) * target[1] // width)
        reduced = _whole_box(image.decode_reduced(kept, min_size), kept, sides)
    else:
        reduced = image.decode_reduced((0, 0, width, height), target)
    sampled = _sampled(reduced, target, interpolation)
    return _pixels(_resize(*target, interpolation).apply(reduced.pixels)) if sampled is None else sampled


def _kept_box(center: Any, target: tuple[int, int], sides: tuple[int, int]) -> Box | None:
    """The part of an image of these sides that `center` keeps after it was resized to `target`.

    Returns:
        None if the crop does not fit.
    """
    if center.height > target[0] or center.width > target[1]:
        return None
    x_min, y_min, x_max, y_max = center.get_params_dependent_on_data({"shape": target}, {})["crop_coords"]
    top, bottom = _kept_span(y_min, y_max, target[0], sides[0])
    left, right = _kept_span(x_min, x_max, target[1], sides[1])
    return left, top, right, bottom


def _kept_span(start: int, stop: int, target: int, length: int) -> tuple[int, int]:
    """The pixels of an axis from which pixels `start` to `stop` are interpolated when it is resized."""
    step = length / target
    first = int(start * step - step - _MARGIN) // _ALIGNMENT * _ALIGNMENT
    last = int(stop * step + step + _MARGIN) // _ALIGNMENT * _ALIGNMENT + _ALIGNMENT
    return max(0, first), min(length, last)


def _whole_box(reduced: Reduced, box: Box, sides: tuple[int, int]) -> Reduced:
    """The box of the whole image in the pixels of a part of it; it exceeds them."""
    left, top, right, bottom = reduced.box
    scale_x, scale_y = (right - left) / (box[2] - box[0]), (bottom - top) / (box[3] - box[1])
    left, top = left - box[0] * scale_x, top - box[1] * scale_y
    return reduced._replace(box=(left, top, left + sides[1] * scale_x, top + sides[0] * scale_y))


def _resized(first: Any, reduced: Reduced, target: tuple[int, int], params: dict[str, Any]) -> Pixels:
    """A crop as `first` resizes it, from its region at a reduced size.

    `first` itself would resize whole pixels. A box whose edges lie between two reduced pixels is sampled here
    on the same grid as its exact crop, by the same interpolation.
    """
    interpolation = params.get("interpolation", first.interpolation)
    if getattr(first, "area_for_downscale", None) is None:
        sampled = _sampled(reduced, target, interpolation)
        if sampled is not None:
            return sampled
    whole = (0, 0, reduced.pixels.shape[1], reduced.pixels.shape[0])
    return _pixels(first.apply(reduced.pixels, **{**params, "crop_coords": whole}))


def _sampled(reduced: Reduced, target: tuple[int, int], interpolation: int) -> Pixels | None:
    """The box of a reduced region at this height and width.

    Returns:
        None if the box is the whole region, or OpenCV has no such interpolation between pixels.
    """
    pixels, box = reduced
    if box == (0, 0, pixels.shape[1], pixels.shape[0]) or interpolation not in _SAMPLED:
        return None
    x_min, y_min, x_max, y_max = box
    height, width = target
    step_x, step_y = (x_max - x_min) / width, (y_max - y_min) / height
    # From the center of a result's pixel to its place among the reduced ones.
    matrix = np.array([[step_x, 0, x_min + step_x / 2 - 0.5], [0, step_y, y_min + step_y / 2 - 0.5]])
    cv2 = sys.modules["cv2"]  # albumentations has imported it
    flags = interpolation | cv2.WARP_INVERSE_MAP
    return _pixels(
        cv2.warpAffine(pixels, matrix, (width, height), flags=flags, borderMode=cv2.BORDER_REPLICATE)
    )


@functools.lru_cache(maxsize=4096)
def _resize(height: int, width: int, interpolation: int) -> Any:
    return sys.modules["albumentations"].Resize(height, width, interpolation=interpolation)


def _target_size(first: Any) -> tuple[int, int] | None:
    """The height and width to which a crop is resized; None if it keeps its size."""
    names = _CROPS[type(first).__name__]
    if not names:
        return None
    values = [getattr(first, name) for name in names]
    height, width = values[0] if len(values) == 1 else values
    return int(height), int(width)


def _pixels(value: Any) -> Pixels:
    return np.ascontiguousarray(value)
