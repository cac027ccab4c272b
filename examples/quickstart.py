"""One import changed: the same training script, with batches from a shared cache of decoded images.

    python examples/quickstart.py [FOLDER]

FOLDER holds one folder of images per class. Without it, a small one is drawn in a temporary folder.
Claim: the second epoch decodes nothing, and the batches are those that the dataset and transform give.
"""

import sys
import tempfile
from pathlib import Path

import albumentations as A
import numpy as np
import torch
from PIL import Image

import fastload
from fastload import DataLoader  # was: from torch.utils.data import DataLoader


def draw_images(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir()
        for number in range(16):
            pixels = rng.integers(0, 256, (64, 80, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


def main(folder: Path) -> None:
    transform = A.Compose([A.RandomCrop(48, 48), A.HorizontalFlip(p=0.5)])
    photos = fastload.ImageFolder(folder, size=(64, 80))
    dataset = fastload.CachedDataset(photos, transform=transform, cache="ram")

    loader = DataLoader(
        dataset,
        batch_size=8,
        shuffle=True,
        num_workers=2,
        memory_format=torch.channels_last,  # (B, H, W, C) handed out as (B, C, H, W) without a copy
    )
    for epoch in range(2):
        for images, labels in loader:
            assert images.is_contiguous(memory_format=torch.channels_last)
            assert len(images) == len(labels)
        print(
            f"epoch {epoch}: {images.dtype} {tuple(images.shape)}, {dataset.cache_info().num_cached} cached"
        )

    assert dataset.cache_info().num_cached == len(dataset)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as directory:
            draw_images(Path(directory))
            main(Path(directory))
