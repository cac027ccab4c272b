"""Whether a faster loader still pays beside a model that keeps the same cores busy.

Question: with a small model trained on the CPU by the process that takes the batches, how many steps a second
are there, and which share of the time does it wait for data? With torch's loader, with ours after a changed
import, and with ours over a RAM cache.

Held out: the GPU, and epochs that start workers: they persist, and one epoch is run before measuring, which
fills the cache. Each loader has two workers, which share the cores with the model.

Command: python benchmarks/training.py PHOTOS [--runs 5] [--save]
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any

import albumentations as A
import torch
import torch.utils.data
from harness import Contender, interleave, report, save
from throughput import InMemory, filled

import fastload

NUM_WORKERS = 2
BATCH_SIZE = 32


class Model(torch.nn.Module):
    """A few convolutions over `(B, H, W, 3) uint8`: some 20 ms a step on one core."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 7, stride=4),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, 3, stride=2),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
            torch.nn.Linear(32, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores of ten classes."""
        scores: torch.Tensor = self.layers(images.permute(0, 3, 1, 2).float().div_(255))
        return scores


class Training:
    """Epochs over one loader, which is made at the first and kept.

    Args:
        make: Makes the loader.

    Attributes:
        waiting: The share of each epoch's time that was spent in `next()`.
    """

    def __init__(self, make: Any) -> None:
        self._make = functools.cache(make)
        self._model = Model()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self.waiting: list[float] = []

    def steps_per_s(self) -> float:
        """One epoch."""
        num_steps, waited_s = 0, 0.0
        start_s = time.perf_counter()
        batches = iter(self._make())
        while True:
            asked_s = time.perf_counter()
            batch = next(batches, None)
            waited_s += time.perf_counter() - asked_s
            if batch is None:
                break
            images, labels = batch
            loss = torch.nn.functional.cross_entropy(self._model(images), labels % 10)
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            num_steps += 1
        elapsed_s = time.perf_counter() - start_s
        self.waiting.append(waited_s / elapsed_s)
        return num_steps / elapsed_s

    def close(self) -> None:
        """End the workers."""
        loader = self._make()
        self._make.cache_clear()
        if hasattr(loader, "close"):
            loader.close()
        loader._iterator = None


class Photos(torch.utils.data.Dataset):
    """Decoded and cropped on every access, as users write it."""

    def __init__(self, folder: Any, transform: Any) -> None:
        self.folder = folder
        self.transform = transform

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> Any:
        image, label = self.folder[index]
        return self.transform(image=image)["image"], label


def question(title: str, makers: dict[str, Any], runs: int) -> dict[str, Any]:
    """Steps a second of each loader, and the share of waiting in its label."""
    trainings = {label: Training(make) for label, make in makers.items()}
    rows = [
        Contender(label, label, training.steps_per_s, training.close) for label, training in trainings.items()
    ]
    interleave(rows, runs)
    base = rows[0].median
    ratios = {f"{row.label} / torch": (row.median / base, 1.0) for row in rows[1:]}
    answer = report(title, "steps/s", rows, ratios, digits=1)
    for label, training in trainings.items():
        shares = sorted(training.waiting[1:])
        answer["rows"][label]["waiting"] = shares[len(shares) // 2]
        print(f"  {label}: {shares[len(shares) // 2]:.0%} of the time is waiting")
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", help="a folder of photographs, as `make photos` draws it")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/training.json")
    args = parser.parse_args()
    options = {
        "batch_size": BATCH_SIZE,
        "shuffle": True,
        "num_workers": NUM_WORKERS,
        "persistent_workers": True,
        "drop_last": True,
    }
    crop = A.Compose([A.RandomCrop(224, 224), A.HorizontalFlip(p=0.5)])
    memory = InMemory(1024, 224)
    folder = fastload.ImageFolder(args.photos)
    subset = torch.utils.data.Subset(Photos(folder, crop), range(640))
    cached = fastload.CachedDataset(torch.utils.data.Subset(folder, range(640)), transform=crop)
    theirs, ours = torch.utils.data.DataLoader, fastload.DataLoader
    answers = [
        question(
            "224 x 224 uint8 in memory beside a small model",
            {
                "torch": lambda: theirs(memory, **options),
                "fastload, import only": lambda: ours(memory, **options),
                "fastload, cached": lambda: ours(filled(memory), **options),
            },
            args.runs,
        ),
        question(
            "JPEG photos, cropped to 224, beside a small model",
            {
                "torch": lambda: theirs(subset, **options),
                "fastload, import only": lambda: ours(subset, **options),
                "fastload, cached": lambda: ours(cached, **options),
            },
            args.runs,
        ),
    ]
    if args.save:
        save("training", f"python benchmarks/training.py PHOTOS --runs {args.runs} --save", answers)


if __name__ == "__main__":
    main()
