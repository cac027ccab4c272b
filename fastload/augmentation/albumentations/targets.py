"""Finds masks, boxes and keypoints that a pipeline would leave where they are while it moves the image.

A pipeline moves what has a name that it knows. What is beside the image in a tuple has none, and other names
of a dict pass unchanged: the image would be flipped, and its boxes would not.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.nested.tree import structure_of

if TYPE_CHECKING:
    from collections.abc import Iterator

# What datasets call them; torchvision, COCO and their converters among others.
_NAMES = frozenset(
    (
        *("mask", "masks", "segmentation", "segmentations", "instance_masks", "semantic_mask", "polygons"),
        *("box", "boxes", "bbox", "bboxes", "bounding_boxes", "gt_boxes", "gt_bboxes"),
        *("keypoint", "keypoints", "landmarks"),
    )
)
_PLAIN = frozenset((int, float, str, bytes, bool, type(None), np.int64))
# The library says what it does with these.
_TARGETS = frozenset(("image", "mask", "masks", "bboxes", "keypoints"))
_WIDTHS = range(2, 7)  # of an array of keypoints or boxes: two to six numbers each
_MAX_PARTS = 8  # of a list


def check_moved(transform: Any, sample: Any) -> None:
    """Raise if a sample has positions in the image that a pipeline leaves where they are.

    Args:
        transform: A pipeline or a single transform, or an object that runs its `pipeline`.
        sample: A dict, or a tuple or list that starts with the image.

    Raises:
        TypeError: It has, and the transform moves pixels; says how to name them.
    """
    transform = getattr(transform, "pipeline", transform)
    is_dict = isinstance(sample, dict)
    for key, value in sample.items() if is_dict else enumerate(sample):
        if type(value) in _PLAIN or key == 0:  # the image, and most labels
            continue
        name: Any = key
        sides: tuple[int, ...] = ()
        if not is_dict:
            name, sides = _field(sample, key), sample[0].shape[:2]
        elif key in getattr(transform, "available_keys", ()) or key in _TARGETS:
            continue
        if is_dict and str(key).endswith("_metadata"):  # other samples, for a mosaic
            continue
        for path, part in _positions(name, value, sides, f"sample[{key!r}]"):
            if not _moves_pixels(transform):
                return
            raise TypeError(
                f"{path} is {structure_of(part)}: the transform moves the image, but not a mask, boxes or "
                "keypoints that it has no name for. Return a dict from the dataset with arrays under the "
                'names of its targets, such as {"image": ..., "mask": ..., "bboxes": ..., "keypoints": ...}, '
                "or give A.Compose additional_targets= (and bbox_params= for boxes, keypoint_params=). "
                "What is no position stays as it is, under any other name in the dict"
            )


def _field(sample: Any, number: int) -> str | None:
    """The name of an element of a namedtuple."""
    fields = getattr(sample, "_fields", None)
    return None if fields is None else fields[number]


def _positions(name: Any, value: Any, sides: tuple[int, ...], path: str) -> Iterator[tuple[str, Any]]:
    """Values that are or can be positions, with their paths.

    Args:
        name: Of the value in its dict; None if it has none.
        value: A nest.
        sides: The height and width of the image; empty: only names count.
        path: Of the value.
    """
    if name in _NAMES and not isinstance(value, (str, bytes, type(None))):
        yield path, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _positions(name, part, sides, f"{path}[{name!r}]")
    elif isinstance(value, (np.ndarray, torch.Tensor)):
        shape = tuple(value.shape)
        is_mask = any(shape[axis : axis + 2] == sides for axis in range(len(shape) - 1))
        if sides and (is_mask or (len(shape) == 2 and shape[1] in _WIDTHS)):
            yield path, value
    elif isinstance(value, (list, tuple)):
        if sides and value and all(_is_row(part) for part in value):
            yield path, value
        for number, part in enumerate(itertools.islice(value, _MAX_PARTS)):
            yield from _positions(None, part, sides, f"{path}[{number}]")


def _is_row(value: Any) -> bool:
    is_row = isinstance(value, (list, tuple)) and len(value) in _WIDTHS
    return is_row and all(type(number) in (int, float) for number in value)


def _moves_pixels(transform: Any) -> bool:
    parts = getattr(transform, "transforms", None)
    if parts is not None:
        return any(map(_moves_pixels, parts))
    from albumentations import DualTransform

    return isinstance(transform, DualTransform)
