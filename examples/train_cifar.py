"""A dataset that lies on the device: the loader sends row numbers, and batches are gathered there.

    python examples/train_cifar.py [FOLDER]

FOLDER holds the binary version of CIFAR-10 (data_batch_1.bin, ...), or a folder of images for each class.
"""

import time
from pathlib import Path

import numpy as np
import torch
from pictures import photo_folder, small_network
from torch import nn

import fastload
from fastload.transforms import Normalize, RandomCrop, RandomHorizontalFlip


def read(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """All images, (N, 32, 32, 3) uint8, and labels, (N,) int64."""
    files = sorted(folder.glob("data_batch_*.bin"))
    if not files:
        samples = fastload.ImageFolder(folder, size=(32, 32))
        images, labels = zip(*samples, strict=True)
        return torch.from_numpy(np.stack(images)), torch.tensor(labels)
    records = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, 1 + 3072) for file in files])
    images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(records[:, 0].astype(np.int64))


def train(folder: Path, epochs: int = 3) -> float:
    """Train a small network; returns images per second of the last epoch."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images, labels = (column.to(device) for column in read(folder))
    loader = fastload.DataLoader(
        range(len(labels)),  # row numbers: no sample is read, so no worker is needed
        batch_size=min(512, len(labels) // 4),
        shuffle=True,
        drop_last=True,
        device=device,
        device_transform=[
            lambda rows: (images[rows], labels[rows]),
            RandomCrop(32, padding=4),
            RandomHorizontalFlip(),
            Normalize((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
        ],
    )
    model = small_network(int(labels.max()) + 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rate = 0.0
    for epoch in range(epochs):
        start_s, num_images = time.perf_counter(), 0
        for batch, targets in loader:  # (B, 3, 32, 32) float32 and (B,) int64, on the device
            loss = nn.functional.cross_entropy(model(batch), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            num_images += len(targets)
        rate = num_images / (time.perf_counter() - start_s)
        print(f"epoch {epoch}: loss {loss.item():.3f}")
    return rate


# --- The template ends here. The rest runs it. ------------------------------------------------------------


def main() -> None:
    with photo_folder() as folder:
        print(f"{train(folder):,.0f} images/s, with the training step")


if __name__ == "__main__":
    main()
