"""What does the changed import alone bring a dataset that decodes JPEGs on every access?

Question: a user's own dataset decodes a whole JPEG, with OpenCV or with Pillow, and crops it with
albumentations. How many images a second do two workers of each loader give, for images of several sizes?
Nothing is cached, and the dataset is the same: what differs is how a batch travels, and that workers of
fastload keep the memory that they free (fastload/system/worker_memory.py).

Each contender keeps its own two workers; both take turns, and the other's workers are idle meanwhile.

glibc learns from what a process frees how much memory it should keep, and forked workers inherit that from
their parent. So another process makes the images: a parent that has freed large arrays helps torch's workers.

Held out: disk (the files come from the page cache) and the GPU.

Command: python benchmarks/import_only.py [--runs 5] [--save]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch.utils.data
from decode import SIZES, Size, make_images, training_pipeline
from first_epoch import in_own_process
from harness import Contender, contender, interleave, report, save
from PIL import Image

import fastload

BATCH_SIZE, NUM_WORKERS = 16, 2


class Photos(torch.utils.data.Dataset[Any]):
    """Decodes and crops a file on every access."""

    def __init__(self, folder: fastload.ImageFolder, decoder: str) -> None:
        self.files = list(folder.samples)
        self.decoder = decoder
        self.transform = training_pipeline()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.files[index]
        if self.decoder == "OpenCV":
            image = cv2.imread(path, cv2.IMREAD_COLOR_RGB)
        else:
            image = np.asarray(Image.open(path).convert("RGB"))
        return self.transform(image=image)["image"], label


def rows(folder: fastload.ImageFolder, decoder: str) -> list[Contender]:
    """Both loaders over the same dataset."""
    dataset = Photos(folder, decoder)
    loading = {"shuffle": True, "num_workers": NUM_WORKERS, "persistent_workers": True}
    return [
        contender(
            f"{name}, {decoder}", name, lambda cls=cls: cls(dataset, BATCH_SIZE, **loading), len(dataset)
        )
        for name, cls in (("torch", torch.utils.data.DataLoader), ("fastload", fastload.DataLoader))
    ]


def question(size: Size, runs: int) -> dict[str, Any]:
    """One size of images, both decoders."""
    with tempfile.TemporaryDirectory() as work:
        in_own_process(make_images, Path(work), size)
        folder = fastload.ImageFolder(work)
        contenders = [row for decoder in ("OpenCV", "Pillow") for row in rows(folder, decoder)]
        interleave(contenders, runs)
    rates = {row.label: row.median for row in contenders}
    ratios = {
        f"{decoder}: fastload / torch": (rates[f"fastload, {decoder}"] / rates[f"torch, {decoder}"], 1.0)
        for decoder in ("OpenCV", "Pillow")
    }
    return report(f"JPEGs of {size.title}, decoded on every access", "images/s", contenders, ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    questions = [question(size, arguments.runs) for size in SIZES]
    if arguments.save:
        save("import_only", f"python benchmarks/import_only.py --runs {arguments.runs}", questions)


if __name__ == "__main__":
    main()
