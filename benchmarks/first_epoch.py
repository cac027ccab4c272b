"""What filling a RAM cache costs the first epochs, and what the cache gives back over ten.

Question: with photographs that two workers decode and crop, how long is each of ten epochs through a RAM
cache beside the same epoch of torch's loader? The first epoch stores every sample that it reads.

On a virtual machine the answer depends on whether the guest has touched the memory before: its host provides
a page on first touch, some five times as slowly as the guest writes it, and can reclaim free pages.
Each question is asked twice: after a process has touched and freed as much memory as the cache will take, and
with memory as it comes.

Held out: disk (the files come from the page cache) and the GPU. Each run has a process of its own, and its
epochs start their workers anew, as by default.

Command: python benchmarks/first_epoch.py PHOTOS [--runs 3] [--epochs 10] [--save]
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from typing import TYPE_CHECKING, Any

import albumentations as A
import numpy as np
import torch.utils.data
from harness import save
from rich.console import Console
from rich.table import Table
from training import Photos

import fastload

if TYPE_CHECKING:
    from collections.abc import Callable

TORCH, IMPORT, CACHED = "torch", "fastload, import only", "fastload, cached"


def make_loader(label: str, photos: str) -> Any:
    """A shuffling loader over crops of the photographs."""
    crop = A.Compose([A.RandomResizedCrop((224, 224)), A.HorizontalFlip(p=0.5)])
    folder = fastload.ImageFolder(photos)
    if label in (TORCH, IMPORT):
        dataset: Any = Photos(folder, crop)
    else:
        dataset = fastload.CachedDataset(folder, transform=crop)
    loader = torch.utils.data.DataLoader if label == TORCH else fastload.DataLoader
    return loader(dataset, batch_size=64, shuffle=True, num_workers=2, multiprocessing_context="fork")


def run_epochs(label: str, photos: str, epochs: int, results: Any) -> None:
    """Send the seconds of each epoch; runs in a process of its own."""
    loader = make_loader(label, photos)
    times_s = []
    for _ in range(epochs):
        start_s = time.perf_counter()
        for _batch in loader:
            pass
        times_s.append(time.perf_counter() - start_s)
    results.put(times_s)


def touch(nbytes: int) -> None:
    """Write to as much memory, and free it by leaving."""
    np.ones(nbytes, np.uint8)


def in_own_process(function: Callable[..., None], *args: Any) -> None:
    """Run a function in a new process and wait for it."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=args)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{function.__name__} ended with exit code {process.exitcode}")


def question(photos: str, epochs: int, runs: int, touched_bytes: int) -> dict[str, Any]:
    """All contenders in turn, ``runs`` times."""
    labels = (TORCH, IMPORT, CACHED)
    runs_s: dict[str, list[list[float]]] = {label: [] for label in labels}
    for _ in range(runs):
        for label in labels:
            if touched_bytes:
                in_own_process(touch, touched_bytes)
            results = multiprocessing.get_context("spawn").SimpleQueue()
            in_own_process(run_epochs, label, photos, epochs, results)
            runs_s[label].append(results.get())
    epochs_s = {label: [statistics.median(s) for s in zip(*runs_s[label], strict=True)] for label in labels}
    return report(photos, epochs_s, is_touched=touched_bytes > 0)


def report(photos: str, epochs_s: dict[str, list[float]], *, is_touched: bool) -> dict[str, Any]:
    """Print one question's table and give it as plain data."""
    memory = "memory that was touched before" if is_touched else "memory as it comes"
    title = f"{len(fastload.ImageFolder(photos)):,} photos, decoded and cropped, {memory}"
    num_epochs = len(epochs_s[TORCH])
    table = Table("s", *(str(number + 1) for number in range(num_epochs)), "all", title=title)
    for label, seconds in epochs_s.items():
        table.add_row(label, *(f"{s:.2f}" for s in seconds), f"{sum(seconds):.1f}")
    console = Console(width=140)
    console.print(table)
    base_s = statistics.median(epochs_s[TORCH])
    ratios = {}
    for label in (IMPORT, CACHED):
        seconds = epochs_s[label]
        ratios[f"first epoch: torch / {label}"] = (base_s / seconds[0], 0.85)
        ratios[f"slowest epoch: torch / {label}"] = (base_s / max(seconds), 0.8)
        ratios[f"{num_epochs} epochs: torch / {label}"] = (sum(epochs_s[TORCH]) / sum(seconds), 1.0)
    for name, (ratio, target) in ratios.items():
        console.print(f"  {name}: {ratio:.2f} (target {target:g})")
    return {
        "title": title,
        "unit": "s",
        "rows": {label: {"median": statistics.median(s), "figures": s} for label, s in epochs_s.items()},
        "ratios": {name: {"value": value, "target": target} for name, (value, target) in ratios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("photos", help="a folder of photographs, as `make photos` draws it")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/first_epoch.json")
    args = parser.parse_args()
    folder = fastload.ImageFolder(args.photos)
    some = range(0, len(folder), max(1, len(folder) // 100))
    decoded_bytes = statistics.mean(folder[index][0].nbytes for index in some) * len(folder)
    answers = [
        question(args.photos, args.epochs, args.runs, int(1.5 * decoded_bytes)),
        question(args.photos, args.epochs, args.runs, 0),
    ]
    if args.save:
        save("first_epoch", f"python benchmarks/first_epoch.py PHOTOS --runs {args.runs} --save", answers)


if __name__ == "__main__":
    main()
