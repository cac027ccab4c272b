"""What a dataset's metadata costs in each worker: a list of a million dicts, and the same in a SharedList.

Questions: How much memory of its own does a worker have after half an epoch in random order? How long does
it take to read one record?

A worker's own memory is its USS: the pages that no other process maps, as smaps_rollup counts them (proc(5)).
Each contender runs in a fresh process, with two forked workers, and a dataset that does nothing but read a
record. Times are CPU time, so neighbors on the machine count less.

Command: python benchmarks/worker_memory.py [--records 1000000] [--runs 3] [--save]
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import time
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

import psutil
import torch.utils.data
from harness import Contender, interleave, report, save

import fastload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MB = 1e6
BATCH = 256
READS = 200_000
LOADERS = {"torch": torch.utils.data.DataLoader, "fastload": fastload.DataLoader}
KINDS: dict[str, Callable[[list[Any]], Sequence[Any]]] = {"list": list, "SharedList": fastload.SharedList}


class Records(torch.utils.data.Dataset[Any]):
    """Reads a record, and nothing else."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        record = self.items[index]
        return len(record["path"]), record["label"]


def make_records(count: int) -> list[Any]:
    """Dicts such as those of an annotation file."""
    return [{"path": f"/data/train/{i:09d}/image_{i}.jpg", "label": i % 1000} for i in range(count)]


def own_bytes(loader: str, kind: str, num_records: int) -> float:
    """The mean USS of two workers after half an epoch."""
    dataset = Records(KINDS[kind](make_records(num_records)))
    batches = iter(
        LOADERS[loader](dataset, BATCH, shuffle=True, num_workers=2, multiprocessing_context="fork")
    )
    for _ in itertools.islice(batches, num_records // BATCH // 2):
        pass
    workers = psutil.Process().children()
    return sum(worker.memory_full_info().uss for worker in workers) / len(workers)


def in_new_process(work: Callable[..., float], *args: Any) -> float:
    """The function's result from a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *args).result()


def read_us(items: Sequence[Any], order: list[int]) -> float:
    """Microseconds of CPU time to read one record."""
    start_s = time.process_time()
    for index in order:
        items[index]
    return 1e6 * (time.process_time() - start_s) / len(order)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/worker_memory.json")
    options = parser.parse_args()

    def memory(loader: str, kind: str) -> Contender:
        return Contender(
            f"{loader}, {kind}",
            kind,
            lambda: in_new_process(own_bytes, loader, kind, options.records) / MB,
        )

    workers = [memory(loader, kind) for kind in KINDS for loader in LOADERS]
    for one in workers * options.runs:  # in fresh processes: no run warms up the next
        one.figures.append(one.run())
    medians = {one.label: one.median for one in workers}
    questions = [
        report(
            f"own memory of a worker, {options.records:,} dicts, half an epoch",
            "MB",
            workers,
            {f"{name}: list / SharedList": (medians[f"{name}, list"] / medians[f"{name}, SharedList"], 15)
             for name in LOADERS},
            digits=1,
        )
    ]  # fmt: skip
    held = {kind: make(make_records(options.records)) for kind, make in KINDS.items()}
    order = random.Random(0).choices(range(options.records), k=READS)

    def reading(kind: str) -> Contender:
        return Contender(kind, kind, lambda: read_us(held[kind], order))

    readers = [reading(kind) for kind in KINDS]
    interleave(readers, 5 * options.runs)
    listed, shared = readers
    more_us = shared.median - listed.median
    questions.append(
        report(f"one of {options.records:,} dicts, read at random", "us", readers, {}, digits=2)
        | {"ratios": {"SharedList - list": {"value": more_us, "unit": "us", "target": 5}}}
    )
    if options.save:
        command = (
            f"python benchmarks/worker_memory.py --records {options.records} --runs {options.runs} --save"
        )
        save("worker_memory", command, questions)


if __name__ == "__main__":
    main()
