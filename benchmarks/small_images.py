"""Small images in memory, augmented one by one or as whole batches.

Question: how many 32 x 32 images a second reach the training loop after a padded random crop and a flip, if
the pipeline of albumentations gets them one by one in torch's loader and in fastload's, and if the workers of
fastload transform whole batches (`batch_transform=`), read from the dataset or gathered from a cache?

Held out: the disk, the start of the workers (they persist, and one epoch comes before), and the GPU. The
transforms differ in their random numbers alone.

Command: python benchmarks/small_images.py [--runs 5] [--save]
"""

from __future__ import annotations

import argparse
import functools
from typing import TYPE_CHECKING, Any

import albumentations as A
import torch
import torch.utils.data
from harness import contender, interleave, report, save
from throughput import InMemory, filled

import fastload
from fastload import transforms

if TYPE_CHECKING:
    import numpy as np

NUM_IMAGES, SIDE, PADDING, BATCH_SIZE = 51200, 32, 4, 512


class OneByOne(torch.utils.data.Dataset):
    """Images of an array, cropped and flipped by albumentations."""

    def __init__(self) -> None:
        self.images = InMemory(NUM_IMAGES, SIDE)
        padded = SIDE + 2 * PADDING
        self.transform = A.Compose(
            [A.PadIfNeeded(padded, padded, border_mode=0), A.RandomCrop(SIDE, SIDE), A.HorizontalFlip(p=0.5)]
        )

    def __len__(self) -> int:
        return NUM_IMAGES

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], int]:
        image, label = self.images[index]
        return self.transform(image=image)["image"], label


def make(loader: Any, dataset: Any, **arguments: Any) -> Any:
    """A loader whose workers persist."""
    return loader(
        dataset, batch_size=BATCH_SIZE, shuffle=True, num_workers=2, persistent_workers=True, **arguments
    )


def question(runs: int) -> dict[str, Any]:
    """All ways to augment the same images."""
    one_by_one, images = OneByOne(), InMemory(NUM_IMAGES, SIDE)
    augment = [transforms.RandomCrop(SIDE, PADDING), transforms.RandomHorizontalFlip()]
    rows = [
        contender(label, label, functools.partial(make, loader, dataset, **arguments), NUM_IMAGES)
        for label, loader, dataset, arguments in (
            ("torch, one by one", torch.utils.data.DataLoader, one_by_one, {}),
            ("fastload, one by one", fastload.DataLoader, one_by_one, {}),
            ("fastload, batch_transform", fastload.DataLoader, images, {"batch_transform": augment}),
            ("fastload, cached", fastload.DataLoader, filled(images), {"batch_transform": augment}),
        )
    ]
    interleave(rows, runs)
    ratios = {
        f"{row.label} / {rows[0].label}": (row.median / rows[0].median, target)
        for row, target in zip(rows[1:], (1.3, 6.0, 7.6), strict=True)
    }
    title = f"{SIDE} x {SIDE} in memory, padded crop and flip, 2 workers, batch {BATCH_SIZE}"
    return report(title, "images/s", rows, ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/small_images.json")
    args = parser.parse_args()
    answers = [question(args.runs)]
    if args.save:
        save("small_images", f"python benchmarks/small_images.py --runs {args.runs} --save", answers)


if __name__ == "__main__":
    main()
