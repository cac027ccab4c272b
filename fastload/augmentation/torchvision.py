"""torchvision's first transforms and timm's: functions of one image, as torchvision's datasets call them.

`torchvision.transforms.v2` takes whole samples, and is not meant here. A pipeline belongs to this library if
its first step is one of these, exactly: a subclass, or a function of the user's, can take anything.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fastload.augmentation.library import AugmentationLibrary, with_first
from fastload.system.torchvision_arrays import V1_MODULE, V2_MODULE

_PIPELINES = frozenset({"Compose", "RandomApply", "RandomChoice", "RandomOrder"})
_LABELS = (bool, int, float, str, bytes, type(None), np.generic)


class OfOneImage(AugmentationLibrary):
    """Transforms of one image."""

    package = "torchvision"
    input_name = "the image alone, as the labels beside it need no change"

    def owns(self, transform: Any) -> bool:
        """Whether the first step of a pipeline, or the transform itself, takes one image."""
        module = f"{type(_first_step(transform)).__module__}."
        is_v1 = module.startswith(V1_MODULE) and not module.startswith(V2_MODULE)
        return (is_v1 or module.startswith("timm.data.")) and _takes_an_image(_first_step(transform))

    def call(self, transform: Any, sample: Any) -> Any:
        """Transform the image that a tuple or list starts with, or that a dict holds; the rest stays.

        If the rest can be more than labels, such as a mask or boxes, the transform gets the whole sample, and
        raises its own error: it would move the image alone.
        """
        if isinstance(sample, dict):
            others = [value for name, value in sample.items() if name != "image"]
            if "image" not in sample or not all(map(_is_label, others)):
                return transform(sample)
            return {**sample, "image": transform(sample["image"])}
        if not isinstance(sample, (tuple, list)) or not sample or not all(map(_is_label, sample[1:])):
            return transform(sample)
        return with_first(sample, transform(sample[0]))

    def image_of(self, sample: Any) -> Any:
        """The image of a dict, the first value of a tuple or list, or the sample itself."""
        return sample.get("image") if isinstance(sample, dict) else super().image_of(sample)

    def steps_of(self, pipeline: Any) -> list[Any]:
        """The first step, which decides."""
        return [_first_step(pipeline)]


def _first_step(transform: Any) -> Any:
    """The first step of a pipeline; the transform itself if it is none, or has no steps."""
    while True:
        if isinstance(transform, (torch.nn.Sequential, torch.nn.ModuleList)):
            steps: Any = transform
        elif type(transform).__module__.startswith(V1_MODULE) and type(transform).__name__ in _PIPELINES:
            steps = transform.transforms
        else:
            return transform
        if not len(steps):
            return transform
        transform = steps[0]


def _takes_an_image(step: Any) -> bool:
    return type(step).__name__ not in {*_PIPELINES, "Lambda"}


def _is_label(value: Any) -> bool:
    """Whether a value has no place in the image: a number, a text, or a vector of numbers."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return type(value) in (np.ndarray, torch.Tensor) and value.ndim <= 1
    return isinstance(value, _LABELS)
