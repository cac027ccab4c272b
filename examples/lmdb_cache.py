"""A cache on disk: images are decoded once into an LMDB file, which every later run opens.

    python examples/lmdb_cache.py [FOLDER]

FOLDER holds a folder of images for each class.
"""

import tempfile
from pathlib import Path

import albumentations as A
import numpy as np
import torch
from pictures import SIZE, photo_folder, small_network
from torch import nn

import fastload


def train(folder: Path, file: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    photos = fastload.ImageFolder(folder, size=SIZE)
    transform = A.Compose([A.RandomCrop(80, 80), A.HorizontalFlip(p=0.5)])
    # The first run builds the file, in one process per CPU; CachedDataset.build takes another number. A
    # later run opens it, or builds it anew after an interruption.
    dataset = fastload.CachedDataset(photos, transform, cache=f"lmdb:{file}")
    loader = fastload.DataLoader(
        dataset, batch_size=8, shuffle=True, num_workers=2, memory_format=torch.channels_last
    )
    model = small_network(len(photos.classes)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        for images, labels in loader:
            optimizer.zero_grad()
            logits = model(images.to(device) / 255)
            loss = nn.functional.cross_entropy(logits, labels.to(device))
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


def open_without_the_images(file: Path) -> fastload.CachedDataset:
    """A finished file is a dataset by itself: the folder of images is not needed any more."""
    return fastload.CachedDataset.from_cache(file)


# --- The template ends here. The rest runs it, and compares the file with the images. -----------------------


def main() -> None:
    with photo_folder() as folder, tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "photos.lmdb"
        train(folder, file)

        stored = open_without_the_images(file)
        photos = fastload.ImageFolder(folder, size=SIZE)
        equal = sum(np.array_equal(stored[index][0], photos[index][0]) for index in range(len(photos)))
        print(f"{equal} of {len(photos)} images in the file are equal to the decoded ones")


if __name__ == "__main__":
    main()
