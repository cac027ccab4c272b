"""GPU checks of batch transforms: their values against the CPU's, time, kernels, memory; other ways to do it.

Run by gpu_checks.py.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gpu_tools import MB, check, gpu_ms, sized

import fastload
from fastload.transforms import (
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
)
from fastload.transforms.boxes import NUM_DRAWS, draw_boxes
from fastload.transforms.compose import compose
from fastload.transforms.resample import _all_at_once, resample

if TYPE_CHECKING:
    from collections.abc import Callable

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def kernels(work: Callable[[], Any]) -> int:
    """How many kernels one call launches."""
    work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    return (
        sum(
            event.count
            for event in profile.key_averages()
            if event.device_type == torch.profiler.DeviceType.CUDA
        )
        if hasattr(torch.profiler, "DeviceType")
        else sum(event.count for event in profile.key_averages())
    )


def cost(work: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds, kernels and peak memory of a call."""
    work()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = work()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    start_s = time.perf_counter()
    for _ in range(10):
        work()
    host_ms = (time.perf_counter() - start_s) * 100
    return {"ms": gpu_ms(work), "host_ms": host_ms, "kernels": kernels(work), "peak_MB": peak / MB}


@check
def transforms_on_the_device() -> dict[str, Any]:
    images = torch.randint(0, 256, (sized(256, 2), 256, 256, 3), dtype=torch.uint8, device="cuda")
    small = torch.randint(0, 256, (512, 32, 32, 3), dtype=torch.uint8, device="cuda")
    crop, flip, norm = RandomResizedCrop(224), RandomHorizontalFlip(), Normalize(MEAN, STD, torch.bfloat16)
    ways: dict[str, tuple[Callable[[Any], Any], torch.Tensor]] = {
        "RandomResizedCrop + flip": (compose([crop, flip]), images),
        "RandomResizedCrop + flip + Normalize": (compose([crop, flip, norm]), images),
        "Normalize": (norm, images),
        "flip": (flip, images),
        "RandomCrop(32, 4) + flip + Normalize, 512 x 32 px": (
            compose([RandomCrop(32, 4), flip, norm]),
            small,
        ),
    }
    return {name: cost(lambda f=f, x=x: f(x)) for name, (f, x) in ways.items()}


def boxes_of(num: int, height: int, width: int) -> np.ndarray[Any, Any]:
    """Boxes as the transforms draw them."""
    return draw_boxes(
        np.random.default_rng(1).random((NUM_DRAWS, num)), (height, width), (0.08, 1.0), (3 / 4, 4 / 3)
    )


