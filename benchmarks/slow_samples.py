"""What a few slow samples cost: one sample in twenty takes 50 times as long.

Question: how near is a loader to the bound, which is all work divided by the workers? Eight workers wait (as
for storage; a waiting worker needs no CPU, so this measures the schedule alone), or two compute. And, where
all samples cost the same: what is left of torch's in_order=False.

Command: python benchmarks/slow_samples.py [--runs 5] [--save]
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any

import numpy as np
import torch
from harness import Contender, best, contender, interleave, report, save

import fastload

NUM_SAMPLES = 2400
SLOWDOWN = 50
SIDE = 64
LOADERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "torch": (torch.utils.data.DataLoader, {}),
    "torch, in_order=False": (torch.utils.data.DataLoader, {"in_order": False}),
    "fastload": (fastload.DataLoader, {}),
    "fastload, in_order=False": (fastload.DataLoader, {"in_order": False}),
}


class Samples(torch.utils.data.Dataset):
    """Images that take `base_s`, or for one in twenty, at fixed places, `SLOWDOWN` times that."""

    def __init__(self, base_s: float, *, computes: bool, has_slow: bool) -> None:
        self.base_s = base_s
        self.computes = computes
        self.has_slow = has_slow
        self.slow = np.random.default_rng(0).random(NUM_SAMPLES) < 1 / 20

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        cost_s = self.cost_s(index)
        if self.computes:
            start_s = time.process_time()
            while time.process_time() - start_s < cost_s:
                pass
        elif cost_s:
            time.sleep(cost_s)
        return np.zeros((SIDE, SIDE, 3), np.uint8), index

    def cost_s(self, index: int) -> float:
        """How long a sample takes."""
        return self.base_s * (SLOWDOWN if self.has_slow and self.slow[index] else 1)

    def bound(self, num_workers: int) -> float:
        """Images a second if no worker ever waited."""
        return NUM_SAMPLES * num_workers / sum(map(self.cost_s, range(NUM_SAMPLES)))


def make(name: str, dataset: Samples, batch_size: int, num_workers: int) -> Any:
    """A loader with persistent workers."""
    loader, options = LOADERS[name]
    return loader(
        dataset, batch_size, shuffle=True, num_workers=num_workers, persistent_workers=True, **options
    )


def question(title: str, dataset: Samples, batch_size: int, num_workers: int, runs: int) -> dict[str, Any]:
    """All loaders over one dataset."""
    rows: list[Contender] = [
        contender(name, name, functools.partial(make, name, dataset, batch_size, num_workers), NUM_SAMPLES)
        for name in LOADERS
    ]
    interleave(rows, runs)
    rate = {name: best(rows, name).median for name in LOADERS}
    ratios = {}
    if dataset.has_slow:
        bound = dataset.bound(num_workers)
        targets = {"fastload, in_order=False": 0.95}
        ratios = {f"{name} / bound": (rate[name] / bound, targets.get(name, 0.0)) for name in LOADERS}
    else:
        ratios = {
            "fastload, in_order=False / torch, in_order=False": (
                rate["fastload, in_order=False"] / rate["torch, in_order=False"],
                1.5,
            ),
        }
    return report(title, "images/s", rows, ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/slow_samples.json")
    args = parser.parse_args()
    answers = []
    for batch_size in (16, 64):
        waits = Samples(0.0005, computes=False, has_slow=True)
        computes = Samples(0.0001, computes=True, has_slow=True)
        cheap = Samples(0.0, computes=False, has_slow=False)
        for title, dataset, num_workers in (
            ("one in 20 waits 50 times as long, 8 workers", waits, 8),
            ("one in 20 computes 50 times as long, 2 workers", computes, 2),
            ("cheap samples that cost the same, 2 workers", cheap, 2),
        ):
            title = f"{title}, batches of {batch_size}"
            answers.append(question(title, dataset, batch_size, num_workers, args.runs))
    if args.save:
        save("slow_samples", f"python benchmarks/slow_samples.py --runs {args.runs} --save", answers)


if __name__ == "__main__":
    main()
