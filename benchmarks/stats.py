"""What `loader.stats()` costs: the time of a batch now, and in a checkout of the commit before it.

Question: do the counters, which are always on, cost less than 2 us a batch, and less than 1%? Batches are
small and come from a warm cache, because larger ones and those that are read take longer, at the same cost.
Each run is a process of its own, in turn: from one process to the next, a batch differs by more than the
counters cost, with the place of its memory.

Command: python benchmarks/stats.py CHECKOUT [--runs 11] [--save]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import Contender, report, save

import fastload

NUM_SAMPLES = 4096
NUM_EPOCHS = 9
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "no workers, batch 8": (8, {}),
    "no workers, batch 256": (256, {}),
    "2 workers, batch 8": (8, {"num_workers": 2, "persistent_workers": True}),
    "2 workers, batch 256": (256, {"num_workers": 2, "persistent_workers": True}),
}


class Blank:
    """Images of 32 x 32 x 3 that cost nothing."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return np.full((32, 32, 3), index % 256, np.uint8), index


def batch_us(loader: Any) -> float:
    """Microseconds of a batch: the median of some epochs, after one that does not count."""
    figures = []
    for _ in range(1 + NUM_EPOCHS):
        start_s = time.perf_counter()
        num_batches = sum(1 for _ in loader)
        figures.append((time.perf_counter() - start_s) / num_batches * 1e6)
    return statistics.median(figures[1:])


def one() -> dict[str, float]:
    """Each case in this process."""
    dataset = fastload.CachedDataset(Blank(), cache="ram", cache_key=f"benchmark-{os.getpid()}")
    dataset.fill(0, progress=False)
    figures = {}
    for name, (batch_size, arguments) in CASES.items():
        with fastload.DataLoader(dataset, batch_size, **arguments) as loader:
            figures[name] = batch_us(loader)
    return figures


def in_a_process(checkout: Path) -> dict[str, float]:
    """Each case, with the package of a checkout."""
    done = subprocess.run(
        [sys.executable, __file__, "--one", str(checkout)],
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=True,
    )
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="of the commit before")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/stats.json")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        if not Path(fastload.__file__).is_relative_to(args.checkout):
            raise SystemExit(f"expected the package of {args.checkout}, got {fastload.__file__}")
        print(json.dumps(one()))
        return
    trees = {"before": args.checkout.resolve(), "now": Path(__file__).resolve().parent.parent}
    figures: dict[str, list[dict[str, float]]] = {tree: [] for tree in trees}
    for run in range(args.runs):
        for tree in reversed(trees) if run % 2 else trees:
            figures[tree].append(in_a_process(trees[tree]))
    answers = []
    for name in CASES:
        before, now = (
            Contender(tree, tree, functools.partial(float, 0), figures=[run[name] for run in figures[tree]])
            for tree in trees
        )
        ratio = now.median / before.median
        answers.append(report(name, "us a batch", [before, now], {"now / before": (ratio, 1.01)}, digits=1))
    if args.save:
        save("stats", f"python benchmarks/stats.py CHECKOUT --runs {args.runs} --save", answers)


if __name__ == "__main__":
    main()
