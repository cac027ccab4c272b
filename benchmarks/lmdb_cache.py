"""How fast an LMDB cache is built, and how fast batches come out of it.

Questions: does a build keep its workers decoding, or do they wait for whoever writes? Once every record has
been read once, how much slower is a file in the page cache than a cache in RAM? And how much faster are
batches through fastload than through torch's DataLoader over the same file?

Held out: the GPU, and reading from the disk: the file was just written, and lies in the page cache. The disk
counts where it is written: its first gigabytes are the page cache's affair, later ones wait for it.
A build is measured from the call to the finished file, with the start of its workers.

Command: python benchmarks/lmdb_cache.py [--only build|read] [--runs 5] [--photos 2000] [--save]
"""

from __future__ import annotations

import argparse
import functools
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch.utils.data
from harness import Contender, best, contender, images_per_s, interleave, report, save
from photos import make_photos
from torch.utils.data import Dataset

import fastload
from fastload.cache.build import build_lmdb

WORKERS = (0, 1, 2)
BUILD_WORKERS = (1, 2)
BATCH_SIZE = 256
NUM_IMAGES = 4096
SIDE = 224
RESIZED = 256  # shorter side of what a build decodes, as before a random crop of 224
ALONE = 400  # photos that are decoded to measure one core


class InMemory(Dataset):
    """Decoded images in one array, so making the caches takes no decoding."""

    def __init__(self, num_images: int, side: int) -> None:
        self.images = np.random.default_rng(0).integers(0, 256, (num_images, side, side, 3), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.images[index], index % 10


# --- building --------------------------------------------------------------------------------------------


def decode_rate(folder: Any, count: int) -> float:
    """Photos a second that one core decodes, storing nothing."""
    start_s = time.perf_counter()
    for index in range(count):
        folder[index]
    return count / (time.perf_counter() - start_s)


def build_rate(folder: Any, directory: Path, num_workers: int) -> float:
    """Photos a second of a whole build, which is removed again."""
    path = directory / "built"
    start_s = time.perf_counter()
    build_lmdb(folder, path, num_workers=num_workers, progress=False).close()
    elapsed_s = time.perf_counter() - start_s
    path.unlink()
    return len(folder) / elapsed_s


def building(directory: Path, num_photos: int, size: int | None, runs: int) -> dict[str, Any]:
    """A cache of an image folder, against the decoding alone."""
    make_photos(directory / "photos", num_photos)
    folder = fastload.ImageFolder(directory / "photos", size=size)
    count = min(ALONE, num_photos)
    rows = [Contender("decoding alone, one core", "alone", lambda: decode_rate(folder, count))]
    for w in BUILD_WORKERS:
        build = functools.partial(build_rate, folder, directory, w)
        rows.append(Contender(f"build, {w} workers", f"build {w}", build))
    interleave(rows, runs)
    base = best(rows, "alone").median
    ratios = {
        f"build / ({w} x one core)": (best(rows, f"build {w}").median / (w * base), 0.9)
        for w in BUILD_WORKERS
    }
    what = "500 x 375" if size is None else f"resized to {size}"
    return report(f"LMDB of {num_photos:,} JPEG photos, {what}", "images/s", rows, ratios)


# --- reading ---------------------------------------------------------------------------------------------


def reader(label: str, group: str, cls: Any, dataset: Any, num_workers: int) -> Contender:
    """A shuffling loader that is made at its first run and kept, its workers' first reads behind it."""

    def make() -> Any:
        loader = cls(
            dataset,
            BATCH_SIZE,
            shuffle=True,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
        )
        for _ in range(3 * num_workers):  # each worker meets its share of the records at random
            images_per_s(loader, NUM_IMAGES)
        return loader

    return contender(f"{label}, {num_workers} workers", group, make, NUM_IMAGES)


def reading(directory: Path, runs: int) -> dict[str, Any]:
    """Shuffled batches without per-sample work, from RAM and from the file, each at its best worker count."""
    source = InMemory(NUM_IMAGES, SIDE)
    in_ram = fastload.CachedDataset(source, cache="ram")
    for index in range(NUM_IMAGES):
        in_ram._view(index)
    on_disk = fastload.CachedDataset(source, cache=f"lmdb:{directory / 'read'}")
    rows = []
    for w in WORKERS:
        rows += [
            reader("torch over LMDB", "torch", torch.utils.data.DataLoader, on_disk, w),
            reader("fastload over LMDB", "lmdb", fastload.DataLoader, on_disk, w),
            reader("fastload over RAM", "ram", fastload.DataLoader, in_ram, w),
        ]
    interleave(rows, runs)
    rate = best(rows, "lmdb").median
    ratios = {
        "LMDB / RAM": (rate / best(rows, "ram").median, 0.8),
        "fastload / torch over LMDB": (rate / best(rows, "torch").median, 3.0),
    }
    title = f"{SIDE} x {SIDE} x 3 uint8 from caches, batch {BATCH_SIZE}, shuffled"
    return report(title, "images/s", rows, ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["build", "read"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--photos", type=int, default=2000)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/lmdb.json")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="fastload-lmdb-"))
    try:
        answers = []
        if args.only != "read":
            answers += [building(directory, args.photos, size, args.runs) for size in (RESIZED, None)]
        if args.only != "build":
            answers.append(reading(directory, args.runs))
    finally:
        shutil.rmtree(directory)
    if args.save:
        command = f"python benchmarks/lmdb_cache.py --runs {args.runs} --photos {args.photos} --save"
        save("lmdb", command, answers)


if __name__ == "__main__":
    main()
