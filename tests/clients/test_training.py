"""Clients that train: Accelerate, Lightning, transformers' Trainer, torchdata and Ray Train."""

from __future__ import annotations

from typing import ClassVar

from tests.clients import contract
from tests.clients.harness import IMPORT_OF_FASTLOAD, IMPORT_OF_TORCH

ACCELERATE = """
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


class TestAccelerate(contract.Batches, contract.Ranks, contract.Resume):
    script = ACCELERATE
    replacements: ClassVar[dict[str, str]] = {
        IMPORT_OF_TORCH: IMPORT_OF_FASTLOAD
        + "from fastload.integrations.accelerate import prepare, skip_first_batches\n",
        "accelerator.prepare(loader)": "prepare(accelerator, loader)",
        "accelerator.skip_first_batches(loader": "skip_first_batches(loader",
    }


class TestSavedState(contract.Resume):
    """With `use_stateful_dataloader`, the state of the loader is in the checkpoint; no batch is skipped."""

    script = ACCELERATE
    ways = ("fastload",)
    replacements = TestAccelerate.replacements | {
        "use_seedable_sampler=True": "use_seedable_sampler=True, use_stateful_dataloader=True",
        'what == "resume" and epoch == 0': "False",
    }


LIGHTNING = """
import sys
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from tests.clients.in_rank import NUM_WORKERS, RANKS, Model, Photos, num_epochs, record


class Data(L.LightningDataModule):
    def train_dataloader(self):
        generator = torch.Generator().manual_seed(1)
        return DataLoader(Photos(), batch_size=2, shuffle=True, num_workers=NUM_WORKERS, generator=generator)

    def val_dataloader(self):
        return DataLoader(Photos(7), batch_size=2, num_workers=NUM_WORKERS)

    def predict_dataloader(self):
        return DataLoader(Photos(9), batch_size=2, num_workers=NUM_WORKERS)


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.model(images), labels)

    def validation_step(self, batch, batch_idx):
        record("validation", batch)

    def predict_step(self, batch, batch_idx):
        record("predict", batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


what, state = (sys.argv[1:] + ["train", None])[:2]
L.seed_everything(1, workers=True)
trainer = L.Trainer(
    accelerator="cpu",
    strategy="ddp" if RANKS > 1 else "auto",
    devices=RANKS,
    max_epochs=num_epochs(2),
    max_steps=4 if what == "stop" else -1,
    logger=False,
    callbacks=[ModelCheckpoint(state, "state", every_n_train_steps=4)] if what == "stop" else None,
    enable_checkpointing=what == "stop",
    enable_model_summary=False,
    enable_progress_bar=False,
    num_sanity_val_steps=0,
)
model = Classifier()
trainer.fit(model, datamodule=Data(), ckpt_path=f"{state}/state.ckpt" if what == "resume" else None)
record("number of batches", int(trainer.num_training_batches))
if what == "train":
    trainer.validate(model, datamodule=Data(), verbose=False)
    trainer.predict(model, datamodule=Data(), return_predictions=False)
"""


class TestLightning(contract.Batches, contract.Ranks, contract.Resume):
    script = LIGHTNING


TRAINER = """
import sys
import torch
from transformers import Trainer, TrainingArguments

from tests.clients.in_rank import FOLDER, NUM_WORKERS, Model, Rows, num_epochs, record


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def forward(self, image, labels):
        scores = self.model(image)
        return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}


what, state = (sys.argv[1:] + ["train", None])[:2]
arguments = TrainingArguments(
    output_dir=state or str(FOLDER / "state"),
    use_cpu=True,
    per_device_train_batch_size=2,
    per_device_eval_batch_size=2,
    num_train_epochs=num_epochs(2),
    dataloader_num_workers=NUM_WORKERS,
    remove_unused_columns=False,
    save_strategy="steps" if what == "stop" else "no",
    save_steps=4,
    max_steps=4 if what == "stop" else -1,
    seed=1,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model=Classifier(), args=arguments, train_dataset=Rows(), eval_dataset=Rows(7))
record("number of batches", len(trainer.get_train_dataloader()))
trainer.train(resume_from_checkpoint=f"{state}/checkpoint-4" if what == "resume" else None)
if what == "train":
    trainer.evaluate()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""


class TestTrainer(contract.Batches, contract.Ranks, contract.Resume):
    script = TRAINER
    ways = ("patch_torch",)


TORCHDATA = """
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

    script = TORCHDATA.replace(OF_TORCHDATA, OF_TORCH)
    replacements: ClassVar[dict[str, str]] = {OF_TORCH: OF_FASTLOAD}
    ways = ("fastload",)


class TestStatefulDataLoaderItself(contract.Batches, contract.Resume):
    """It derives from fastload's loader after `patch_torch()`, and keeps its own iterators and states."""

    script = TORCHDATA
    ways = ("patch_torch",)
    num_ranks = (1,)


RAY = """
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
    script = RAY
    ways = ("fastload",)
    replacements: ClassVar[dict[str, str]] = {
        IMPORT_OF_TORCH: IMPORT_OF_FASTLOAD + "from fastload.integrations.ray import prepare\n",
        "ray.train.torch.prepare_data_loader(loader)": "prepare(loader)",
    }
