"""WebDataset: tar shards through its pipeline and fastload's loader; each worker reads its share of them.

    pip install webdataset
    python examples/webdataset_shards.py [FOLDER]

FOLDER holds a folder of images for each class.
"""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import albumentations as A
import numpy as np
import torch
from pictures import SIZE, photo_folder, small_network
from torch import nn

import fastload

try:
    import webdataset as wds
except ImportError:
    raise SystemExit("This example needs WebDataset: pip install webdataset") from None

SHARDS = 2  # at least as many as workers: WebDataset raises an error in a worker without a shard


def write_shards(photos: fastload.ImageFolder, directory: Path) -> list[str]:
    """Files `KEY.jpg` and `KEY.cls` for each image; the bytes of the images stay as they are."""
    shards = [f"{directory}/photos-{number:04d}.tar" for number in range(SHARDS)]
    for first, shard in enumerate(shards):
        with wds.TarWriter(shard) as writer:
            for number in range(first, len(photos), SHARDS):
                path, label = photos.samples[number]
                writer.write({"__key__": f"{number:06d}", "jpg": Path(path).read_bytes(), "cls": label})
    return shards


class ToSample:
    """Runs in the workers, after the decoding."""

    def __init__(self) -> None:
        self.transform = A.Compose([A.Resize(*SIZE), A.RandomCrop(80, 80), A.HorizontalFlip(p=0.5)])

    def __call__(self, parts: tuple[np.ndarray, int, str]) -> tuple[np.ndarray, int, str]:
        """The parts, with the image transformed."""
        image, label, key = parts
        return self.transform(image=image)["image"], label, key


def make_loader(shards: list[str]) -> fastload.DataLoader:
    samples = (
        wds.WebDataset(shards, shardshuffle=100)  # gives each worker its share of the shards
        .shuffle(1000)
        .decode("rgb8")  # (H, W, 3) uint8 arrays
        .to_tuple("jpg", "cls", "__key__")
        .map(ToSample())
    )
    return fastload.DataLoader(
        samples,
        batch_size=8,
        num_workers=SHARDS,
        device="auto",
        device_transform=fastload.transforms.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
    )


def train(loader: Any, num_classes: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = small_network(num_classes).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(3):
        for images, labels, _ in loader:  # (B, 3, 80, 80) float32, (B,) int64 and B strings
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


# --- The template ends here. The rest runs it, and counts the images of an epoch. ---------------------------


def main() -> None:
    with photo_folder() as folder, tempfile.TemporaryDirectory() as directory:
        photos = fastload.ImageFolder(folder)
        loader = make_loader(write_shards(photos, Path(directory)))
        train(loader, len(photos.classes))
        seen = Counter(key for _, _, keys in loader for key in keys)
        once = sum(count == 1 for count in seen.values())
        print(f"webdataset {wds.__version__}: {once} of {len(photos)} images came once in an epoch")


if __name__ == "__main__":
    main()
