"""How many images a second reach the training loop, from memory.

Question: with the data decoded already, how much faster are batches through fastload than through
torch's DataLoader, each at its best worker count, torch also in its documented bulk idiom?

Held out: disk, JPEG decoding, the GPU. The consumer only takes the batches.
Workers persist and one epoch is run before measuring, so no start-up is in these figures.

Command: python benchmarks/throughput.py [--only 224|32|uint8|float32] [--runs 7] [--save]
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import albumentations as A
import numpy as np
import torch
import torch.utils.data
from albumentations.pytorch import ToTensorV2
from harness import best, contender, interleave, report, save
from torch.utils.data import BatchSampler, Dataset, RandomSampler

import fastload

WORKERS = (0, 1, 2)


class InMemory(Dataset):
    """Decoded images in one array; what users write to be fast. `transform` as they write it, too."""

    def __init__(self, num_images: int, side: int, transform: Any = None) -> None:
        rng = np.random.default_rng(0)
        self.images = rng.integers(0, 256, (num_images, side, side, 3), dtype=np.uint8)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self.images[index]
        if self.transform is not None:
            image = self.transform(image=image)["image"]
        return image, index % 10


class InBulk(Dataset):
    """The same, taking a list of indices: torch's documented way to make whole batches in the dataset."""

    def __init__(self, source: InMemory) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.tensor([index % 10 for index in indices])
        return torch.from_numpy(self.source.images[indices]), labels


def make(cls: Any, dataset: Any, batch_size: int, num_workers: int) -> Any:
    """A shuffling loader whose workers persist."""
    return cls(dataset, batch_size, shuffle=True, num_workers=num_workers, persistent_workers=num_workers > 0)


def make_bulk(dataset: Any, batch_size: int, num_workers: int) -> Any:
    """Torch's loader in the bulk idiom."""
    sampler = BatchSampler(RandomSampler(dataset), batch_size, drop_last=False)
    return torch.utils.data.DataLoader(
        dataset, batch_size=None, sampler=sampler, num_workers=num_workers, persistent_workers=num_workers > 0
    )


def filled(dataset: Any, transform: Any = None) -> fastload.CachedDataset:
    """The dataset behind a RAM cache in which every sample is present."""
    cached = fastload.CachedDataset(dataset, transform=None, cache="ram")
    for index in range(len(cached)):
        cached._view(index)
    cached.transform = transform
    return cached


def in_memory(side: int, num_images: int, runs: int, targets: tuple[float, float]) -> dict[str, Any]:
    """Batches of 256 without per-sample work."""
    batch_size = 256
    source = InMemory(num_images, side)
    cached = filled(source)
    bulk = InBulk(source)
    rows = []
    for w in WORKERS:
        torch_loader, ours = torch.utils.data.DataLoader, fastload.DataLoader
        rows += [
            contender(
                f"torch, {w} workers",
                "torch",
                functools.partial(make, torch_loader, source, batch_size, w),
                num_images,
            ),
            contender(
                f"torch bulk, {w} workers",
                "torch bulk",
                functools.partial(make_bulk, bulk, batch_size, w),
                num_images,
            ),
            contender(
                f"fastload, import only, {w} workers",
                "import",
                functools.partial(make, ours, source, batch_size, w),
                num_images,
            ),
            contender(
                f"fastload, cached, {w} workers",
                "cached",
                functools.partial(make, ours, cached, batch_size, w),
                num_images,
            ),
        ]
    interleave(rows, runs)
    base = best(rows, "torch").median
    ratios = {
        "cached / torch": (best(rows, "cached").median / base, targets[0]),
        "import only / torch": (best(rows, "import").median / base, targets[1]),
        "cached / torch bulk": (best(rows, "cached").median / best(rows, "torch bulk").median, 1.0),
    }
    return report(
        f"{side} x {side} x 3 uint8 in memory, batch {batch_size}, shuffled", "images/s", rows, ratios
    )


def augmented(kind: str, runs: int, target: float) -> dict[str, Any]:
    """Cached 256 x 256 images through albumentations, batches of 64."""
    batch_size, num_images = 64, 2048
    steps: list[Any] = [A.RandomResizedCrop((224, 224)), A.HorizontalFlip(p=0.5)]
    if kind == "float32":
        steps += [A.Normalize(), ToTensorV2()]
    transform = A.Compose(steps)
    source = InMemory(num_images, 256, transform)
    cached = filled(InMemory(num_images, 256), transform)
    rows = []
    for w in WORKERS:
        rows += [
            contender(
                f"torch, {w} workers",
                "torch",
                functools.partial(make, torch.utils.data.DataLoader, source, batch_size, w),
                num_images,
            ),
            contender(
                f"fastload, import only, {w} workers",
                "import",
                functools.partial(make, fastload.DataLoader, source, batch_size, w),
                num_images,
            ),
            contender(
                f"fastload, cached, {w} workers",
                "cached",
                functools.partial(make, fastload.DataLoader, cached, batch_size, w),
                num_images,
            ),
        ]
    interleave(rows, runs)
    base = best(rows, "torch").median
    ratios = {
        "cached / torch": (best(rows, "cached").median / base, target),
        "import only / torch": (best(rows, "import").median / base, 1.0),
    }
    return report(
        f"256 x 256 -> RandomResizedCrop(224) + flip, {kind}, batch {batch_size}", "images/s", rows, ratios
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["224", "32", "uint8", "float32"])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/throughput.json")
    args = parser.parse_args()
    questions = {
        "224": lambda: in_memory(224, 4096, args.runs, (3.0, 2.0)),
        "32": lambda: in_memory(32, 51200, args.runs, (4.0, 1.0)),
        "uint8": lambda: augmented("uint8", args.runs, 1.5),
        "float32": lambda: augmented("float32", args.runs, 2.2),
    }
    chosen = [args.only] if args.only else list(questions)
    answers = [questions[name]() for name in chosen]
    if args.save:
        save("throughput", f"python benchmarks/throughput.py --runs {args.runs} --save", answers)


if __name__ == "__main__":
    main()
