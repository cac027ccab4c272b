"""How fast decoded images of several sizes, in RAM, become small crops.

Question: how many images a second come out of a filled cache of decoded images through
RandomResizedCrop(224) and a flip, if the images are as small as 256 x 256 or as large as 2048 x 1536?

Held out: decoding and the first epoch; the cache is filled before the first run. The images are made as
those of `benchmarks/decode.py`. There are fewer large files than images, but the cache stores each image by
itself. Two workers, batches of 64, and nobody reads the batches. torch's loader decodes in each epoch.

Command: python benchmarks/cached.py [--runs 5] [--save]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import cv2
from decode import TORCH, OwnDataset, Size, make_images, row, training_pipeline
from harness import interleave, report, save
from torch.utils.data import DataLoader

import fastload

SIZES = (
    Size(256, 256, 1024, 1024, 0.0, 9, False),
    Size(500, 375, 768, 768, 0.0, 9, False),
    Size(2048, 1536, 256, 48, 3.0, 9, False),
)
CACHED = 'cache="ram", decoded'


def in_ram(folder: fastload.ImageFolder) -> fastload.CachedDataset:
    """All decoded images in RAM."""
    cached = fastload.CachedDataset(folder, training_pipeline(), cache="ram")
    cached.fill(progress=False)
    if cached.cache_info().num_cached != len(folder):
        raise RuntimeError(f"expected {len(folder)} cached images, got {cached.cache_info().num_cached}")
    return cached


def question(size: Size, runs: int) -> dict[str, Any]:
    """Images of one size, cached and not."""
    with tempfile.TemporaryDirectory() as work:
        make_images(Path(work), size)
        folder = fastload.ImageFolder(work)
        rows = [
            row(TORCH, DataLoader, lambda: OwnDataset(folder, training_pipeline()), len(folder)),
            row(CACHED, fastload.DataLoader, lambda: in_ram(folder), len(folder)),
        ]
        interleave(rows, runs)
        ratio = rows[1].median / rows[0].median
        title = f"{size.title} images in RAM, RandomResizedCrop(224) and a flip, 2 workers"
        return report(title, "images/s", rows, {f"{CACHED} / {TORCH}": (ratio, 1.0)})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/cached.json")
    args = parser.parse_args()
    cv2.setNumThreads(0)  # as albumentations advises beside workers
    answers = [question(size, args.runs) for size in SIZES]
    if args.save:
        save("cached", f"python benchmarks/cached.py --runs {args.runs} --save", answers)


if __name__ == "__main__":
    main()
