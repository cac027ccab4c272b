"""How fast whole batches are cropped and flipped, each image with its own box.

Questions: how many images a second do `RandomResizedCrop(224)` and `RandomHorizontalFlip` of fastload bring,
for batches of cached 256 x 256 uint8 images, on one thread and on two, and on the GPU if there is one? The
others are albumentations and torchvision's v2 transforms, which take one image after another because each
image has its own box, and kornia, which takes the batch as floats. "As on a GPU" is the form that fastload
uses on accelerators. The last question is what the random numbers and boxes of 256 images cost the host.

Held out: reading, collating and copying. Sources are a uint8 batch in channels-last memory; results are one
batch of the same kind. A run repeats the batch for half a second. kornia and torchvision are measured where
they can be imported: build/clients/shared has both (`make test-clients` makes it).

Command: build/clients/shared/bin/python benchmarks/augment.py [--runs 7] [--save]
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # an environment without fastload

import albumentations as A
import cv2
import numpy as np
import torch
from harness import Contender, best, interleave, report, save

import fastload
from fastload.device.devices import copy_parameters
from fastload.rng.batch_draws import BatchDraws
from fastload.rng.keys import BatchKey
from fastload.transforms import resample as resampling
from fastload.transforms.boxes import NUM_DRAWS, draw_boxes
from fastload.transforms.compose import compose

if TYPE_CHECKING:
    from collections.abc import Callable

SOURCE, SIDE, CHANNELS = 256, 224, 3
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
MIN_S = 0.5

_KEPT: list[Any] = []  # operators are defined for as long as their library lives


def rate(transform: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor) -> float:
    """Images a second."""
    num_images, start_s = 0, time.perf_counter()
    while time.perf_counter() - start_s < MIN_S:
        result = transform(images)
        if result.device.type == "cuda":
            torch.cuda.synchronize()
        num_images += len(images)
    if result.shape[0] != len(images) or SIDE not in result.shape[1:3] or result.dtype != torch.uint8:
        raise RuntimeError(f"expected {len(images)} crops, got {result.dtype} of shape {tuple(result.shape)}")
    return num_images / (time.perf_counter() - start_s)


def as_on_a_gpu(images: torch.Tensor) -> torch.Tensor:
    """Fastload's form for accelerators, on any device."""
    uniforms = BatchDraws().uniforms(len(images), NUM_DRAWS)
    boxes = draw_boxes(uniforms, (SOURCE, SOURCE), SCALE, RATIO)
    parameters = copy_parameters(torch.from_numpy(boxes.astype(np.float32)), images.device)
    return fastload.transforms.RandomHorizontalFlip()(
        resampling._all_at_once(images, parameters, (SIDE, SIDE))
    )


def by_albumentations() -> Callable[[torch.Tensor], torch.Tensor]:
    pipeline = A.Compose([A.RandomResizedCrop((SIDE, SIDE)), A.HorizontalFlip()])

    def transform(images: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.stack([pipeline(image=image)["image"] for image in images.numpy()]))

    return transform


def by_torchvision() -> Callable[[torch.Tensor], torch.Tensor]:
    if not _KEPT and importlib.util.find_spec("torchvision") and not torch.cuda.is_available():
        # The wheel is built for CUDA. Its operators, which crops do not use, cannot be loaded beside torch's
        # build for the CPU; torchvision only needs their names.
        operators = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(operators)
    from torchvision.transforms import v2

    both = v2.Compose([v2.RandomResizedCrop(SIDE, antialias=False), v2.RandomHorizontalFlip()])

    def transform(images: torch.Tensor) -> torch.Tensor:
        crops = torch.stack([both(image) for image in images.permute(0, 3, 1, 2)])
        return crops.permute(0, 2, 3, 1).contiguous()

    return transform


def by_kornia() -> Callable[[torch.Tensor], torch.Tensor]:
    from kornia.augmentation import AugmentationSequential, RandomHorizontalFlip, RandomResizedCrop

    both = AugmentationSequential(
        RandomResizedCrop((SIDE, SIDE)), RandomHorizontalFlip(), data_keys=["input"]
    )

    def transform(images: torch.Tensor) -> torch.Tensor:
        floats = images.permute(0, 3, 1, 2).float() / 255
        return (both(floats) * 255 + 0.5).to(torch.uint8).permute(0, 2, 3, 1).contiguous()

    return transform


def by_fastload() -> Callable[[torch.Tensor], torch.Tensor]:
    return compose([fastload.transforms.RandomResizedCrop(SIDE), fastload.transforms.RandomHorizontalFlip()])


MAKERS: dict[str, Callable[[], Callable[[torch.Tensor], torch.Tensor]]] = {
    "fastload": by_fastload,
    "fastload, as on a GPU": lambda: as_on_a_gpu,
    "albumentations": by_albumentations,
    "torchvision v2": by_torchvision,
    "kornia": by_kornia,
}


def question(title: str, images: torch.Tensor, labels: list[str], runs: int) -> dict[str, Any]:
    """All contenders that can be imported, on one batch."""
    rows, cannot = [], {}
    for label in labels:
        try:
            transform = MAKERS[label]()
        except ImportError as error:
            cannot[label] = str(error)
            continue
        rows.append(Contender(label, label, functools.partial(rate, transform, images)))
    interleave(rows, runs)
    ours = best(rows, "fastload").median
    ratios = {f"fastload / {row.label}": (ours / row.median, 1.0) for row in rows if row.label != "fastload"}
    return {**report(title, "images/s", rows, ratios), "cannot": cannot}


def host_question(runs: int) -> dict[str, Any]:
    """Random numbers and boxes of a batch, beside the crop's own time."""
    key, indices = BatchKey(1, 2, occurrences=()), list(range(256))

    def draw_us() -> float:
        start_s = time.perf_counter()
        for _ in range(100):
            uniforms = BatchDraws(key, indices).uniforms(256, NUM_DRAWS)
            draw_boxes(uniforms, (SOURCE, SOURCE), SCALE, RATIO)
        return (time.perf_counter() - start_s) / 100 * 1e6

    row = Contender("draws and boxes", "fastload", draw_us)
    interleave([row], runs)
    title = "parameters of 256 crops, on the host"
    return report(title, "us a batch", [row], {"share of a millisecond": (row.median / 1000, 1.0)})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/augment.json")
    args = parser.parse_args()
    cv2.setNumThreads(0)  # as albumentations advises beside workers
    pixels = np.random.default_rng(0).integers(0, 256, (256, SOURCE, SOURCE, CHANNELS), dtype=np.uint8)
    images = torch.from_numpy(pixels)
    answers = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        title = f"batches of 64 on the CPU, {num_threads} thread{'s' if num_threads > 1 else ''} of torch"
        answers.append(question(title, images[:64], list(MAKERS), args.runs))
    answers.append(host_question(args.runs))
    if torch.cuda.is_available():
        there = images.cuda()
        answers.append(question("batches of 256 on the GPU", there, ["fastload", "kornia"], args.runs))
    else:
        print("no GPU")
    if args.save:
        command = f"build/clients/shared/bin/python benchmarks/augment.py --runs {args.runs} --save"
        save("augment", command, answers)


if __name__ == "__main__":
    main()
