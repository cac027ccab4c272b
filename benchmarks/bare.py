"""How near two workers come to two bare processes.

Question: how many images a second does a loader with two workers deliver, beside two processes that only
read, transform, and store each result into a warm row of their own memory? The difference is the price of
collating, of the transport, and of the consumer's process, which shares the two cores.

Held out: the start of the processes and the first epoch. Both sides read the same dataset objects; the bare
processes have one thread each, as workers have.

Command: python benchmarks/bare.py PHOTOS [--runs 5] [--save]
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from typing import TYPE_CHECKING, Any

import albumentations as A
import cv2
import numpy as np
import torch
from albumentations.pytorch import ToTensorV2
from harness import Contender, contender, interleave, report, save
from throughput import InMemory, filled
from training import Photos

import fastload

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

NUM_PROCESSES = 2
BATCH_SIZE = 64


def serve(dataset: Any, orders: Connection) -> None:
    """Read the samples of each order into rows, and answer when they are there; ends with the pipe."""
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    rows: Any = None
    while True:
        try:
            indices = orders.recv()
        except EOFError:
            return
        for place, index in enumerate(indices):
            image = np.asarray(dataset[index][0])
            if rows is None:
                rows = np.zeros((BATCH_SIZE, *image.shape), image.dtype)
            rows[place % BATCH_SIZE] = image
        orders.send(len(indices))


class BareProcesses:
    """Two processes that share an epoch between them.

    Args:
        dataset: Gives samples that start with an image.
    """

    def __init__(self, dataset: Any) -> None:
        self._num_samples = len(dataset)
        self._pipes, self._processes = [], []
        fork = multiprocessing.get_context("fork")
        for _ in range(NUM_PROCESSES):
            ours, theirs = fork.Pipe()
            process = fork.Process(target=serve, args=(dataset, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def images_per_s(self) -> float:
        """One epoch in a new random order."""
        order = np.random.default_rng().permutation(self._num_samples).tolist()
        began_s = time.perf_counter()
        for number, pipe in enumerate(self._pipes):
            pipe.send(order[number::NUM_PROCESSES])
        num_read = sum(pipe.recv() for pipe in self._pipes)
        return num_read / (time.perf_counter() - began_s)

    def close(self) -> None:
        """End the processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.terminate()
            process.join()


def question(title: str, bare: Any, ours: Any, runs: int) -> dict[str, Any]:
    """Images a second of bare processes over one dataset, and of loaders over the other."""
    processes = BareProcesses(bare)

    def make(cls: Any, dataset: Any) -> Any:
        return cls(dataset, BATCH_SIZE, shuffle=True, num_workers=NUM_PROCESSES, persistent_workers=True)

    rows = [
        Contender("two bare processes", "bare", processes.images_per_s, processes.close),
        contender("torch", "torch", lambda: make(torch.utils.data.DataLoader, bare), len(bare)),
        contender("fastload", "ours", lambda: make(fastload.DataLoader, ours), len(ours)),
    ]
    interleave(rows, runs)
    base, theirs, own = (row.median for row in rows)
    ratios = {"fastload / bare": (own / base, 0.9), "torch / bare": (theirs / base, 0.0)}
    return report(title, "images/s", rows, ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("photos", help="a folder of photographs, as `make photos` draws it")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/bare.json")
    args = parser.parse_args()
    steps: list[Any] = [A.RandomResizedCrop((224, 224)), A.HorizontalFlip(p=0.5)]
    crop, to_float = A.Compose(steps), A.Compose([*steps, A.Normalize(), ToTensorV2()])
    photos = Photos(fastload.ImageFolder(args.photos), crop)
    plain = InMemory(2048, 256)
    answers = [question("JPEG photos, decoded and cropped", photos, photos, args.runs)]
    for name, transform in (("uint8", crop), ("float32", to_float)):
        bare = InMemory(2048, 256, transform)
        bare.images = plain.images
        title = f"256 x 256 in memory, cropped to 224, {name}"
        answers.append(question(title, bare, filled(plain, transform), args.runs))
    if args.save:
        save("bare", f"python benchmarks/bare.py PHOTOS --runs {args.runs} --save", answers)


if __name__ == "__main__":
    main()
