"""Whether `num_workers="auto"` finds the number of workers with which an epoch is the shortest.

Question: how long is an epoch with the number that was chosen, beside the best of some fixed numbers? For
samples that are decoded, cached, tiny or waited for, and for a consumer that only takes batches or computes
for 5 ms a batch (it sleeps, as a process does that waits for its GPU). The choice is the one after the second
epoch; that for the first epoch is in the table, too.

Held out: the trial itself, which comes before the first epoch.

Command: python benchmarks/auto_workers.py PHOTOS [--runs 3] [--save]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import albumentations as A
import torch.utils.data
from harness import Contender, interleave, report, save
from throughput import InMemory, filled
from training import Photos

import fastload

FIXED = (0, 1, 2, 3, 4)


class Waits(torch.utils.data.Dataset):
    """Samples that take 5 ms to come and no computing, as from a server."""

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, index: int) -> int:
        time.sleep(0.005)
        return index


def kinds(photos: str) -> dict[str, tuple[Any, int, tuple[int, ...]]]:
    """Dataset, batch size and fixed numbers of each kind."""
    crop = A.Compose([A.RandomResizedCrop((224, 224)), A.HorizontalFlip(p=0.5)])
    return {
        "JPEG photos": (Photos(fastload.ImageFolder(photos), crop), 64, FIXED),
        "cached 256 x 256, cropped": (filled(InMemory(2048, 256), crop), 64, FIXED),
        "cached 224 x 224": (filled(InMemory(2048, 224)), 64, FIXED),
        "cached 32 x 32": (filled(InMemory(51200, 32)), 256, FIXED),
        "224 x 224 in memory": (InMemory(2048, 224), 64, FIXED),
        "TensorDataset": (
            torch.utils.data.TensorDataset(torch.rand(20000, 100), torch.arange(20000)),
            256,
            FIXED,
        ),
        "5 ms of waiting": (Waits(), 32, (1, 4, 16, 64)),
    }


def epoch_s(loader: Any, step_s: float) -> float:
    """One epoch, with a step of the consumer's after each batch."""
    began_s = time.perf_counter()
    for _ in loader:
        if step_s:
            time.sleep(step_s)
    return time.perf_counter() - began_s


def question(
    kind: str, dataset: Any, batch_size: int, fixed: tuple[int, ...], step_s: float, runs: int
) -> dict[str, Any]:
    """The epoch of each number; the ratio is of the best to the chosen."""

    def make(num_workers: Any) -> Any:
        return fastload.DataLoader(dataset, batch_size, shuffle=True, num_workers=num_workers)

    auto = make("auto")
    numbers = []
    for _ in range(3):
        epoch_s(auto, step_s)
        numbers.append(auto.num_workers)
    loaders = {number: make(number) for number in sorted({*fixed, *numbers})}

    def run(number: int) -> float:
        return epoch_s(loaders[number], step_s)

    rows = [
        Contender(str(number), str(number), lambda number=number: run(number), loader.close)  # type: ignore[misc]
        for number, loader in loaders.items()
    ]
    interleave(rows, runs)
    medians = {int(row.label): row.median for row in rows}
    best_s = min(medians[number] for number in fixed)
    step = f"{1e3 * step_s:.0f} ms a batch" if step_s else "no step"
    ratios = {
        f"{step}: best / first choice, {numbers[0]}": (best_s / medians[numbers[0]], 0.95),
        f"{step}: best / choice after two epochs, {numbers[-1]}": (best_s / medians[numbers[-1]], 0.95),
    }
    return report(f"{kind}, {step}", "s", rows, ratios, digits=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("photos", help="a folder of photographs, as `make photos` draws it")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/auto_workers.json")
    args = parser.parse_args()
    answers = [
        question(kind, dataset, batch_size, fixed, step_s, args.runs)
        for kind, (dataset, batch_size, fixed) in kinds(args.photos).items()
        for step_s in (0.0, 0.005)
    ]
    if args.save:
        save("auto_workers", f"python benchmarks/auto_workers.py PHOTOS --runs {args.runs} --save", answers)


if __name__ == "__main__":
    main()
