"""torchvision's v2 transforms leave NumPy arrays as they are; here that is an error.

A pipeline of flips and colors would otherwise train without augmentation, and nobody would notice.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

V1_MODULE, V2_MODULE = "torchvision.transforms.", "torchvision.transforms.v2."
V2_INSTEAD = (
    "use the classes of these names in torchvision.transforms.v2, which take whole samples: first ToImage(), "
    "and ToDtype(torch.float32, scale=True) for ToTensor(). For an image in an array beside a label, "
    "ToPILImage() at the beginning is enough"
)
# Steps of v2 that take an array, and those that are not of images.
_TAKE_ARRAYS = frozenset({"Lambda", "ToImage", "ToPILImage", "ToTensor"})
_NOT_OF_IMAGES = re.compile("BoundingBox|KeyPoint|ClampingMode|ToPureTensor")


def reject_arrays(transform: Any, sample: Any) -> None:
    """Check that a transform whose first step ignores arrays gets no image in an array.

    Raises:
        TypeError: It does.
    """
    step = _first_step(transform)
    if not step or step in _TAKE_ARRAYS:
        return
    values: Any = sample if isinstance(sample, (tuple, list)) else [sample]
    if isinstance(sample, dict):
        values = sample.values()
    # A label and the boxes of one sample have no two sides, or come after the image. Beside a tv_tensor or a
    # PIL image, v2 takes an array for something else; a plain tensor could be a label.
    images = [v for v in values if getattr(v, "ndim", 0) >= 2 or type(v).__module__.startswith("PIL.")]
    if images and type(images[0]) is np.ndarray and {*map(type, images)} <= {np.ndarray, torch.Tensor}:
        raise TypeError(
            f"{step} of torchvision takes no NumPy array, so it would leave the image of shape "
            f"{images[0].shape} as it is: begin the transform with torchvision.transforms.v2.ToImage, which "
            "makes a tensor of an (H, W, C) array"
        )


def _first_step(transform: Any) -> str:
    """The class of the first step for images; empty if it is none of v2's."""
    name = type(transform).__name__
    if not type(transform).__module__.startswith(V2_MODULE) or _NOT_OF_IMAGES.search(name):
        return ""
    steps = getattr(transform, "transforms", None)
    if steps is None:
        return name
    return next((_first_step(step) for step in steps if not _NOT_OF_IMAGES.search(type(step).__name__)), "")
