"""Lightning: a LightningDataModule that returns fastload's loaders, and a LightningModule to train.

    pip install lightning
    python examples/lightning_module.py [FOLDER]

FOLDER holds a folder of images for each class.
"""

from pathlib import Path
from typing import Any

import albumentations as A
import torch
from pictures import SIZE, photo_folder, small_network
from torch import nn
from torch.utils.data import Subset

import fastload

try:
    import lightning as L
except ImportError:
    raise SystemExit("This example needs Lightning: pip install lightning") from None


class Photos(L.LightningDataModule):
    """Four fifths of the images to train on, and one fifth to validate, in caches that all ranks share.

    For a cache on disk, build the file in `prepare_data`, and open it here with `CachedDataset.from_cache`.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def setup(self, stage: str) -> None:
        """Runs on every rank."""
        photos = fastload.ImageFolder(self.folder, size=SIZE)
        numbers = range(len(photos))
        train = Subset(photos, [number for number in numbers if number % 5])
        crop = A.Compose([A.RandomCrop(80, 80), A.HorizontalFlip(p=0.5)])
        self.train = fastload.CachedDataset(train, transform=crop)
        self.validation = fastload.CachedDataset(Subset(photos, numbers[::5]), transform=A.CenterCrop(80, 80))

    def train_dataloader(self) -> fastload.DataLoader:
        """Lightning adds a DistributedSampler to it where there are several ranks."""
        return self.loader(self.train, shuffle=True)

    def val_dataloader(self) -> fastload.DataLoader:
        """In order, and with the center of each image."""
        return self.loader(self.validation)

    def loader(self, dataset: fastload.CachedDataset, **arguments: Any) -> fastload.DataLoader:
        """The settings that both loaders share."""
        normalize = fastload.transforms.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
        return fastload.DataLoader(
            dataset,
            batch_size=8,
            num_workers=2,
            persistent_workers=True,
            device="auto",  # the GPU of this rank; give "cpu" if the Trainer has accelerator="cpu"
            device_transform=normalize,
            **arguments,
        )


class Classifier(L.LightningModule):
    """Your model, as for any other loader."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.model = small_network(num_classes)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """The loss of a batch, which is on the device and normalized already."""
        images, labels = batch  # (B, 3, 80, 80) float32 and (B,) int64
        return nn.functional.cross_entropy(self.model(images), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """The mean over the epoch and over the ranks."""
        images, labels = batch
        accuracy = (self.model(images).argmax(1) == labels).float().mean()
        self.log("val_accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.05)


class LogStats(L.Callback):
    """Logs what the loader counts."""

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """After each epoch: how long the loop waited for data, for example."""
        figures = trainer.train_dataloader.stats(reset=True).as_dict()
        module.log_dict({f"loader/{name}": float(value) for name, value in figures.items()})


def fit(folder: Path) -> L.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(max_epochs=2, callbacks=[LogStats()], **quiet)
    classes = fastload.ImageFolder(folder).classes
    trainer.fit(Classifier(len(classes)), datamodule=Photos(folder))
    return trainer


# --- The template ends here. The rest runs it, and reports what Lightning measured. -------------------------


def main() -> None:
    with photo_folder() as folder:
        trainer = fit(folder)
        figures = trainer.callback_metrics
        steps = f"{trainer.global_step} steps, {figures['loader/num_batches']:.0f} in the last epoch"
        print(f"lightning {L.__version__}: {steps}, validation accuracy {figures['val_accuracy']:.0%}")


if __name__ == "__main__":
    main()