def grid(images: torch.Tensor, boxes: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """By one grid_sample of floats with clamped coordinates."""
    num, height, width, _ = images.shape
    top, left, box_height, box_width = boxes[:, :, None]

    def along(n: int, start: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(n, dtype=torch.float32, device=images.device)
        return start + torch.minimum(((steps + 0.5) * (length / n) - 0.5).clamp(min=0), length - 1)

    y, x = along(size[0], top, box_height), along(size[1], left, box_width)
    points = torch.stack(
        [
            (2 * x / (width - 1) - 1)[:, None].expand(num, *size),
            (2 * y / (height - 1) - 1)[:, :, None].expand(num, *size),
        ],
        -1,
    )
    values = torch.nn.functional.grid_sample(
        images.permute(0, 3, 1, 2).float(), points, "bilinear", "border", align_corners=True
    )
    return (values + 0.5).to(torch.uint8).permute(0, 2, 3, 1)


def products(
    images: torch.Tensor, boxes: torch.Tensor, size: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """By two batched matrix products with hat functions."""
    num, height, width, channels = images.shape
    top, left, box_height, box_width = boxes[:, :, None]

    def weights(n: int, start: torch.Tensor, length: torch.Tensor, pixels: int) -> torch.Tensor:
        steps = torch.arange(n, dtype=torch.float32, device=images.device)
        place = start + torch.minimum(((steps + 0.5) * (length / n) - 0.5).clamp(min=0), length - 1)
        return (
            (1 - (torch.arange(pixels, device=images.device) - place[:, :, None]).abs())
            .clamp(min=0)
            .to(dtype)
        )

    rows, columns = (
        weights(size[0], top, box_height, height),
        weights(size[1], left, box_width, width),
    )
    # (B, h, H) x (B, H, W * C) -> (B, h, W, C); then over W.
    tall = torch.bmm(rows, images.to(dtype).view(num, height, width * channels)).view(
        num, size[0], width, channels
    )
    wide = torch.matmul(columns[:, None], tall)
    return (wide.float() + 0.5).to(torch.uint8)


@check
def ways_to_crop_and_resize() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for num, side in ((sized(256, 2), sized(256, 40)), (sized(256, 2), sized(500, 50))):
        images = torch.randint(0, 256, (num, side, side, 3), dtype=torch.uint8, device="cuda")
        drawn = boxes_of(num, side, side)
        boxes = torch.from_numpy(drawn.astype(np.float32)).cuda()
        expected = resample(images[:32].cpu(), drawn[:, :32], (224, 224)).int()
        ways: dict[str, Callable[[], torch.Tensor]] = {
            "resample": lambda i=images, d=drawn: resample(i, d, (224, 224)),
            "torch's operations": lambda i=images, b=boxes: _all_at_once(i, b, (224, 224)),
            "grid_sample": lambda i=images, b=boxes: grid(i, b, (224, 224)),
            "products, float16": lambda i=images, b=boxes: products(i, b, (224, 224), torch.float16),
            "products, bfloat16": lambda i=images, b=boxes: products(i, b, (224, 224), torch.bfloat16),
        }
        for name, work in ways.items():
            try:
                difference = (work()[:32].cpu().int() - expected).abs()
                row = cost(work)
                row["largest difference to the CPU's"] = int(difference.max())
                row["share that differs"] = float((difference > 0).float().mean())
            except Exception as error:  # noqa: BLE001  # one way fails, the others are measured
                row = {"error": f"{type(error).__name__}: {error}"[:500]}
            found[f"{name}, {side} px"] = row
    return found


@check
def dataset_on_the_device() -> dict[str, Any]:
    """50,000 images of 32 px that lie on the device: rows a second through a loader of indices."""
    num = sized(50_000, 5_000)
    images = torch.randint(0, 256, (num, 32, 32, 3), dtype=torch.uint8, device="cuda")
    labels = torch.arange(num, device="cuda")
    augment = [RandomCrop(32, 4), RandomHorizontalFlip(), Normalize((0.5,) * 3, (0.5,) * 3, torch.float16)]
    found: dict[str, Any] = {}
    for name, transform in (("gather", []), ("gather, crop, flip, Normalize", augment)):
        for batch_size in (512, 2048):
            loader = fastload.DataLoader(
                range(num),
                batch_size,
                shuffle=True,
                device="cuda",
                seeding="sample",
                device_transform=[lambda rows: (images[rows], labels[rows]), *transform],
            )
            figures = []
            for _ in range(3):
                torch.cuda.synchronize()
                start_s, start_cpu_s = time.perf_counter(), time.process_time()
                for _ in loader:
                    pass
                torch.cuda.synchronize()
                figures.append((num / (time.perf_counter() - start_s), time.process_time() - start_cpu_s))
            found[f"{name}, batch {batch_size}"] = {
                "rows_per_s": [f[0] for f in figures],
                "cpu_s": [f[1] for f in figures],
            }
    order = torch.randperm(num, device="cuda")
    found["bare index_select of 512 rows, rows_per_s"] = 512_000 / gpu_ms(
        lambda: images.index_select(0, order[:512]), 50
    )
    return found


@check
def decode_on_the_device() -> dict[str, Any]:
    """JPEGs of 500 x 375: torchvision's decoder on the device, OpenCV and Pillow on one core."""
    import cv2
    from torchvision.io import ImageReadMode, decode_jpeg

    rng = np.random.default_rng(0)
    files = []
    for _ in range(sized(64, 2)):
        low = rng.integers(0, 256, (12, 16, 3), np.uint8)
        picture = cv2.resize(low, (500, 375), interpolation=cv2.INTER_CUBIC)
        noisy = np.clip(picture.astype(int) + rng.integers(-12, 13, picture.shape), 0, 255).astype(np.uint8)
        files.append(cv2.imencode(".jpg", noisy, [cv2.IMWRITE_JPEG_QUALITY, 90])[1])
    tensors = [torch.from_numpy(each) for each in files]
    found: dict[str, Any] = {"bytes": int(np.mean([len(each) for each in files]))}

    def rate(work: Callable[[], Any], num: int) -> float:
        work()
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        for _ in range(5):
            work()
        torch.cuda.synchronize()
        return 5 * num / (time.perf_counter() - start_s)

    found["torchvision on the device, images/s"] = rate(
        lambda: decode_jpeg(tensors, ImageReadMode.RGB, device="cuda"), 64
    )
    cv2.setNumThreads(1)
    found["OpenCV on one core, images/s"] = rate(
        lambda: [cv2.imdecode(each, cv2.IMREAD_COLOR) for each in files], 64
    )
    there = decode_jpeg(tensors[:1], ImageReadMode.RGB, device="cuda")[0].cpu().int()
    here = (
        torch.from_numpy(cv2.imdecode(files[0], cv2.IMREAD_COLOR)[:, :, ::-1].copy()).permute(2, 0, 1).int()
    )
    found["largest difference"] = int((there - here).abs().max())
    found["share that differs"] = float(((there - here) != 0).float().mean())
    return found
