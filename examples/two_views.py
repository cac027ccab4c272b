"""Two random views of each image, for contrastive learning (SimCLR). Each image is decoded once.

    python examples/two_views.py [FOLDER]

FOLDER holds a folder of images for each class.
"""

from pathlib import Path
from typing import Any

import albumentations as A
import numpy as np
import torch
from pictures import SIZE, photo_folder, small_network
from torch import nn

import fastload


class TwoViews:
    """A transform that gets the whole cached sample, and returns both views and the label."""

    def __init__(self, pipeline: A.Compose) -> None:
        self.pipeline = pipeline

    def __call__(self, sample: tuple[np.ndarray, int]) -> tuple[np.ndarray, np.ndarray, int]:
        """Both calls draw from the pipeline's stream in this worker."""
        image, label = sample
        return self.pipeline(image=image)["image"], self.pipeline(image=image)["image"], label


class ToFloats:
    """Normalizes both views on the device."""

    def __init__(self) -> None:
        self.normalize = fastload.transforms.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))

    def __call__(self, batch: Any) -> Any:
        """(B, H, W, 3) uint8 to (B, 3, H, W) float32, twice."""
        first, second, labels = batch
        return self.normalize(first), self.normalize(second), labels


def nt_xent(first: torch.Tensor, second: torch.Tensor, temperature: float = 0.5) -> torch.Tensor:
    """The loss of SimCLR: among all other views of the batch, each view has to find its partner."""
    views = nn.functional.normalize(torch.cat([first, second]))  # (2B, D)
    itself = torch.eye(len(views), dtype=torch.bool, device=views.device)
    similarities = (views @ views.T / temperature).masked_fill(itself, -torch.inf)
    partners = torch.arange(len(views), device=views.device).roll(len(first))
    return nn.functional.cross_entropy(similarities, partners)


def make_dataset(folder: Path) -> fastload.CachedDataset:
    pipeline = A.Compose(
        [
            A.RandomResizedCrop((64, 64), scale=(0.2, 1.0)),
            A.HorizontalFlip(p=0.5),
            A.ColorJitter(p=0.8),
            A.ToGray(p=0.2),
            A.GaussianBlur(p=0.5),
        ]
    )
    photos = fastload.ImageFolder(folder, size=SIZE)
    return fastload.CachedDataset(photos, transform=TwoViews(pipeline), cache="ram")


def train(dataset: fastload.CachedDataset) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = fastload.DataLoader(
        dataset,
        batch_size=8,
        shuffle=True,
        drop_last=True,  # the loss depends on the number of views in the batch
        num_workers=2,
        device="auto",
        device_transform=ToFloats(),
    )
    encoder = small_network(64)
    head = nn.Sequential(nn.ReLU(), nn.Linear(64, 32))  # thrown away after the training
    model = nn.Sequential(encoder, head).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(3):
        for first, second, _ in loader:  # two times (B, 3, 64, 64) float32
            optimizer.zero_grad()
            loss = nt_xent(model(first), model(second))
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


# --- The template ends here. The rest runs it, and compares the views of each image. ------------------------


def main() -> None:
    with photo_folder() as folder:
        dataset = make_dataset(folder)
        train(dataset)
        different = sum(not np.array_equal(first, second) for first, second, _ in dataset)
        print(f"{different} of {len(dataset)} images have two different views")


if __name__ == "__main__":
    main()
