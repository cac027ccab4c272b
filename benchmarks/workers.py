"""Threads against processes, where each is at its best: batches a second.

Question: which `worker_type` for which dataset? Five datasets: JPEG files whose decoding releases the GIL
(Pillow), the same with an albumentations pipeline, decoded images of two sizes behind a cache, and pure
Python that holds the GIL throughout. Each with 1 and 2 workers, persistent, one epoch before measuring.

Command: python benchmarks/workers.py build/photos [--runs 5] [--save]   (`make photos` makes the folder)

The question about albumentations is left out where albumentations is not installed.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
from typing import Any

import numpy as np
from harness import best, contender, interleave, report, save
from torch.utils.data import Dataset, Subset

import fastload

WORKERS = (1, 2)
NUM_PHOTOS = 400
NUM_CACHED = 4096
NUM_NUMBERS = 512


class Python(Dataset):
    """A sample that is worked out in the interpreter, a millisecond or two each."""

    def __len__(self) -> int:
        return NUM_NUMBERS

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], int]:
        return np.array([sum((index * i) % 7 for i in range(15_000))]), index


class Photos(Dataset):
    """Decoded, cut to one size, and flipped if there is a pipeline."""

    def __init__(self, folder: str, transform: Any = None) -> None:
        self.images = Subset(fastload.ImageFolder(folder, size=(256, 256)), range(NUM_PHOTOS))
        self.transform = transform

    def __len__(self) -> int:
        return NUM_PHOTOS

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label = self.images[index]
        if self.transform is not None:
            image = self.transform(image=image)["image"]
        return image, label


class Blank(Dataset):
    """Square images that cost nothing."""

    def __init__(self, side: int) -> None:
        self.side = side

    def __len__(self) -> int:
        return NUM_CACHED

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], int]:
        return np.full((self.side, self.side, 3), index % 256, np.uint8), index


def filled(dataset: Any) -> fastload.CachedDataset:
    """The dataset behind a RAM cache in which every sample is present."""
    cached = fastload.CachedDataset(dataset, cache="ram")
    for index in range(len(cached)):
        cached._view(index)
    return cached


def crop_and_flip(photos: str) -> Photos:
    """The photos with a pipeline of albumentations."""
    import albumentations as A

    return Photos(photos, A.Compose([A.RandomResizedCrop((224, 224)), A.HorizontalFlip(p=0.5)]))


def make(dataset: Any, batch_size: int, num_workers: int, method: Any) -> fastload.DataLoader:
    """A shuffling loader whose workers persist."""
    return fastload.DataLoader(
        dataset,
        batch_size,
        shuffle=True,
        num_workers=num_workers,
        persistent_workers=True,
        worker_type=method,
    )


def question(title: str, dataset: Any, batch_size: int, runs: int) -> dict[str, Any]:
    """Both methods over one dataset."""
    rows = [
        contender(
            f"{method}, {num_workers} workers",
            method,
            functools.partial(make, dataset, batch_size, num_workers, method),
            len(dataset),
        )
        for num_workers in WORKERS
        for method in ("process", "thread")
    ]
    interleave(rows, runs)
    ratio = best(rows, "thread").median / best(rows, "process").median
    return report(title, "images/s", rows, {"thread / process": (ratio, 1.0)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", help="a folder of images, one folder a class")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write the results file")
    args = parser.parse_args()
    answers = [question("decode and resize JPEGs, batch 32", Photos(args.photos), 32, args.runs)]
    if importlib.util.find_spec("albumentations") is not None:
        title = "decode, resize, crop and flip, batch 32"
        answers.append(question(title, crop_and_flip(args.photos), 32, args.runs))
    answers += [
        *(
            question(f"cached {side} x {side} x 3, batch 256", filled(Blank(side)), 256, args.runs)
            for side in (64, 32)
        ),
        question("pure Python, 1-2 ms a sample, batch 32", Python(), 32, args.runs),
    ]
    if args.save:
        save("workers", f"python benchmarks/workers.py build/photos --runs {args.runs} --save", answers)


if __name__ == "__main__":
    os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
    main()
