"""How many workers one consumer serves, if the workers wait and do not compute.

Question: a dataset waits for each batch, as for a server, and takes no CPU. How many batches a second come
from 1 to 64 workers, beside as many as they could make, and what does a batch cost the consumer's process?
Small waits show the limit of the consumer.

Held out: the start of the workers (they persist, and one epoch comes before). The machine has fewer cores
than workers: what a worker itself computes for a batch is a part of the figures.

Command: python benchmarks/many_workers.py [--runs 3] [--save]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.utils.data
from harness import Contender, report, save

import fastload

WORKERS = (1, 4, 16, 64)
BATCH_SIZE, SAMPLE_VALUES = 8, 1024
WAITS_S = (0.05, 0.005)
LOADERS = {"torch": torch.utils.data.DataLoader, "fastload": fastload.DataLoader}


class Waits(torch.utils.data.Dataset):
    """A batch takes its time, and no CPU: `(8, 1024) float32`."""

    def __init__(self, num_batches: int, wait_s: float) -> None:
        self.num_samples = num_batches * BATCH_SIZE
        self.wait_s = wait_s

    def __len__(self) -> int:
        return self.num_samples

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        time.sleep(self.wait_s)
        return [torch.zeros(SAMPLE_VALUES) for _ in indices]


def measure(loader: Any) -> tuple[float, float]:
    """Batches a second, and microseconds of the consumer's CPU for each, in an epoch."""
    began_s, began_cpu_s, num_batches = time.perf_counter(), time.process_time(), 0
    for _ in loader:
        num_batches += 1
    cpu_s = time.process_time() - began_cpu_s
    return num_batches / (time.perf_counter() - began_s), cpu_s / num_batches * 1e6


def question(wait_s: float, runs: int) -> list[dict[str, Any]]:
    """Rates and costs of both loaders with each number of workers, in turn."""
    rates, costs, shares = [], [], {}
    for num_workers in WORKERS:
        dataset = Waits(max(100, min(4000, int(2 * num_workers / wait_s))), wait_s)
        for name, make in LOADERS.items():
            loader = make(dataset, BATCH_SIZE, num_workers=num_workers, persistent_workers=True)
            label = f"{name}, {num_workers} workers"
            measured = [measure(loader) for _ in range(runs + 1)][1:]  # the first epoch starts the workers
            rate, cost = (
                Contender(label, name, float, figures=[m[part] for m in measured]) for part in (0, 1)
            )
            rates.append(rate)
            costs.append(cost)
            shares[f"{label}: share of what they can make"] = rate.median * wait_s / num_workers, 0.95
            del loader
    title = f"batches that take {wait_s * 1000:g} ms of waiting"
    return [
        report(title, "batches/s", rates, shares),
        report(f"{title}: the consumer's CPU", "us/batch", costs, {}),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/many_workers.json")
    args = parser.parse_args()
    answers = [answer for wait_s in WAITS_S for answer in question(wait_s, args.runs)]
    if args.save:
        save("many_workers", f"python benchmarks/many_workers.py --runs {args.runs} --save", answers)


if __name__ == "__main__":
    main()
