"""What the ranks of tests/distributed/test_torchrun.py run: `rank_zoo.py MODE FOLDER`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fastload
from fastload.cache import rate_limit

LENGTH = 61
BATCH_SIZE = 4


class Numbers:
    """Gives its indices, in arrays that a cache can store."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return {"index": index, "pixels": torch.full((4, 4), index)}

    def fingerprint(self) -> str:
        return f"numbers to {self.length}"


def partitioned(dataset: Any, num_workers: int) -> fastload.DataLoader:
    sampler = fastload.NodePartitionSampler(dataset, seed=7, epochs_per_partition=2)
    return fastload.DataLoader(dataset, BATCH_SIZE, sampler=sampler, num_workers=num_workers)


def indices(batch: Any) -> list[int]:
    return [int(index) for index in batch["index"]]


def epochs(folder: Path) -> None:
    """Two epochs of one partition over a cache in RAM; says what came, and what the node's cache holds."""
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


if __name__ in ("__main__", "__mp_main__"):
    rate_limit.CHEAP_S = float("inf")  # as in tests/conftest.py; in the workers too

if __name__ == "__main__":
    dist.init_process_group("gloo")
    {"epochs": epochs, "killed": killed}[sys.argv[1]](Path(sys.argv[2]))
    dist.destroy_process_group()
