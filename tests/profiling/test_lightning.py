"""Lightning's loops: their loaders are watched, under the user's names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.data

import fastload
from tests.profiling import zoo


def fit(*args: Any, with_module: bool = False) -> None:
    """Two epochs of a model that learns nothing; the loader is given, or made by a data module."""
    # Not at the top of the file: its 134 MB would make each fork of the other tests' workers slower.
    L = pytest.importorskip("lightning")

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, _batch_idx: int) -> Any:
            return self.layer(batch[1].float()[:, None]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(zoo.SlowRead(), batch_size=zoo.BATCH)

    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"), False
    )
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", **quiet)
    trainer.fit(Model(), *args, datamodule=Data() if with_module else None)


@pytest.mark.thorough  # it imports Lightning
@pytest.mark.filterwarnings("ignore")  # Lightning's: few workers, deprecated functions of its own
def test_a_trainer() -> None:
    """The waits are measured, and copying to the device; the name is the user's variable."""
    training_data = torch.utils.data.DataLoader(zoo.SlowRead(), batch_size=zoo.BATCH)
    with fastload.profile() as profile:
        fit(training_data)
        fit(with_module=True)
    reports = profile.report().loaders
    found = [(report.name, report.num_epochs, report.num_batches) for report in reports]
    assert found == [("training_data", 2, 48), ("DataLoader", 2, 48)]
    assert all(report.culprit == "dataset" and "SlowRead.read" in report.bottleneck for report in reports)
    assert "copy" in reports[0].outside
