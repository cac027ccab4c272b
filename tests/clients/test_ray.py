"""Ray Train: two workers, `prepare_data_loader` and fastload's own `prepare`."""

from __future__ import annotations

from typing import ClassVar

from tests.clients import contract
from tests.clients.harness import IMPORT_OF_TORCH

SCRIPT = """
import os
import ray
import ray.train
import ray.train.torch
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader

from tests.clients.in_rank import FOLDER, NUM_WORKERS, Photos, digest, record


def train(config):
    torch.manual_seed(1)
    loader = DataLoader(Photos(), batch_size=2, shuffle=True, num_workers=NUM_WORKERS)
    loader = ray.train.torch.prepare_data_loader(loader)
    context = ray.train.get_context()
    with open(config["folder"] / f"digests-{context.get_world_rank()}", "w") as file:
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            for batch in loader:
                print(len(loader), digest(batch), file=file)


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": FOLDER},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(storage_path=str(FOLDER / "ray"), name="run"),
    )
    trainer.fit()
    ray.shutdown()
    for worker in range(2):
        record("train", (FOLDER / f"digests-{worker}").read_text())
"""


class TestRay(contract.Batches):
    script = SCRIPT
    ways = ("fastload",)
    replacements: ClassVar[dict[str, str]] = {
        IMPORT_OF_TORCH: "from fastload import DataLoader\nfrom fastload.integrations.ray import prepare\n",
        "ray.train.torch.prepare_data_loader(loader)": "prepare(loader)",
    }
