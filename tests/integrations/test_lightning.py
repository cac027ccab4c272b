"""Lightning's Trainer under `install()`, with the release that the tests are pinned to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow  # it imports Lightning

PROGRAM = """
import hashlib, logging, warnings

import lightning as L
import torch
from torch.utils.data import DataLoader

import fastload

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.digest = hashlib.sha256()

    def training_step(self, batch, _):
        self.digest.update(batch.numpy().tobytes())
        return self.layer(batch).pow(2).mean()

    def predict_step(self, batch, _):
        return batch.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.arange(40.0).reshape(10, 4), 2, shuffle=True)

    def predict_dataloader(self):  # Lightning builds this one again
        return DataLoader(torch.arange(40.0).reshape(10, 4), batch_size=2)


def run():
    L.seed_everything(1, verbose=False)
    quiet = {name: False for name in ("logger", "enable_progress_bar", "enable_model_summary")}
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", enable_checkpointing=False, **quiet)
    model = Model()
    trainer.fit(model)
    loaders = [trainer.train_dataloader]
    predicted = [float(total) for total in trainer.predict(model)]
    loaders.append(trainer.predict_dataloaders)
    return (model.digest.hexdigest(), predicted), [getattr(loader, "rng", None) for loader in loaders]


results = []
for defaults in (None, {}, {"rng": "sample"}):
    if defaults is not None:
        fastload.install(**defaults)
    result, rngs = run()
    fastload.uninstall()
    results.append(result)
    print(*rngs)
print(results[0] == results[1] == results[2])
"""


def test_the_trainer_gets_the_batches_of_torch_from_our_loader() -> None:
    """Stock loaders are ours, also the one that Lightning builds again, which keeps the defaults."""
    pytest.importorskip("lightning")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["None None", "worker worker", "sample sample", "True"]
