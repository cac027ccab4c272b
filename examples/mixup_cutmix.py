"""MixUp and CutMix in a collate_fn: the workers mix the images of a batch, and the labels become soft.

    python examples/mixup_cutmix.py [FOLDER]

FOLDER holds a folder of images for each class. The random numbers come from numpy.random and torch, which the
loader seeds in each worker process from its `generator`: the same seed and the same num_workers give the same
mixed batches.
"""

from pathlib import Path
from typing import Any

import albumentations as A
import numpy as np
import torch
from pictures import SIZE, photo_folder, small_network
from torch import nn
from torch.utils.data import default_collate

import fastload


class MixUpOrCutMix:
    """A collate_fn that applies one of the two to each batch."""

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes

    def __call__(self, samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """The mixed images, and a share for each class."""
        images, labels = default_collate(samples)  # (B, H, W, C) uint8 and (B,) int64
        targets = nn.functional.one_hot(labels, self.num_classes).float()
        order = torch.randperm(len(images))  # each image is mixed with this one
        mix = mixup if np.random.random() < 0.5 else cutmix
        images, share = mix(images, images[order])
        return images, targets.lerp(targets[order], 1 - share)


def mixup(images: torch.Tensor, others: torch.Tensor) -> tuple[torch.Tensor, float]:
    """A weighted sum of both, as uint8; and the share of the first."""
    share = float(np.random.beta(0.2, 0.2))
    mixed = images.float().lerp(others.float(), 1 - share)
    return mixed.round().to(torch.uint8), share


def cutmix(images: torch.Tensor, others: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The images with a window from the others; and the share of the pixels that is left of the first."""
    height, width = images.shape[1:3]
    side = (1 - float(np.random.beta(1.0, 1.0))) ** 0.5
    cut_height, cut_width = int(height * side), int(width * side)
    top = np.random.randint(height - cut_height + 1)
    left = np.random.randint(width - cut_width + 1)
    window = (slice(None), slice(top, top + cut_height), slice(left, left + cut_width))
    images[window] = others[window]
    return images, 1 - cut_height * cut_width / (height * width)


def make_loader(folder: Path) -> fastload.DataLoader:
    photos = fastload.ImageFolder(folder, size=SIZE)
    transform = A.Compose([A.RandomCrop(80, 80), A.HorizontalFlip(p=0.5)])  # runs before the mixing
    return fastload.DataLoader(
        fastload.CachedDataset(photos, transform=transform, cache="ram"),
        batch_size=8,
        shuffle=True,
        num_workers=2,
        generator=torch.Generator().manual_seed(1),
        collate_fn=MixUpOrCutMix(len(photos.classes)),
        device="auto",
        device_transform=fastload.transforms.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
    )


def train(folder: Path) -> None:
    loader = make_loader(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = small_network(len(loader.dataset.classes)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(3):
        for images, targets in loader:  # (B, 3, 80, 80) float32 and (B, num_classes) float32
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), targets)  # takes soft targets as they are
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


# --- The template ends here. The rest runs it, and mixes one epoch twice. -----------------------------------


def main() -> None:
    with photo_folder() as folder:
        train(folder)
        targets, again = (torch.cat([soft for _, soft in make_loader(folder)]) for _ in range(2))
        mixed = int((targets.amax(1) < 1).sum())
        print(f"{mixed} of {len(targets)} images have a label of two classes")
        print(f"the same seed gives {'the same' if torch.equal(targets, again) else 'other'} mixed labels")


if __name__ == "__main__":
    main()
