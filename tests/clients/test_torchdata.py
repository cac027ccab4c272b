"""torchdata: fastload's loader instead of `StatefulDataLoader`, and torchdata's beside `patch_torch()`."""

from __future__ import annotations

from typing import ClassVar

from tests.clients import contract

SCRIPT = """
import sys
import torch
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.clients.in_rank import NUM_WORKERS, RANKS, Model, Photos, num_epochs, rank, record

NUM_BEFORE_STOP = 4
what, state = (sys.argv[1:] + ["train", None])[:2]
torch.manual_seed(1)
model = Model()
if RANKS > 1:
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
    sampler = DistributedSampler(Photos(), seed=1)
else:
    sampler = None
loader = StatefulDataLoader(
    Photos(),
    batch_size=2,
    shuffle=sampler is None,
    sampler=sampler,
    num_workers=NUM_WORKERS,
    generator=torch.Generator().manual_seed(1),
)
record("number of batches", len(loader))
if what == "resume":
    loader.load_state_dict(torch.load(f"{state}-{rank()}.pt", weights_only=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(num_epochs(1)):
    if sampler is not None and what != "resume":
        sampler.set_epoch(epoch)
    for number, (images, labels) in enumerate(loader, 1):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        if what == "stop" and number == NUM_BEFORE_STOP:
            torch.save(loader.state_dict(), f"{state}-{rank()}.pt")
            break
if RANKS > 1:
    torch.distributed.destroy_process_group()
"""


OF_TORCHDATA = "from torchdata.stateful_dataloader import StatefulDataLoader"
OF_TORCH = "from torch.utils.data import DataLoader as StatefulDataLoader"
OF_FASTLOAD = "from fastload import DataLoader as StatefulDataLoader"


class TestInThePlaceOfStatefulDataLoader(contract.Batches, contract.Ranks, contract.Resume):
    """Batches are those of torch's loader; torchdata's shuffles and seeds its workers in another way."""

    script = SCRIPT.replace(OF_TORCHDATA, OF_TORCH)
    replacements: ClassVar[dict[str, str]] = {OF_TORCH: OF_FASTLOAD}
    ways = ("fastload",)


class TestStatefulDataLoaderItself(contract.Batches, contract.Resume):
    """It derives from fastload's loader after `patch_torch()`, and keeps its own iterators and states."""

    script = SCRIPT
    ways = ("patch_torch",)
    num_ranks = (1,)
