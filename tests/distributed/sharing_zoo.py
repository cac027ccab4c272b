"""What the ranks of tests/distributed/test_launchers.py run; as a script: `sharing_zoo.py WHEN FOLDER`."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import DistributedSampler

import fastload
from fastload.cache import rate_limit

LENGTH = 80


class Photos:
    """A user's own class: it has no fingerprint. Each read is noted in a file."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "reads"

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        with self.log.open("ab", buffering=0) as file:
            file.write(index.to_bytes(4, "little"))
        return np.full((4, 4, 3), index, np.uint8), index


def cached(folder: Path) -> fastload.CachedDataset:
    """The cache that each rank makes."""
    rate_limit.CHEAP_S = float("inf")  # as in tests/conftest.py
    return fastload.CachedDataset(Photos(folder))


def train(dataset: fastload.CachedDataset, folder: Path) -> None:
    """Four epochs; notes how the cache is shared, and whether all samples were right."""
    rank = dist.get_rank()
    sampler: Any = DistributedSampler(dataset)
    # The workers of a spawned rank are spawned too, which takes seconds.
    num_workers = 0 if multiprocessing.get_start_method() == "spawn" else 1
    loader = fastload.DataLoader(dataset, 4, sampler=sampler, num_workers=num_workers)
    is_right = True
    for epoch in range(4):
        loader.set_epoch(epoch)
        for images, labels in loader:
            is_right &= bool((images == labels[:, None, None, None]).all())
        dist.barrier()
    found = {"pid": os.getpid(), "why": dataset.explain(), "is_right": is_right}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()  # the cache lives as long as some rank does


def run(when: str, folder: Path, **group: Any) -> None:
    """A rank that makes its cache before or after it joins the process group."""
    dataset = cached(folder) if when == "before" else None
    dist.init_process_group("gloo", **group)
    train(dataset or cached(folder), folder)
    dist.destroy_process_group()


def spawned(rank: int, folder: Path) -> None:
    """A rank that torch.multiprocessing has started."""
    run("after", folder, init_method=f"file://{folder}/store", rank=rank, world_size=2)


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]))
