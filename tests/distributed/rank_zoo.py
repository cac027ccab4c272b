"""What the ranks of tests/distributed/test_launchers.py run; as a script: `rank_zoo.py FOLDER`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

import fastload

LENGTH, BATCH_SIZE, NUM_PHOTOS = 61, 4, 80
CHANGED = 33  # no sample that is read when a cache is made


class Numbers:
    """Gives its indices, in arrays that a cache can store."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return {"index": index, "pixels": torch.full((4, 4), index)}

    def fingerprint(self) -> str:
        return "numbers"


class Photos:
    """A user's own class: it has no fingerprint. Each read is noted in a file.

    Args:
        folder: Where the file is.
        changed: The label of one sample, if it is not its index.
    """

    def __init__(self, folder: Path, changed: int = CHANGED) -> None:
        self.log = folder / "reads"
        self._changed = changed

    def __len__(self) -> int:
        return NUM_PHOTOS

    def __getitem__(self, index: int) -> Any:
        with self.log.open("ab", buffering=0) as file:
            file.write(index.to_bytes(4, "little"))
        return np.full((4, 4, 3), index, np.uint8), self._changed if index == CHANGED else index


def partitioned(dataset: Any, num_workers: int) -> fastload.DataLoader:
    sampler = fastload.NodePartitionSampler(dataset, seed=7)
    return fastload.DataLoader(dataset, BATCH_SIZE, sampler=sampler, num_workers=num_workers)


def indices(batch: Any) -> list[int]:
    return [int(index) for index in batch["index"]]


def epochs(folder: Path) -> None:
    """Two epochs over a cache in RAM; says what came, and what the node's cache holds."""
    dist.init_process_group("gloo")
    dataset = fastload.CachedDataset(Numbers(), cache="ram")
    loader = partitioned(dataset, num_workers=1)
    seen = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        seen.append([index for batch in loader for index in indices(batch)])
        dist.barrier()
    found = {
        "node": loader.sampler.node,
        "seen": seen,
        "part": loader.sampler.part.tolist(),
        "cached": [index for index in range(LENGTH) if index in dataset.cache],
    }
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()  # the cache lives as long as some rank does
    dist.destroy_process_group()


def killed(folder: Path) -> None:
    """Two epochs; rank 1 is killed within the second one, and all ranks go on from their states."""
    path = folder / f"rank{dist.get_rank()}.json"
    loader = partitioned(Numbers(), num_workers=0)
    first, seen = 0, [[], []]
    is_first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if not is_first_start:
        saved = json.loads(path.read_text())
        first, seen = saved["epoch"], saved["seen"]
        loader.load_state_dict(saved["state"])
    for epoch in range(first, 2):
        if is_first_start or epoch > first:
            loader.set_epoch(epoch)
        for batch in loader:
            dist.barrier()
            seen[epoch] += indices(batch)
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps({"epoch": epoch, "seen": seen, "state": loader.state_dict()}))
            partial.replace(path)
            dist.barrier()  # each rank has saved this batch: the kill of one rank ends the other one, too
            if is_first_start and dist.get_rank() == 1 and epoch == 1 and len(seen[1]) == 2 * BATCH_SIZE:
                os.kill(os.getpid(), signal.SIGKILL)


def cached(folder: Path) -> fastload.CachedDataset:
    """The cache that all ranks share."""
    return fastload.CachedDataset(Photos(folder), cache_key=str(folder))


def note_own_samples(rank: int, folder: Path) -> list[fastload.CachedDataset]:
    """Fills caches of samples without a key, of which one differs between ranks; notes what each gives."""
    own = folder / "own"
    own.mkdir(exist_ok=True)
    caches = [fastload.CachedDataset(Photos(own, 1000 * rank + number)) for number in range(2)]
    for cache in caches:
        cache.fill(num_workers=0)
    found = {"labels": [[int(label) for _, label in cache] for cache in caches]}
    (folder / f"own{rank}.json").write_text(json.dumps(found))
    return caches


def share(dataset: fastload.CachedDataset, folder: Path) -> None:
    """Four epochs; notes how the cache is shared, and whether all samples were right."""
    sampler: Any = DistributedSampler(dataset)
    loader = fastload.DataLoader(dataset, BATCH_SIZE, sampler=sampler, num_workers=1)
    is_right = True
    for epoch in range(4):
        loader.set_epoch(epoch)
        for images, labels in loader:
            is_right &= bool((images == labels[:, None, None, None]).all())
        dist.barrier()
    found = {"why": dataset.explain(), "is_right": is_right}
    (folder / f"shared{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()  # the cache lives as long as some rank does


def main(folder: Path) -> None:
    """A rank of torchrun: makes caches of its own, and one that ranks share; later, one rank is killed."""
    is_first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    dist.init_process_group("gloo")
    if is_first_start:
        note_own_samples(dist.get_rank(), folder)
        share(cached(folder), folder)
    killed(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
