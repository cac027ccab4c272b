"""How well loaders use 1, 2, 4, ... all cores of a machine, and how near they come to a bare copy.

Question: on n cores, with n workers, how many images a second do torch's loader, fastload's with only the
import changed, and fastload's over a filled CachedDataset give? Beside one core (efficiency: the rate divided
by n times the rate of one core), and beside the limit: n threads that only copy memory, on the same cores.

The pictures are JPEGs, cropped to 224 x 224 and flipped, as in benchmarks/demo.py. Each contender has a
process of its own, pinned with its workers to the first n cores, one hyperthread of each first; they take
turns. Held out: disk, the GPU, the start of the workers, the first epoch. PSS is the memory of a contender's
processes; a page that several processes map counts once.

Command: python benchmarks/efficiency.py PHOTOS [--cores 1 2 ...] [--runs 5] [--chart SVG] [--save]
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import demo
import numpy as np
import psutil
import torch.utils.data
from harness import Contender, contender, cpu_model, interleave, report, save
from sharing import pss_bytes

import fastload

SAMPLES_A_WORKER = 32 * demo.BATCH_SIZE  # in an epoch
IMAGE_BYTES = demo.CROP[0] * demo.CROP[1] * 3
COPIED_BYTES, COPY_S = 64 << 20, 1.0
TORCH, PLAIN, CACHED = "torch", "fastload, import only", "fastload, cached"
COLORS = {TORCH: "#9aa5b1", PLAIN: "#2f6fb3", CACHED: "#d1762d"}


def cores_in_order() -> list[int]:
    """The usable cores: the first hyperthread of each before the second ones."""

    def place(cpu: int) -> tuple[int, int]:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings = path.read_text() if path.exists() else ""
        first = siblings.replace("-", ",").split(",")[0].strip()
        return int(bool(first) and int(first) != cpu), cpu

    return sorted(os.sched_getaffinity(0), key=place)


def make_loader(label: str, photos: str, num_workers: int) -> Any:
    """The contender's loader, over as many samples as its workers need for a while."""
    folder = fastload.ImageFolder(photos)
    dataset: Any = demo.CroppedPhotos(folder, demo.make_transform())
    if label == CACHED:
        dataset = fastload.CachedDataset(folder, demo.make_transform(), cache="ram")
        if dataset.fill(num_workers, progress=False).num_cached < len(folder):
            raise RuntimeError("the photos do not fit into the cache: use fewer")
    loader = torch.utils.data.DataLoader if label == TORCH else fastload.DataLoader
    num_samples = SAMPLES_A_WORKER * num_workers
    sampler = torch.utils.data.RandomSampler(dataset, num_samples=num_samples)
    workers = {"num_workers": num_workers, "persistent_workers": True}
    return loader(dataset, demo.BATCH_SIZE, sampler=sampler, **workers)


# --- in the contender's process ---------------------------------------------------------------------------

running: list[Contender] = []


def begin(label: str, photos: str, num_workers: int, start_method: str) -> None:
    """Make the contender of this process."""
    # A spawned process would spawn its workers too.
    multiprocessing.set_start_method(start_method, force=True)
    cv2.setNumThreads(0)
    make = functools.partial(make_loader, label, photos, num_workers)
    running.append(contender(label, label, make, SAMPLES_A_WORKER * num_workers))


def run_epoch() -> float:
    """Images a second of one epoch."""
    return running[0].run()


def end() -> int:
    """The memory of this process and its workers, which then end."""
    used_bytes = pss_bytes([os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))])
    running.pop().close()
    return used_bytes


# --- in the parent ----------------------------------------------------------------------------------------


def copy_bytes_per_s(num_threads: int) -> float:
    """What so many threads copy together, in large arrays of their own."""

    def copy(_number: int) -> float:
        source, target = np.ones(COPIED_BYTES, np.uint8), np.ones(COPIED_BYTES, np.uint8)
        count, start_s = 0, time.perf_counter()
        while time.perf_counter() < start_s + COPY_S:
            np.copyto(target, source)
            count += 1
        return count * COPIED_BYTES / (time.perf_counter() - start_s)

    with ThreadPoolExecutor(num_threads) as threads:
        return sum(threads.map(copy, range(num_threads)))


