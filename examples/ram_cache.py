"""A cache in RAM: one copy of the decoded pictures for all workers, and for your other processes too.

    python examples/ram_cache.py [PHOTOS]

Claim: every picture is decoded once, and a second process finds all of them and decodes one, to compare.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import albumentations as A
from pictures import CountedFolder, photo_folder

import fastload

CHECKS = 2  # pictures read once more: is the dataset random? Is a cache that was found really of it?


def open_dataset(folder: Path, log: Path) -> fastload.CachedDataset:
    photos = CountedFolder(folder, log)  # the fixed part: decoded, resized and cached
    transform = A.Compose([A.RandomCrop(80, 80), A.HorizontalFlip(p=0.5)])  # the random part: at each access
    return fastload.CachedDataset(photos, transform=transform, cache="ram")


def run_epoch(dataset: fastload.CachedDataset) -> int:
    loader = fastload.DataLoader(dataset, batch_size=32, shuffle=True, num_workers=2)
    return sum(len(labels) for _, labels in loader)


def first_process(folder: Path, log: Path) -> None:
    dataset = open_dataset(folder, log)
    info = dataset.fill(num_workers=2)  # now, in place of during the first epoch
    print(f"filled: {info.num_cached} of {info.num_samples} pictures in {info.nbytes / 1e6:.1f} MB")
    print(dataset.cache.explain())
    filled = len(dataset.dataset.decoded())

    images = run_epoch(dataset)
    by_epoch = len(dataset.dataset.decoded()) - filled
    print(f"an epoch of {images} pictures decoded {by_epoch}", flush=True)

    # Another job of yours, while this one lives. It is told nothing: the same folder and size are enough.
    subprocess.run([sys.executable, __file__, str(folder), str(log)], check=True)
    by_second = len(dataset.dataset.decoded()) - filled - by_epoch

    if filled > len(dataset) + CHECKS or by_epoch or by_second > CHECKS:
        raise SystemExit(f"decoded {filled} to fill, {by_epoch} in an epoch, {by_second} in a second process")
    print(f"{len(dataset)} pictures decoded once for two processes and their workers")


def second_process(folder: Path, log: Path) -> None:
    dataset = open_dataset(folder, log)
    print(f"second process: {dataset.cache.explain().splitlines()[0]}")
    run_epoch(dataset)


def main() -> None:
    if len(sys.argv) == 3:
        second_process(Path(sys.argv[1]), Path(sys.argv[2]))
        return
    with photo_folder() as folder, tempfile.TemporaryDirectory() as directory:
        first_process(folder, Path(directory) / "decoded")


if __name__ == "__main__":
    main()
