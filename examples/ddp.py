"""Two ranks, one cache: DistributedDataParallel with fastload's loader.

    python examples/ddp.py [FOLDER]

FOLDER holds a folder of images for each class. The script starts two ranks of itself; you start yours with
`torchrun --nproc-per-node=2 examples/ddp.py FOLDER`.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from pictures import SIZE, photo_folder, small_network
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import fastload

RANKS = 2


def train(folder: Path) -> tuple[nn.Module, fastload.CachedDataset]:
    """The training of one rank."""
    photos = fastload.ImageFolder(folder, size=SIZE)
    dataset = fastload.CachedDataset(photos, cache="ram")  # one cache for all ranks of this host
    sampler = DistributedSampler(dataset, shuffle=True)  # each rank gets its share of each epoch
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpus() else torch.device("cpu")
    loader = fastload.DataLoader(
        dataset,
        batch_size=8,
        sampler=sampler,
        num_workers=1,
        device=device,
        device_transform=fastload.transforms.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
    )
    model = DistributedDataParallel(small_network(len(dataset.classes)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        loader.set_epoch(epoch)  # the sampler too; otherwise every epoch has the order of the first
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    dist.barrier()  # the cache lives as long as some rank does
    return model, dataset


def has_gpus() -> bool:
    """Whether each rank of this host has a GPU of its own."""
    return torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])


def run_rank(folder: Path) -> None:
    if has_gpus():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if has_gpus() else "gloo")
    report(*train(folder))
    dist.destroy_process_group()


# --- The template ends here. The rest reports on the ranks, and starts them. --------------------------------


def report(model: nn.Module, dataset: fastload.CachedDataset) -> None:
    info = dataset.cache_info()
    weights = torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()])
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (weights, info.num_cached, dataset.cache.explain().splitlines()[0]))
    if dist.get_rank() == 0:
        for rank, (_, num_cached, explanation) in enumerate(ranks):
            print(f"rank {rank}: {explanation}; {num_cached} of {info.num_samples} images are cached")
        equal = all(torch.equal(weights, other) for other, _, _ in ranks)
        print(f"{len(ranks)} ranks ended with {'equal' if equal else 'different'} weights")


def start_ranks(folder: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # torchrun's default, which it would warn of
    subprocess.run([*torchrun, __file__, folder], check=True, env=environment)


if __name__ == "__main__":
    if "RANK" in os.environ:  # set by torchrun
        run_rank(Path(sys.argv[1]))
    else:
        with photo_folder() as folder:
            start_ranks(folder)
