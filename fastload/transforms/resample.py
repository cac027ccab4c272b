"""Crop and resize each image of a batch to one size, on the device of the batch.

1. The values are those of OpenCV's INTER_LINEAR within one gray level: bilinear between the four nearest
   pixels of the box, with half-pixel centres and without antialiasing. Pixels outside the box are ignored.
2. On the CPU, torch resizes one image after another: its kernel for one uint8 image is several times faster
   than any formulation for the whole batch. benchmarks/NOTES.md has the figures.
3. On a CUDA device with Triton, which torch's Linux builds bring, one kernel does it (triton_crop.py).
4. On any other accelerator, one image at a time would be hundreds of kernels. There the four pixels are
   gathered for the whole batch, and no shape depends on a box, so the host never waits for the device. The
   memory in use depends on the size of the result, not on that of the images.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch

from fastload.device.devices import copy_parameters
from fastload.system.logs import say_once

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

# Of images, in the kernel's arithmetic.
_FLOAT32 = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)


@torch.no_grad()
def resample(images: torch.Tensor, boxes: NDArray[np.float64], size: tuple[int, int]) -> torch.Tensor:
    """The content of one box of each image, resized.

    Args:
        images: ``(B, H, W, C)`` uint8 or floats, with any strides.
        boxes: ``(4, B)`` whole numbers: top, left, height and width of each box in pixels.
        size: Height and width of the results in pixels.

    Returns:
        A new, contiguous ``(B, h, w, C)`` tensor in the dtype of the images.
    """
    # On CPUs without AVX2, torch's kernel gives wrong values for uint8 images of one channel and one column.
    if images.device.type == "cpu" and min(size) > 1:
        return _one_by_one(images, boxes, size)
    parameters = copy_parameters(torch.from_numpy(boxes.astype(np.float32)), images.device)
    if images.device.type == "cuda" and images.dtype in _FLOAT32 and images.numel():
        by_one_kernel = _triton()
        if by_one_kernel is not None:
            return by_one_kernel(images, parameters, size)
    return _all_at_once(images, parameters, size)


@functools.cache
def _triton() -> Callable[[torch.Tensor, torch.Tensor, tuple[int, int]], torch.Tensor] | None:
    """The one kernel, compiled for the first time; None where it cannot be."""
    try:
        from fastload.transforms.triton_crop import crop_and_resize

        image = torch.zeros((1, 2, 2, 1), dtype=torch.uint8, device="cuda")
        crop_and_resize(image, torch.tensor([[0.0], [0.0], [2.0], [2.0]], device="cuda"), (1, 1))
    except Exception as error:  # noqa: BLE001  # no Triton, no C compiler for its launcher, an old device, ...
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        say_once(f"batches are cropped by many small kernels, not by one of Triton's: {reason}")
        return None
    return crop_and_resize


def _one_by_one(images: torch.Tensor, boxes: NDArray[np.float64], size: tuple[int, int]) -> torch.Tensor:
    result = torch.empty((len(images), *size, images.shape[3]), dtype=images.dtype, device="cpu")
    # Both channels-last, because torch's kernels for uint8 give wrong values for some images that are not.
    sources, targets = images.contiguous().permute(0, 3, 1, 2), result.permute(0, 3, 1, 2)
    for number, (top, left, height, width) in enumerate(boxes.T.astype(int).tolist()):
        source = sources[number, None, :, top : top + height, left : left + width]
        target = resized = targets[number, None]
        if images.is_floating_point():
            source = source.to(torch.promote_types(images.dtype, torch.float32))
            resized = torch.empty_like(target, dtype=source.dtype)
        # Like torch.nn.functional.interpolate, which cannot write to existing memory and takes twice the
        # time.
        torch.ops.aten.upsample_bilinear2d.out(source, size, False, None, None, out=resized)
        if resized is not target:
            target.copy_(resized)
    return result


def _all_at_once(images: torch.Tensor, boxes: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    num_images, image_height, image_width, num_channels = images.shape
    top, left, height, width = boxes[:, :, None]
    # In float32; in float64 for float64.
    dtype = torch.promote_types(images.dtype, torch.float32)
    upper, lower, down = _along(_steps(size[0], boxes), top, height, size[0])
    start, end, right = _along(_steps(size[1], boxes), left, width, size[1])
    first = torch.arange(num_images, device=images.device)[:, None] * image_height
    pixels = images.reshape(num_images * image_height * image_width, num_channels)
    right, down = right[:, None, :, None].to(dtype), down[:, :, None, None].to(dtype)

    def gathered(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        places = ((first + y) * image_width)[:, :, None] + x[:, None]
        return pixels.index_select(0, places.flatten()).view(num_images, *size, num_channels).to(dtype)

    above = gathered(upper, start).lerp(gathered(upper, end), right)
    below = gathered(lower, start).lerp(gathered(lower, end), right)
    result = above.lerp(below, down)
    # The conversion to integers rounds down.
    return result.to(images.dtype) if images.is_floating_point() else (result + 0.5).to(images.dtype)


def _steps(num_pixels: int, boxes: torch.Tensor) -> torch.Tensor:
    return torch.arange(num_pixels, dtype=torch.float32, device=boxes.device)


def _along(
    positions: torch.Tensor, start: torch.Tensor, length: torch.Tensor, num_pixels: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Along one dimension: the pixels before and after each position, and the weight of the second."""
    last = length - 1
    place = torch.minimum(((positions + 0.5) * (length / num_pixels) - 0.5).clamp(min=0), last)
    before = place.floor()
    after = torch.minimum(before + 1, last)
    return (start + before).long(), (start + after).long(), place - before
