"""How long from `iter(loader)` to the first batch, with two workers.

Question: does the transport cost anything at the start of an epoch? For small batches (256 of 32 x 32 x 3)
and for 38 MB ones (256 of 224 x 224 x 3); "warm": forkserver with the same preload for both loaders, already
running; "cold": a new interpreter's first epoch, with torch's default start method and with spawn. And how
long is an epoch of 16 batches with new workers, beside one with workers that persist?

Command: python benchmarks/startup.py [--runs 9] [--save]
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch.utils.data
from harness import Contender, best, interleave, report, save
from torch.utils.data import Dataset

import fastload

LOADERS: dict[str, Any] = {"torch": torch.utils.data.DataLoader, "fastload": fastload.DataLoader}


class Blank(Dataset):
    """Images made on the spot, so the dataset itself pickles in no time."""

    def __init__(self, side: int) -> None:
        self.image = np.zeros((side, side, 3), np.uint8)

    def __len__(self) -> int:
        return 256 * 16

    def __getitem__(self, index: int) -> Any:
        return self.image


def first_batch_ms(name: str, side: int, method: str) -> float:
    """Milliseconds from iter() to the first batch."""
    loader = LOADERS[name](Blank(side), 256, num_workers=2, multiprocessing_context=method)
    start_s = time.perf_counter()
    iterator = iter(loader)
    next(iterator)
    elapsed_s = time.perf_counter() - start_s
    del iterator
    return elapsed_s * 1000


def first_batch_of_new_interpreter_ms(name: str, side: int, method: str) -> float:
    """The same as the first thing that a script does."""
    command = [sys.executable, __file__, "--one", name, str(side), method]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def turnaround(side: int, size: str, runs: int) -> dict[str, Any]:
    """Milliseconds of an epoch by forked workers, new ones and those of the epoch before."""

    def contender(name: str, persists: bool) -> Contender:
        options = {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": persists}
        loader = LOADERS[name](Blank(side), 256, **options)

        def epoch_ms() -> float:
            start_s = time.perf_counter()
            for _ in loader:
                pass
            return (time.perf_counter() - start_s) * 1000

        def close() -> None:
            loader._iterator = None

        return Contender(f"{name}, {'persistent' if persists else 'new'} workers", name, epoch_ms, close)

    rows = [contender(name, persists) for name in LOADERS for persists in (True, False)]
    interleave(rows, runs)
    medians = {row.label: row.median for row in rows}
    ratios = {
        f"fastload / torch, {kind} workers (time)": (
            medians[f"fastload, {kind} workers"] / medians[f"torch, {kind} workers"],
            0.85,
        )
        for kind in ("persistent", "new")
    }
    return report(f"an epoch of 16 batches of {size}, fork", "ms", rows, ratios, digits=1)


def question(title: str, measure: Any, side: int, method: str, runs: int, target: float) -> dict[str, Any]:
    """Both loaders, one way to start."""
    rows = [Contender(name, name, functools.partial(measure, name, side, method)) for name in LOADERS]
    interleave(rows, runs)
    ratio = best(rows, "fastload", highest=False).median / best(rows, "torch", highest=False).median
    return report(title, "ms", rows, {"fastload / torch (time)": (ratio, target)}, digits=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/startup.json")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name, side, method = args.one
        print(first_batch_ms(name, int(side), method))
        return
    multiprocessing.set_forkserver_preload(["__main__", "fastload.workers.preload"])
    cases = [
        (f"first batch of {size}, {heat} {method}", measure, side, method, runs, target)
        for side, size in ((32, "0.8 MB"), (224, "38 MB"))
        for heat, measure, methods, runs, target in (
            ("warm", first_batch_ms, ("forkserver", "fork"), args.runs, 1.2),
            ("cold", first_batch_of_new_interpreter_ms, ("fork", "forkserver", "spawn"), args.runs, 1.0),
        )
        for method in methods
    ]
    answers = [question(*case) for case in cases]
    answers += [turnaround(side, size, args.runs) for side, size in ((32, "0.8 MB"), (224, "38 MB"))]
    if args.save:
        save("startup", f"python benchmarks/startup.py --runs {args.runs} --save", answers)


if __name__ == "__main__":
    main()
