"""Images with masks: albumentations crops and flips both alike, after the cache.

    python examples/segmentation.py [FOLDER]

FOLDER holds a folder of images for each class.
"""

from pathlib import Path
from typing import Any

import albumentations as A
import numpy as np
import torch
from pictures import SIZE, photo_folder
from torch import nn
from torch.utils.data import Dataset

import fastload

CLASSES = 3


def classify(pixels: Any) -> Any:
    """The class of each pixel from its value, dark to bright; for arrays and for tensors."""
    return pixels // (256 // CLASSES + 1)


class Scenes(Dataset):
    """Images and masks, as a dict whose keys are the targets of albumentations."""

    def __init__(self, folder: Path) -> None:
        self.photos = fastload.ImageFolder(folder, size=SIZE)

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        image, _ = self.photos[index]
        mask = classify(image[..., 1])  # yours is read from a file
        return {"image": image, "mask": mask}  # (H, W, 3) uint8 and (H, W) uint8


def train(folder: Path) -> fastload.DataLoader:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    transform = A.Compose([A.RandomCrop(80, 80), A.SquareSymmetry(p=1.0)])
    dataset = fastload.CachedDataset(Scenes(folder), transform=transform, cache="ram")
    loader = fastload.DataLoader(
        dataset, batch_size=8, shuffle=True, num_workers=2, memory_format=torch.channels_last
    )
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, CLASSES, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        for batch in loader:
            images = batch["image"].to(device) / 255  # (B, 3, 80, 80)
            masks = batch["mask"].to(device).long()  # (B, 80, 80): cross_entropy takes int64
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), masks)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")
    return loader


# --- The template ends here. The rest runs it, and compares each mask with its image once more. -------------


def main() -> None:
    with photo_folder() as folder:
        pairs = aligned = 0
        for batch in train(folder):
            for image, mask in zip(batch["image"], batch["mask"], strict=True):
                pairs += 1
                aligned += torch.equal(classify(image[1]), mask)
        print(f"{aligned} of {pairs} masks lie on their images after crops, flips and turns")


if __name__ == "__main__":
    main()
