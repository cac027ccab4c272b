"""What it costs to share a cache: time to open it from another process, and memory of ranks and workers.

Questions: How long does a second process need to open a filled cache, beyond asking the file system about
every source file? How long for a million small records, and how long is their table? How much memory do two
ranks hold with one cache, and eight workers of one loader, against the same with an empty cache?

Memory is the sum of PSS (proc(5)): a page that n processes map counts 1/n in each.

Held out: imports. Each process opens the cache of one sample before.

Command: python benchmarks/sharing.py build/photos [--runs 5] [--save]   (`make photos` makes the folder)
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
import warnings
from typing import TYPE_CHECKING, Any

import harness
import numpy as np
import psutil
from harness import save
from rich.console import Console
from rich.table import Table

import fastload
from fastload.cache.ram.arena import ENTRY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

SPAWN = multiprocessing.get_context("spawn")
MB = 1e6


class Noise(harness.Noise):
    """Noise that says what it is."""

    def fingerprint(self) -> str:
        """What the samples are."""
        return f"noise {self.image.shape}"


def pss_bytes(pids: list[int]) -> int:
    """Memory of these processes together."""
    return sum(psutil.Process(pid).memory_full_info().pss for pid in pids)


def in_new_process(work: Callable[..., Any], *args: Any) -> Any:
    """The function's result from a process of its own."""
    with SPAWN.Pool(1) as pool:
        return pool.apply(work, args)


def open_photos(folder: str) -> tuple[float, float, int]:
    """Seconds to open the cache of a folder and to scan the folder alone, and the samples found."""
    fastload.CachedDataset(Noise(1, 1))
    dataset = fastload.ImageFolder(folder)
    dataset.fingerprint()
    start_s = time.perf_counter()
    dataset.fingerprint()
    scanned_s = time.perf_counter()
    cached = fastload.CachedDataset(dataset)
    opened_s = time.perf_counter()
    return opened_s - scanned_s, scanned_s - start_s, cached.cache_info().num_cached


def open_noise(num_samples: int, side: int) -> tuple[float, int]:
    """Seconds to open the cache of many small records, and the samples found."""
    fastload.CachedDataset(Noise(1, 1))
    dataset = Noise(num_samples, side)
    start_s = time.perf_counter()
    cached = fastload.CachedDataset(dataset)
    return time.perf_counter() - start_s, cached.cache_info().num_cached


def rank(dataset: Noise, max_memory: str, done: Any, go_on: Any) -> None:
    """A rank: read everything, say so, and stay."""
    cached = fastload.CachedDataset(dataset, max_memory=max_memory)
    for index in range(len(cached)):
        int(np.asarray(cached._view(index)[0]).max())
    done.release()
    go_on.wait()


def ranks_bytes(num_ranks: int, dataset: Noise, max_memory: str) -> int:
    """PSS of so many ranks that have read all samples."""
    done, go_on = SPAWN.Semaphore(0), SPAWN.Event()
    ranks = [SPAWN.Process(target=rank, args=(dataset, max_memory, done, go_on)) for _ in range(num_ranks)]
    for process in ranks:
        process.start()
    for _ in ranks:
        done.acquire()
    used = pss_bytes([process.pid for process in ranks if process.pid is not None])
    go_on.set()
    for process in ranks:
        process.join()
    return used


def workers_bytes(num_workers: int, cached: fastload.CachedDataset) -> int:
    """PSS of this process and its workers after two epochs."""
    loader = fastload.DataLoader(cached, 64, num_workers=num_workers, persistent_workers=True)
    with loader:
        for _ in range(2):
            for _ in loader:
                pass
        return pss_bytes([os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", help="a folder of images, one folder a class")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/sharing.json")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # eight workers on two cores
    questions: list[dict[str, Any]] = []

    def note(title: str, label: str, value: float, unit: str, target: float, **more: Any) -> None:
        figure = {"value": value, "unit": unit, "target": target}
        questions.append({"title": title, "ratios": {label: figure}, **more})

    photos = fastload.CachedDataset(fastload.ImageFolder(options.photos))
    photos.fill()
    opened = [in_new_process(open_photos, options.photos) for _ in range(options.runs)]
    if any(found != len(photos) for _, _, found in opened):
        raise RuntimeError("the second process did not find the filled cache")
    beyond_ms = [1e3 * (open_s - scan_s) for open_s, scan_s, _ in opened]
    scan_ms = [1e3 * scan_s for _, scan_s, _ in opened]
    note(
        f"open a filled cache of {len(photos):,} photos from a second process",
        "beyond the scan of the files",
        statistics.median(beyond_ms),
        "ms",
        50,
        figures=beyond_ms,
        scan_ms=statistics.median(scan_ms),
    )
    photos.cache.close()

    million = fastload.CachedDataset(Noise(1_000_000, 8))
    million.fill(0)
    opened_s = [in_new_process(open_noise, 1_000_000, 8) for _ in range(options.runs)]
    if any(found != 1_000_000 for _, found in opened_s):
        raise RuntimeError("the second process did not find the filled cache")
    note(
        "open a filled cache of 1,000,000 records of 8 x 8 x 3 from a second process",
        "all",
        1e3 * statistics.median(open_s for open_s, _ in opened_s),
        "ms",
        1000,
        figures=[1e3 * open_s for open_s, _ in opened_s],
    )
    note("the table of a cache", "for each record", ENTRY_BYTES, "bytes", 40)
    million.cache.close()

    side, num_samples = 224, 3500
    data_bytes = num_samples * side * side * 3
    empty = ranks_bytes(2, Noise(num_samples, side), "1B")
    filled = ranks_bytes(2, Noise(num_samples, side), "auto")
    note(
        f"memory of two ranks with one cache of {data_bytes / MB:,.0f} MB",
        "beyond an empty cache, in sizes of the cache",
        (filled - empty) / data_bytes,
        "x",
        1.1,
        empty_bytes=empty,
        filled_bytes=filled,
    )

    cached = fastload.CachedDataset(Noise(num_samples, side), max_memory="1B")
    empty = workers_bytes(8, cached)
    cached.cache.close()
    cached = fastload.CachedDataset(Noise(num_samples, side))
    cached.fill()
    filled = workers_bytes(8, cached)
    note(
        f"memory of eight workers with one cache of {data_bytes / MB:,.0f} MB",
        "beyond an empty cache, in sizes of the cache",
        (filled - empty) / data_bytes,
        "x",
        1.1,
        empty_bytes=empty,
        filled_bytes=filled,
    )

    table = Table("question", "", "figure", "target, at most")
    for question in questions:
        for label, figure in question["ratios"].items():
            shown = f"{figure['value']:.3g} {figure['unit']}"
            table.add_row(question["title"], label, shown, f"{figure['target']:g}")
    Console().print(table)
    if options.save:
        save("sharing", f"python benchmarks/sharing.py build/photos --runs {options.runs} --save", questions)


if __name__ == "__main__":
    main()
