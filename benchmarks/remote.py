"""How much of an object store's latency reaches the training loop?

Question: with photographs in a store that answers each request after 0, 10 or 50 ms, how many images a second
do two workers read, decode and crop? The plain dataset reads and decodes one file on every access, with s3fs,
as a dataset of a user's own does; with torch's loader and with ours. `fastload.ImageFolder` fetches the files
of a batch in one call, in both loaders. The same files on the local disk are the upper bound.

The store is a process on the same machine (object_store.py), so its work and the network's are taken from the
same cores: the figures at 0 ms are what S3's protocol costs in Python, with no network.

Held out: bandwidth and throttling of a real store. A cache removes all of this from the second epoch on.

An epoch has 640 photographs: with 50 ms a request, the plain dataset reads 40 a second.

Command: python benchmarks/remote.py PHOTOS [--runs 5] [--save]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import albumentations as A
import fsspec
import numpy as np
import torch.utils.data
from harness import Contender, contender, interleave, report, save
from PIL import Image

import fastload

if TYPE_CHECKING:
    from collections.abc import Iterator

LATENCIES_MS = (0, 10, 50)
NUM_IMAGES = 640
BATCH_SIZE, NUM_WORKERS, CROP_SIDE = 64, 2, 224
SERVER = Path(__file__).with_name("object_store.py")
PLAIN_TORCH = "plain dataset, torch's loader"
PLAIN_OURS = "plain dataset, fastload's loader"
FOLDER_TORCH = "ImageFolder, torch's loader"
FOLDER_OURS = "ImageFolder, fastload's loader"
LOCAL = "ImageFolder on the local disk, fastload's loader"


class PlainDataset(torch.utils.data.Dataset[Any]):
    """What people write: each access reads one object and decodes it."""

    def __init__(self, samples: list[tuple[str, int]], options: dict[str, Any], transform: Any) -> None:
        self.samples = samples
        self.options = options
        self.transform = transform
        self.opened: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[index]
        if self.opened is None or self.opened[0] != os.getpid():  # fsspec's file systems must not be forked
            self.opened = os.getpid(), fsspec.filesystem("s3", **self.options)
        data = self.opened[1].cat_file(path)
        image = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        return self.transform(image=image)["image"], label


@contextlib.contextmanager
def store(photos: Path, latency_ms: int) -> Iterator[dict[str, Any]]:
    """The options of s3fs for a store that serves a folder."""
    process = subprocess.Popen(
        [sys.executable, str(SERVER), str(photos), str(latency_ms / 1000)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    if process.stdin is None or process.stdout is None:
        raise AssertionError("both are pipes")
    with process:
        try:
            yield {
                "endpoint_url": f"http://127.0.0.1:{int(process.stdout.readline())}",
                "key": "none",
                "secret": "none",
            }
        finally:
            process.stdin.close()


def contenders(photos: Path, options: dict[str, Any]) -> list[Contender]:
    """All rows for one latency."""
    crop = A.Compose([A.RandomCrop(CROP_SIDE, CROP_SIDE), A.HorizontalFlip(p=0.5)])
    folder = fastload.ImageFolder("s3://photos", crop, storage_options=options)
    plain = PlainDataset(list(folder.samples), options, crop)
    torchs = torch.utils.data.DataLoader
    rows: list[tuple[str, Any, Any]] = [
        (PLAIN_TORCH, torchs, plain),
        (PLAIN_OURS, fastload.DataLoader, plain),
        (FOLDER_TORCH, torchs, folder),
        (FOLDER_OURS, fastload.DataLoader, folder),
        (LOCAL, fastload.DataLoader, fastload.ImageFolder(photos, crop)),
    ]
    loading = {
        "shuffle": True,
        "num_workers": NUM_WORKERS,
        "persistent_workers": True,
        "multiprocessing_context": "forkserver",
    }
    chosen = np.linspace(0, len(folder) - 1, NUM_IMAGES).astype(int).tolist()
    parts = [(label, cls, torch.utils.data.Subset(data, chosen)) for label, cls, data in rows]
    return [
        contender(label, label, lambda cls=cls, data=data: cls(data, BATCH_SIZE, **loading), NUM_IMAGES)
        for label, cls, data in parts
    ]


def question(photos: Path, latency_ms: int, runs: int) -> dict[str, Any]:
    """All rows, interleaved."""
    with store(photos, latency_ms) as options:
        rows = contenders(photos, options)
        interleave(rows, runs)
    rates = {row.label: row.median for row in rows}
    ratios = {
        "ImageFolder with fastload's loader / plain dataset with torch's": (
            rates[FOLDER_OURS] / rates[PLAIN_TORCH],
            1.0,
        ),
        "the same dataset, fastload's loader / torch's": (rates[FOLDER_OURS] / rates[FOLDER_TORCH], 1.0),
    }
    title = f"{NUM_IMAGES} photographs in an object store, {latency_ms} ms a request"
    return report(title, "images/s", rows, ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    questions = [question(arguments.photos, latency, arguments.runs) for latency in LATENCIES_MS]
    if arguments.save:
        save("remote", f"python benchmarks/remote.py PHOTOS --runs {arguments.runs}", questions)


if __name__ == "__main__":
    main()
