"""Normalize: convert batches of uint8 images to normalized floats, on the device of the batch.

1. ``out = image * scale + bias`` with one scale and one bias per channel, computed in float32 (float64 for
   float64), rounded to `dtype` once, at the end.
2. On an accelerator this is one kernel, which reads uint8 and writes `dtype`: type conversion, layout and
   arithmetic in one step. On the CPU it is faster to convert first, because mixed types are slow there.
3. The constants are computed again from `mean` and `std` whenever the module moves: ``half()`` cannot round
   them.
4. The layout is never guessed: if the shape fits both layouts, the user must name one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fastload.nested.tree import map_device_leaves
from fastload.transforms.image_transform import check_layout, find_images, layout_of, new_images

if TYPE_CHECKING:
    from collections.abc import Callable

_FORMATS = (None, torch.channels_last, torch.contiguous_format)


class Normalize(nn.Module):
    """Computes ``(image / max_pixel_value - mean) / std`` for a batch of uint8 images.

    Takes ``(B, H, W, C) uint8`` or ``(B, C, H, W) uint8`` with any strides; returns a new ``(B, C, H, W)``
    tensor in ``dtype`` and ``memory_format`` on the same device, which the caller owns. uint8 images send a
    quarter of float32's bytes to the GPU. The module has no parameters and no state_dict entry, and can be
    pickled.

    If the batch is not a tensor, the result is a new batch of its type with the images replaced. The images
    are the first element of a list or tuple (also a namedtuple), the value of "image" or "images" in a
    mapping, or the value at ``key``. All other values of the batch are passed on unchanged.

    Args:
        mean: One value per channel, in units of ``max_pixel_value``, as ImageNet's (0.485, 0.456, 0.406).
        std: One value per channel, in the same units, above zero.
        dtype: The floating dtype of the result. ``half()`` and ``to(dtype)``, on this module or a model
            around it, do not change it.
        memory_format: Strides of the result: ``torch.channels_last`` or ``torch.contiguous_format``; None
            keeps the order of the images in memory, so ``(B, H, W, C)`` batches become channels-last.
        max_pixel_value: The value that counts as 1. Pass 1 for a mean and std of 0 to 255.
        layout: The meaning of the dimensions: "HWC", "CHW", or "auto": the layout whose C is ``len(mean)``.
        key: Where the images are in a batch: an index, or the key of a mapping.

    Attributes:
        mean: As given.
        std: As given.

    Raises:
        TypeError: ``mean`` or ``std`` is not a sequence of numbers; ``max_pixel_value`` is not a number;
            ``dtype`` is not a floating dtype; or, when called, there is no uint8 tensor in the images' place.
        ValueError: The constants are not one finite value per channel, or have a mean that no uint8 image can
            have, or a different argument is invalid; or, when called, the shape fits no layout or both, or
            the batch has no ``key``, or neither or both of "image" and "images".
    """

    _scale: torch.Tensor
    _bias: torch.Tensor

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format | None = None,
        *,
        max_pixel_value: float = 255.0,
        layout: str = "auto",
        key: Any = None,
    ) -> None:
        super().__init__()
        self.mean = _per_channel("mean", mean)
        self.std = _per_channel("std", std)
        if not self.mean or len(self.mean) != len(self.std):
            raise ValueError(
                "mean and std should have one value per channel, "
                f"but got {len(self.mean)} and {len(self.std)} values"
            )
        try:
            self.max_pixel_value = float(max_pixel_value)
        except (TypeError, ValueError):
            raise TypeError(f"max_pixel_value should be a number, but got {max_pixel_value!r}") from None
        if not min(self.std) > 0 or not self.max_pixel_value > 0:
            raise ValueError(
                f"std and max_pixel_value should be above zero, but got {self.std} and {max_pixel_value}"
            )
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise TypeError(f"dtype should be a floating dtype, such as torch.bfloat16, but got {dtype!r}")
        if memory_format not in _FORMATS:
            raise ValueError(
                "memory_format should be None, torch.channels_last or torch.contiguous_format, "
                f"but got {memory_format}"
            )
        self.dtype = dtype
        self.memory_format = memory_format
        self.layout = check_layout(layout)
        self.key = key
        self._make_constants(torch.device("cpu"))
        if not (self._scale.isfinite().all() and self._bias.isfinite().all()):
            raise ValueError(f"mean / std should be finite, but got mean={self.mean} and std={self.std}")
        if max_pixel_value == 255 and max(self.mean) > 1:
            raise ValueError(
                "mean and std should be in units of max_pixel_value=255, where no uint8 image has a mean "
                f"above 1, but got mean={self.mean}; pass max_pixel_value=1 for constants of 0..255"
            )

    def forward(self, batch: Any) -> Any:
        """Normalize the images of a batch; see the class."""
        where, images = find_images(batch, self.key, "Normalize", "a uint8 tensor")
        if images.dtype != torch.uint8:
            raise TypeError(
                f"Normalize expects uint8 images at {where}, but got {images.dtype} of shape "
                f"{tuple(images.shape)}; leave out ToTensor, Normalize and other conversions before it"
            )
        is_hwc = layout_of(images, where, self.layout, "Normalize", len(self.mean)) == "HWC"
        normalized = self._normalize(images.permute(0, 3, 1, 2) if is_hwc else images)
        return map_device_leaves(batch, lambda leaf: normalized if leaf is images else leaf)

    def extra_repr(self) -> str:
        """The arguments, for the module's repr."""
        return f"mean={self.mean}, std={self.std}, dtype={self.dtype}, memory_format={self.memory_format}"

    # --- the arithmetic ---------------------------------------------------------------------------------

    def _normalize(self, images: torch.Tensor) -> torch.Tensor:
        if images.device != self._scale.device:
            self._make_constants(images.device)
        memory_format = self.memory_format
        if memory_format is None:
            is_planar = images.is_contiguous() and images.shape[1] > 1
            memory_format = torch.contiguous_format if is_planar else torch.channels_last
        if images.device.type == "cpu":
            return self._on_cpu(images, memory_format).to(self.dtype)
        out = torch.empty(images.shape, dtype=self.dtype, device=images.device, memory_format=memory_format)
        return torch.addcmul(self._bias, images, self._scale, out=out)

    def _on_cpu(self, images: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
        dtype, pixels = self._scale.dtype, images.permute(0, 2, 3, 1)
        if memory_format != torch.channels_last or not pixels.is_contiguous():
            exact = images.to(dtype, memory_format=memory_format)
            return torch.addcmul(self._bias, exact, self._scale, out=exact)
        # Constants for each value of a row: an inner loop over three channels takes six times as long.
        num_images, height, width, num_channels = pixels.shape
        scale, bias = (constants.flatten().repeat(width) for constants in (self._scale, self._bias))
        exact = new_images(pixels.shape, dtype, pixels.device).copy_(pixels)
        rows = exact.view(num_images * height, width * num_channels)
        torch.addcmul(bias, rows, scale, out=rows)
        return exact.permute(0, 3, 1, 2)

    def _make_constants(self, device: torch.device) -> None:
        dtype = torch.promote_types(self.dtype, torch.float32)
        mean = torch.tensor(self.mean, dtype=torch.float64, device="cpu").view(1, -1, 1, 1)
        std = torch.tensor(self.std, dtype=torch.float64, device="cpu").view(1, -1, 1, 1)
        # Not in the state_dict: they are arguments, and loading older weights must not require them.
        # Two steps for each constant: a copy that also converts would make the host wait for the device.
        scale, bias = (1 / (self.max_pixel_value * std)).to(dtype), (-mean / std).to(dtype)
        self.register_buffer("_scale", scale.to(device, non_blocking=True), persistent=False)
        self.register_buffer("_bias", bias.to(device, non_blocking=True), persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Normalize:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._make_constants(self._scale.device)
        return self


def _per_channel(name: str, values: Any) -> tuple[float, ...]:
    try:
        if isinstance(values, (str, bytes, Mapping, Set)):
            raise TypeError("which has no order, or no numbers")
        return tuple(float(value) for value in values)
    except (TypeError, ValueError, RuntimeError) as error:  # the last two: tensors of too many dimensions
        got = f"{type(values).__name__}: {error}"
        raise TypeError(f"{name} should be a sequence of numbers, one per channel, but got {got}") from error
