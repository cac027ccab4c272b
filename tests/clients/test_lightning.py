"""Lightning: fit, validation, predict, two ranks with `ddp`, and its own checkpoints in mid-epoch."""

from __future__ import annotations

from tests.clients import contract

SCRIPT = """
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
    script = SCRIPT
