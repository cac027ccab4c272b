"""Clients that train: Accelerate, Lightning, transformers' Trainer, torchdata and Ray Train."""

from __future__ import annotations

from typing import ClassVar

from tests.clients import contract
from tests.clients.harness import IMPORT_OF_FASTLOAD, IMPORT_OF_TORCH

# What a script is called with; it stops after 4 steps.
ARGUMENTS = """
import sys
what, state = (sys.argv[1:] + ["train", None])[:2]
"""


class TestAccelerate(contract.Batches, contract.Ranks, contract.Resume):
    script = f"""{ARGUMENTS}
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

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
for epoch in range(num_epochs(1 if what == "stop" else 2)):
    loader.set_epoch(epoch)
    batches = loader
    if what == "resume" and epoch == 0:
        batches = accelerator.skip_first_batches(loader, 4)
    for number, (images, labels) in enumerate(batches, 1):
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.cross_entropy(model(images), labels))
        optimizer.step()
        if what == "stop" and number == 4:
            accelerator.save_state(state)
            break
accelerator.end_training()
"""
    replacements: ClassVar[dict[str, str]] = {
        IMPORT_OF_TORCH: f"{IMPORT_OF_FASTLOAD}import fastload\nfastload.patch_torch()\n"
    }


class TestLightning(contract.Batches, contract.Ranks, contract.Resume):
    # Lightning's ranks wait for each other for ever in one of eight runs, with torch's loader, too.
    test_sigterm_ends_both_ranks = None

    script = f"""{ARGUMENTS}
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader


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


L.seed_everything(1, workers=True)
is_stopped = what == "stop"
trainer = L.Trainer(
    accelerator="cpu",
    strategy="ddp" if RANKS > 1 else "auto",
    devices=RANKS,
    max_epochs=num_epochs(2),
    max_steps=4 if is_stopped else -1,
    callbacks=[ModelCheckpoint(state, "state", every_n_train_steps=4)] if is_stopped else None,
    enable_checkpointing=is_stopped,
    logger=False,
    enable_model_summary=False,
    enable_progress_bar=False,
    num_sanity_val_steps=0,
)
model = Classifier()
trainer.fit(model, datamodule=Data(), ckpt_path=state + "/state.ckpt" if what == "resume" else None)
record("number of batches", int(trainer.num_training_batches))
if what == "train":
    trainer.validate(model, datamodule=Data(), verbose=False)
    trainer.predict(model, datamodule=Data(), return_predictions=False)
"""


class TestLightningAfterTheLastBatch(contract.Resume):
    """Its first run stops, and saves, after the last batch of the first epoch."""

    num_ranks = (1,)
    script = TestLightning.script.replace("4 if is_stopped", "12 if is_stopped").replace(
        "steps=4", "steps=12"
    )


class TestTrainer(contract.Batches, contract.Ranks, contract.Resume):
    script = f"""{ARGUMENTS}
from transformers import Trainer, TrainingArguments

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
trainer.train(resume_from_checkpoint=state + "/checkpoint-4" if what == "resume" else None)
if what == "train":
    trainer.evaluate()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""
    ways = ("patch_torch",)


class TestStatefulDataLoaderItself(contract.Batches, contract.Resume):
    """It derives from fastload's loader after `patch_torch()`, and keeps its own iterators and states."""

    script = f"""{ARGUMENTS}
from torchdata.stateful_dataloader import StatefulDataLoader as DataLoader

torch.manual_seed(1)
with training() as step:
    sampler = sampler_of_ranks()
    loader = DataLoader(
        Photos(),
        batch_size=2,
        shuffle=sampler is None,
        sampler=sampler,
        num_workers=NUM_WORKERS,
        generator=torch.Generator().manual_seed(1),
    )
    record("number of batches", len(loader))
    file = "%s-%d.pt" % (state, RANK)
    if what == "resume":
        loader.load_state_dict(torch.load(file, weights_only=False))
    for epoch in range(num_epochs(1)):
        if sampler is not None and what != "resume":
            sampler.set_epoch(epoch)
        for number, (images, labels) in enumerate(loader, 1):
            step(images, labels)
            if what == "stop" and number == 4:
                torch.save(loader.state_dict(), file)
                break
"""
    ways = ("patch_torch",)
    num_ranks = (1,)


class TestInThePlaceOfStatefulDataLoader(contract.Batches, contract.Ranks, contract.Resume):
    """Batches are those of torch's loader; torchdata's shuffles and seeds its workers in another way."""

    script = TestStatefulDataLoaderItself.script.replace(
        "torchdata.stateful_dataloader import StatefulDataLoader as", "torch.utils.data import"
    )
    ways = ("fastload",)


class TestRay(contract.Batches):
    script = """
import ray.train
import ray.train.torch
from torch.utils.data import DataLoader


def train():
    torch.manual_seed(1)
    loader = DataLoader(Photos(), batch_size=2, shuffle=True, num_workers=NUM_WORKERS)
    loader = ray.train.torch.prepare_data_loader(loader)
    with open(FOLDER / f"digests-{ray.train.get_context().get_world_rank()}", "w") as file:
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            for batch in loader:
                print(len(loader), digest(batch), file=file)


if __name__ == "__main__":
    run_in_ray_train(train)
    for rank in range(2):
        record("train", (FOLDER / f"digests-{rank}").read_text())
"""
    ways = ("fastload",)
    replacements: ClassVar[dict[str, str]] = {
        IMPORT_OF_TORCH: f"{IMPORT_OF_FASTLOAD}import fastload\n",
        "def train():\n": "def train():\n    fastload.patch_torch()\n",
    }
