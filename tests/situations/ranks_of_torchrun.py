"""Two ranks with a DistributedSampler share one cache in RAM, and read each photo once an epoch between them.

$ python ranks_of_torchrun.py
"""

import multiprocessing
import os

import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

import fastload


def rank(number, results):
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/rendezvous", rank=number, world_size=2)
    dataset = fastload.CachedDataset(fastload.ImageFolder("photos"))
    sampler = DistributedSampler(dataset)
    loader = fastload.DataLoader(dataset, batch_size=5, sampler=sampler, num_workers=1)
    for epoch in range(2):
        loader.set_epoch(epoch)
        results.put([value for images, labels in loader for value in images[:, 0, 0, 0].tolist()])
        dist.barrier()
    assert dataset.cache_info().num_cached == 40
    dist.destroy_process_group()


if __name__ == "__main__":
    results = multiprocessing.Queue()
    ranks = [multiprocessing.Process(target=rank, args=(number, results)) for number in range(2)]
    [one.start() for one in ranks]
    seen = [results.get(timeout=40) for _ in range(4)]
    [one.join() for one in ranks]
    assert sorted(value for values in seen for value in values) == sorted(2 * list(range(0, 240, 6)))
    assert [one.exitcode for one in ranks] == [0, 0]
