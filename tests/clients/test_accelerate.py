"""Accelerate: prepared loaders, two ranks, `skip_first_batches`, and `save_state()` of stateful loaders."""

from __future__ import annotations

from typing import ClassVar

from tests.clients import contract
from tests.clients.harness import IMPORT_OF_TORCH

SCRIPT = """
import sys
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from tests.clients.in_rank import NUM_WORKERS, Model, Photos, num_epochs, record

NUM_BEFORE_STOP = 4
what, state = (sys.argv[1:] + ["train", None])[:2]
set_seed(1)
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(Photos(), batch_size=2, shuffle=True, num_workers=NUM_WORKERS)
loader = accelerator.prepare(loader)
model, optimizer = accelerator.prepare(model, optimizer)
record("number of batches", len(loader))
if what == "resume":
    accelerator.load_state(state)


def train(batches):
    for number, (images, labels) in enumerate(batches, 1):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        if what == "stop" and number == NUM_BEFORE_STOP:
            accelerator.save_state(state)
            break


for epoch in range(num_epochs(1 if what == "stop" else 2)):
    loader.set_epoch(epoch)
    if what == "resume" and epoch == 0:
        train(accelerator.skip_first_batches(loader, NUM_BEFORE_STOP))
    else:
        train(loader)
accelerator.end_training()
"""
PREPARE = "from fastload.integrations.accelerate import prepare, skip_first_batches\n"


class TestAccelerate(contract.Batches, contract.Ranks, contract.Resume):
    script = SCRIPT
    replacements: ClassVar[dict[str, str]] = {
        IMPORT_OF_TORCH: "from fastload import DataLoader\n" + PREPARE,
        "accelerator.prepare(loader)": "prepare(accelerator, loader)",
        "accelerator.skip_first_batches(loader": "skip_first_batches(loader",
    }


class TestSavedState(contract.Resume):
    """With `use_stateful_dataloader`, the state of the loader is in the checkpoint; no batch is skipped."""

    script = SCRIPT
    ways = ("fastload",)
    replacements = TestAccelerate.replacements | {
        "use_seedable_sampler=True": "use_seedable_sampler=True, use_stateful_dataloader=True",
        'what == "resume" and epoch == 0': "False",
    }
