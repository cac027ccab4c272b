"""A Hugging Face dataset with a column of images: through the loader, and from a cache of decoded images.

    pip install datasets
    python examples/huggingface_datasets.py [FOLDER]

FOLDER holds a folder of images for each class.
"""

from pathlib import Path

import albumentations as A
import numpy as np
import torch
from pictures import SIZE, photo_folder, small_network
from torch import nn
from torch.utils.data import Dataset

import fastload

try:
    import datasets
except ImportError:
    raise SystemExit("This example needs Hugging Face datasets: pip install datasets") from None


def load(folder: Path) -> datasets.Dataset:
    """A local dataset; yours is `datasets.load_dataset("NAME", split="train")`."""
    photos = fastload.ImageFolder(folder)
    paths, labels = zip(*photos.samples, strict=True)
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=photos.classes)}
    columns = {"image": list(paths), "label": list(labels)}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


class Rows(Dataset):
    """Rows as (image, label). A row has a PIL image; a cache and a loader need an array."""

    def __init__(self, rows: datasets.Dataset) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        row = self.rows[int(index)]
        return np.asarray(row["image"].convert("RGB")), row["label"]


def make_dataset(rows: datasets.Dataset, key: str) -> fastload.CachedDataset:
    """Ranks and jobs that give the same key share the cache: choose another key for other rows or sizes."""
    return fastload.CachedDataset(
        Rows(rows),
        pre_transform=A.Resize(*SIZE),  # the deterministic part: runs once per image, before the cache
        transform=A.Compose([A.RandomCrop(80, 80), A.HorizontalFlip(p=0.5)]),  # runs on every access
        cache="ram",
        cache_key=key,
    )


def train(rows: datasets.Dataset, key: str) -> fastload.CachedDataset:
    dataset = make_dataset(rows, key)
    loader = fastload.DataLoader(
        dataset,
        batch_size=8,
        shuffle=True,
        num_workers=2,
        device="auto",
        device_transform=fastload.transforms.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = small_network(rows.features["label"].num_classes).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(3):
        for images, labels in loader:  # (B, 3, 80, 80) float32 and (B,) int64
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")
    return dataset


# --- The template ends here. The rest runs it, and reports what was cached. ---------------------------------


def main() -> None:
    with photo_folder() as folder:
        rows = load(folder)
        info = train(rows, key=f"{folder.resolve()}, 90 x 120").cache_info()
        print(f"datasets {datasets.__version__}: {info.num_cached} of {len(rows)} rows are cached")


if __name__ == "__main__":
    main()
