"""One import changed: a training script whose images are decoded once, and come from a shared cache.

    python examples/quickstart.py [FOLDER]

FOLDER holds a folder of images for each class.
"""

from pathlib import Path

import albumentations as A
import torch
from pictures import SIZE, photo_folder, small_network
from torch import nn

import fastload
from fastload import DataLoader  # was: from torch.utils.data import DataLoader


def train(folder: Path) -> fastload.CachedDataset:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    photos = fastload.ImageFolder(folder, size=SIZE)  # or your own Dataset: its samples are decoded once
    transform = A.Compose([A.RandomCrop(80, 80), A.HorizontalFlip(p=0.5)])  # runs on every access
    dataset = fastload.CachedDataset(photos, transform=transform, cache="ram")
    loader = DataLoader(
        dataset,
        batch_size=8,
        shuffle=True,
        num_workers=2,
        memory_format=torch.channels_last,  # (B, H, W, C) batches as (B, C, H, W) views, without a copy
    )
    model = small_network(len(photos.classes)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    for epoch in range(3):
        for images, labels in loader:  # (B, 3, 80, 80) uint8 and (B,) int64
            optimizer.zero_grad()
            logits = model(images.to(device) / 255)
            loss = nn.functional.cross_entropy(logits, labels.to(device))
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")
    return dataset


# --- The template ends here. The rest runs it, and reports what the cache did. ------------------------------


def main() -> None:
    with photo_folder() as folder:
        info = train(folder).cache_info()
        print(f"{info.num_cached} of {info.num_samples} images are cached: no later epoch decodes them")


if __name__ == "__main__":
    main()
