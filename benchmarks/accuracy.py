"""Whether a network learns the same from fastload's batches as from torch's.

Question: which loss and accuracy does a small network reach after each epoch of the ImageNet recipe
(docs/guides/multi-gpu.md: images of 72 pixels on the shorter side, RandomResizedCrop(64) and a flip) with
torch's loader, with only the import changed, and with a cache in RAM?

Held out: speed. All three have one seed for the weights, the order and the crops, and two workers.
`seeding="torch"` lets the crops be those under torch's loader. The network has three convolutions,
and one thread trains it, so sums have one order. The pieces of photographs are those of pieces.py.

Command: python benchmarks/accuracy.py [--epochs 10] [--save]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import albumentations as A
import torch
from harness import save
from pieces import make_pieces, network, pixels

import fastload

RESIZED, CROP, BATCH, WORKERS = 72, 64, 32, 2
NUM_TRAIN, NUM_VAL = 800, 400


class Photos(torch.utils.data.Dataset[Any]):
    """A folder as a project without fastload reads it: decode, resize, transform."""

    def __init__(self, folder: Path, transform: Any) -> None:
        self.photos = fastload.ImageFolder(folder, size=RESIZED)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label = self.photos[index]
        return self.transform(image=image)["image"], label


def of_torch(folder: Path, transform: Any, **options: Any) -> Any:
    return torch.utils.data.DataLoader(Photos(folder, transform), **options)


def only_import(folder: Path, transform: Any, **options: Any) -> Any:
    return fastload.DataLoader(Photos(folder, transform), seeding="torch", **options)


def cached(folder: Path, transform: Any, **options: Any) -> Any:
    dataset = fastload.CachedDataset(fastload.ImageFolder(folder, size=RESIZED), transform)
    return fastload.DataLoader(dataset, seeding="torch", **options)


WAYS = {"torch": of_torch, "fastload, only the import": only_import, "fastload, cached": cached}


def trained(make: Any, train: Path, val: Path, num_epochs: int) -> tuple[list[float], list[float]]:
    """The mean loss of each epoch, and the accuracy in percent after it."""
    crops = A.Compose([A.RandomResizedCrop((CROP, CROP)), A.HorizontalFlip(p=0.5)], seed=0)
    options: dict[str, Any] = {"batch_size": BATCH, "num_workers": WORKERS, "persistent_workers": True}
    generator = torch.Generator().manual_seed(0)
    train_loader = make(train, crops, shuffle=True, drop_last=True, generator=generator, **options)
    val_loader = make(val, A.CenterCrop(CROP, CROP), **options)
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_epochs * len(train_loader))
    losses, accuracies = [], []
    for _ in range(num_epochs):
        model.train()
        total = 0.0
        for images, labels in train_loader:
            loss = torch.nn.functional.cross_entropy(model(pixels(images)), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            total += loss.item()
        model.eval()
        with torch.no_grad():
            right = sum(
                int((model(pixels(images)).argmax(1) == labels).sum()) for images, labels in val_loader
            )
        losses.append(total / len(train_loader))
        accuracies.append(100 * right / NUM_VAL)
    return losses, accuracies


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--save", action="store_true", help="write results/accuracy.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    answers = []
    with tempfile.TemporaryDirectory(prefix="fastload-accuracy-") as directory:
        train, val = Path(directory, "train"), Path(directory, "val")
        make_pieces(train, NUM_TRAIN, 1)
        make_pieces(val, NUM_VAL, 2)
        found = {label: trained(make, train, val, args.epochs) for label, make in WAYS.items()}
    for number, (title, unit) in enumerate((("Mean training loss", "loss"), ("Validation accuracy", "%"))):
        each = {label: figures[number] for label, figures in found.items()}
        print(title, each)
        last = {f"{label}, last epoch": {"value": row[-1], "unit": unit} for label, row in each.items()}
        answers.append({"title": f"{title} of {args.epochs} epochs", "epochs": each, "ratios": last})
    if args.save:
        save("accuracy", f"python benchmarks/accuracy.py --epochs {args.epochs} --save", answers)


if __name__ == "__main__":
    main()