def question(photos: str, cores: list[int], runs: int, one_core: dict[str, float]) -> dict[str, Any]:
    """All contenders on these cores; ``one_core`` has their rates on one, and gets them then."""
    spawn, method = multiprocessing.get_context("spawn"), multiprocessing.get_start_method()
    used_bytes: dict[str, int] = {}
    rows = []
    os.sched_setaffinity(0, cores)  # which all processes inherit that start from now on

    def finish(label: str, process: ProcessPoolExecutor) -> None:
        used_bytes[label] = process.submit(end).result()
        process.shutdown()

    copied = copy_bytes_per_s(len(cores))
    for label in COLORS:
        process = ProcessPoolExecutor(1, spawn)
        process.submit(begin, label, photos, len(cores), method).result()
        run = functools.partial(lambda process: process.submit(run_epoch).result(), process)
        rows.append(Contender(label, label, run, functools.partial(finish, label, process)))
    interleave(rows, runs)
    if len(cores) == 1:
        one_core.update({row.label: row.median for row in rows})
    ratios = {
        f"{row.label}: efficiency": (row.median / len(cores) / one_core[row.label], 1.0)
        for row in rows
        if one_core
    }
    ratios |= {f"{row.label} / copy": (row.median * IMAGE_BYTES / copied, 1.0) for row in rows}
    answer = report(f"cores and workers: {len(cores)}", "images/s", rows, ratios, digits=0)
    for label, row in answer["rows"].items():
        row["images_per_s_per_core"] = row["median"] / len(cores)
        row["bytes_per_s"] = row["median"] * IMAGE_BYTES
        row["pss_bytes"] = used_bytes[label]
        rates = f"{row['images_per_s_per_core']:,.0f} images/s per core, {row['bytes_per_s'] / 1e9:.2f} GB/s"
        print(f"  {label}: {rates}, PSS {used_bytes[label] / 1e6:,.0f} MB")
    print(f"  copy: {copied / 1e9:.1f} GB/s")
    return answer | {"cores": len(cores), "copy_bytes_per_s": copied}


def draw_chart(answers: list[dict[str, Any]], path: Path) -> None:
    """Images a second and the efficiency over the number of cores."""
    figure, (rates, efficiency) = demo.new_figure("efficiency", 1, 2)
    cores = [answer["cores"] for answer in answers]
    for label, color in COLORS.items():
        medians = [answer["rows"][label]["median"] for answer in answers]
        ideal = [medians[0] * number / cores[0] for number in cores]
        rates.plot(cores, medians, "o-", color=color, label=label)
        rates.plot(cores, ideal, ":", color=color)
        shares = [median / most for median, most in zip(medians, ideal, strict=True)]
        efficiency.plot(cores, shares, "o-", color=color, label=label)
    limits = [answer["copy_bytes_per_s"] / IMAGE_BYTES for answer in answers]
    rates.plot(cores, limits, "--", color=demo.GRAY, label="copy of such images")
    rates.set(xscale="log", yscale="log", ylabel="images/s; dotted: as many times one core")
    efficiency.set(xscale="log", ylim=(0, None), ylabel="efficiency")
    for axes in (rates, efficiency):
        axes.set_xticks(cores, [f"{number}" for number in cores], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_xlabel("cores, and as many workers")
        axes.spines[["top", "right"]].set_visible(False)
    rates.legend(frameon=False, labelcolor=demo.GRAY)
    title = f"JPEGs, RandomResizedCrop({demo.CROP[0]}) and a flip"
    figure.suptitle(f"{title}: {cpu_model()}, {demo.load_note()}", fontsize="medium")
    demo.write_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("photos", help="a folder of photographs, as `make photos` draws it")
    parser.add_argument("--cores", type=int, nargs="+", help="by default 1, 2, 4, ... and all")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--chart", type=Path, default=Path("efficiency.svg"), help="the SVG or PNG to write")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/efficiency.json")
    args = parser.parse_args()
    cores = cores_in_order()
    counts = sorted(set(args.cores or [*(2**k for k in range(len(cores).bit_length())), len(cores)]))
    if counts[0] < 1 or counts[-1] > len(cores):
        parser.error(f"--cores should be from 1 to {len(cores)}, the cores of this process")
    demo.warn_if_busy()
    one_core: dict[str, float] = {}
    answers = [question(args.photos, cores[:count], args.runs, one_core) for count in counts]
    os.sched_setaffinity(0, cores)  # of the machine, as the results name it
    draw_chart(answers, args.chart)
    print(f"chart written to {args.chart.resolve()}")
    if args.save:
        save("efficiency", f"python benchmarks/efficiency.py PHOTOS --runs {args.runs} --save", answers)


if __name__ == "__main__":
    main()
