"""Two ranks, one cache: DistributedDataParallel, as torchrun starts it, in place of DataParallel.

    python examples/ddp.py [PHOTOS]

Claim: no picture is decoded twice for the two ranks, and both apply the same gradients at each step.
"""

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from pictures import CountedFolder, photo_folder
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import fastload

RANKS = EPOCHS = 2
# `torchrun --standalone --nproc-per-node=2`, on the loopback interface and with a free port.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
TORCHRUN += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]


def train(folder: Path, log: Path) -> None:
    """What each rank runs."""
    dist.init_process_group("gloo")  # "nccl" with a GPU for each rank
    rank = dist.get_rank()
    torch.manual_seed(rank)  # different weights: DDP hands round those of rank 0
    photos = CountedFolder(folder, log)
    dataset = fastload.CachedDataset(photos, cache="ram")  # both ranks find one cache, by what it is made of
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, len(photos.classes))]
    model = DistributedDataParallel(nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), *head))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = DistributedSampler(dataset, shuffle=True)  # a share of each epoch for each rank
    channels_last = {"memory_format": torch.channels_last}  # (B, C, H, W) over the memory of (B, H, W, C)
    loader = fastload.DataLoader(dataset, 16, sampler=sampler, num_workers=1, **channels_last)
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)  # the sampler's too: else every epoch has the order of the first
        for images, labels in loader:
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(model(images / 255), labels).backward()
            check_gradients(model)
            optimizer.step()
    print(f"rank {rank}: {dataset.cache.explain().splitlines()[0]}", flush=True)
    dist.barrier()  # the cache lives as long as some rank does
    dist.destroy_process_group()


def check_gradients(model: nn.Module) -> None:
    mine = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    all_ranks = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(all_ranks, mine)
    if not mine.any() or not all(torch.equal(mine, other) for other in all_ranks):
        raise SystemExit("the ranks have different gradients, or none")


def main() -> None:
    with photo_folder() as folder, tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "decoded"
        environment = os.environ | {"OMP_NUM_THREADS": "1"}  # torchrun's default, which it would warn of
        subprocess.run([*TORCHRUN, __file__, folder, log], check=True, env=environment)
        times = Counter(CountedFolder(folder, log).decoded())
        checked = {0, len(times) // 2, len(times) - 1}  # read by each rank: is the dataset random?
        if any(count > 1 for index, count in times.items() if index not in checked):
            raise SystemExit(f"pictures were decoded twice: {times.most_common(8)}")
        print(f"{len(times)} pictures decoded once for {RANKS} ranks and {EPOCHS} epochs")


if __name__ == "__main__":
    if "RANK" in os.environ:  # set by torchrun
        train(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        main()
