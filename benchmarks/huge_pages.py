"""What huge pages bring a cache in RAM, and what they cost in the epoch that fills it.

Question: How much processor time does a batch of a full cache take with pages of 2 MiB, against 4 KiB? And
how much does a sample of the first epoch, which stores it? The samples cost nothing to make, so the first
epoch shows the whole price; images that must be decoded hide most of it.

Each run is a process of its own without workers. Two kinds take turns: one forbids itself huge pages by
prctl(PR_SET_THP_DISABLE). It is processor time, because that differs less than time on a busy machine.

Held out: worker processes, whose gathers are the same.

Command: python benchmarks/huge_pages.py [--runs 5] [--save]
(as root, before: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled)
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import statistics
import time

from harness import Contender, Noise, report, save

import fastload
from fastload.system.linux import has_shared_huge_pages, huge_pages_report

_PR_SET_THP_DISABLE = 41
SPAWN = multiprocessing.get_context("spawn")
KINDS = {"4 KiB": False, "2 MiB": True}
SIZES = {"512 images of 32 x 32": (32, 512, 50_000), "64 images of 224 x 224": (224, 64, 2_000)}
EPOCHS = 8


def epochs_us(is_huge: bool, side: int, batch_size: int, num_samples: int) -> tuple[float, float]:
    """Microseconds of processor time: of a sample in the first epoch, and of a batch in the later ones."""
    if not is_huge and ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0):
        raise OSError("cannot forbid this process huge pages")
    dataset = fastload.CachedDataset(Noise(num_samples, side), cache="ram")
    loader = fastload.DataLoader(dataset, batch_size, shuffle=True)
    times_s = []
    for _ in range(1 + EPOCHS):
        start_s = time.process_time()
        for _ in loader:
            pass
        times_s.append(time.process_time() - start_s)
    first_s, *later_s = times_s
    return 1e6 * first_s / num_samples, 1e6 * statistics.median(later_s) / len(loader)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/huge_pages.json")
    options = parser.parse_args()
    if not has_shared_huge_pages():
        parser.error(huge_pages_report() or "this system has no huge pages for shared memory")
    questions = []
    for title, size in SIZES.items():
        firsts, laters = ([Contender(kind, kind, lambda: 0.0) for kind in KINDS] for _ in range(2))
        for _ in range(options.runs):
            for (_, is_huge), first, later in zip(KINDS.items(), firsts, laters, strict=True):
                with SPAWN.Pool(1) as pool:
                    first_us, later_us = pool.apply(epochs_us, (is_huge, *size))
                first.figures.append(first_us)
                later.figures.append(later_us)
        for name, unit, rows in (
            (f"{title}, full cache", "us a batch", laters),
            (f"{title}, first epoch", "us a sample", firsts),
        ):
            small, huge = (row.median for row in rows)
            questions.append(report(name, unit, rows, {"4 KiB / 2 MiB": (small / huge, 1.0)}, digits=1))
    if options.save:
        command = f"python benchmarks/huge_pages.py --runs {options.runs} --save"
        save("huge_pages", command, questions)


if __name__ == "__main__":
    main()
