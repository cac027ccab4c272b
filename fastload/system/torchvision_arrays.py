"""torchvision's v2 transforms leave NumPy arrays as they are; here that is an error.

A pipeline of flips and colors would otherwise train without augmentation, and nobody would notice.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    import types
    from collections.abc import Callable

    Function = TypeVar("Function", bound=Callable[..., Any])

V1_MODULE, V2_MODULE = "torchvision.transforms.", "torchvision.transforms.v2."
V2_INSTEAD = (
    "use the classes of these names in torchvision.transforms.v2, which take whole samples: first ToImage(), "
    "and ToDtype(torch.float32, scale=True) for ToTensor(). For an image in an array beside a label, "
    "ToPILImage() at the beginning is enough"
)
_callers: set[types.CodeType] = set()


def calls_transforms(function: Function) -> Function:
    """Mark a function of this library that calls the user's transform with a sample."""
    _callers.add(function.__code__)
    return function


def reject_arrays() -> None:
    """Hook torchvision's class of v2 transforms, if it is imported; does nothing the second time."""
    cls = getattr(sys.modules.get(V2_MODULE[:-1]), "Transform", None)
    choose = getattr(cls, "_needs_transform_list", None)
    if choose is None or hasattr(choose, "_fastload_is_hooked"):
        return

    @functools.wraps(choose)
    def checked(self: Any, flat_inputs: list[Any]) -> list[bool]:
        chosen: list[bool] = choose(self, flat_inputs)
        image = next(filter(_has_sides, flat_inputs), None)
        if isinstance(image, np.ndarray) and _ignores(self, flat_inputs, chosen) and _is_called_by_us():
            raise TypeError(
                f"{type(self).__name__} of torchvision takes no NumPy array, so it would leave the image of "
                f"shape {image.shape} as it is: begin the transform with torchvision.transforms.v2.ToImage, "
                "which makes a tensor of an (H, W, C) array"
            )
        return chosen

    checked._fastload_is_hooked = True  # type: ignore[attr-defined]
    cls._needs_transform_list = checked  # type: ignore[union-attr]


def advice_on(error: Exception, image: Any) -> str:
    """How to call the transform that raised an error over an array; empty if it was none of torchvision's."""
    trace = error.__traceback__
    if trace is None or not isinstance(image, np.ndarray):
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    if not trace.tb_frame.f_globals.get("__name__", "").startswith("torchvision.transforms."):
        return ""
    return (
        "transforms of torchvision take PIL images and tensors: call them with PIL.Image.fromarray(image) in "
        "a function that returns the sample, or use those of torchvision.transforms.v2, with ToImage() first"
    )


def _has_sides(value: Any) -> bool:
    """Whether a value can be an image; labels and boxes of one sample have no two sides, or come after it."""
    return isinstance(value, (np.ndarray, torch.Tensor)) and value.ndim >= 2


def _ignores(transform: Any, flat_inputs: list[Any], chosen: list[bool]) -> bool:
    """Whether a transform of images leaves out the image in an array.

    A plain tensor beside it would be taken for the image, even if it is a label. Transforms of boxes alone,
    and of tv_tensors alone, are not of images.
    """
    values = zip(flat_inputs, chosen, strict=True)
    if any(is_chosen and type(value) is not torch.Tensor for value, is_chosen in values):
        return False
    kinds = transform._transformed_types
    return any(
        issubclass(torch.Tensor, kind) or kind.__module__.startswith("PIL.")
        if isinstance(kind, type)
        else True
        for kind in kinds
    )


def _is_called_by_us() -> bool:
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in _callers:
            return True
        frame = frame.f_back
    return False
