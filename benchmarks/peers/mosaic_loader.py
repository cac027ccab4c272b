"""MosaicML Streaming: its shards on the local disk, read through the page cache."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import transformers  # noqa: F401 (it looks for torchvision when it is imported, so it comes first)
from common import NUM_WORKERS, Crop, Job
from PIL import Image

if importlib.util.find_spec("torchvision") is None:
    # `import streaming` asks torchvision for two names, for datasets that are not used here. There is no
    # torchvision that agrees with torch's build for the CPU, so these modules stand in for it.
    datasets = types.ModuleType("torchvision.datasets")
    datasets.VisionDataset = object  # type: ignore[attr-defined]
    functional = types.ModuleType("torchvision.transforms.functional")
    functional.to_tensor = None  # type: ignore[attr-defined]
    sys.modules["torchvision"] = types.ModuleType("torchvision")
    sys.modules["torchvision.datasets"] = datasets
    sys.modules["torchvision.transforms"] = types.ModuleType("torchvision.transforms")
    sys.modules["torchvision.transforms.functional"] = functional

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

if TYPE_CHECKING:
    from collections.abc import Iterable

PACKAGE = "mosaicml-streaming"


def prepare(job: Job) -> None:
    """Write the shards: pixels as arrays of one shape, photographs as the bytes of their files."""
    # "Dataset Format": MDS is "most performant"; shards have the default size, as "Helpful Tips" advises.
    side = job.task.side
    columns = {"image": f"ndarray:uint8:{side},{side},3" if side else "jpeg", "label": "int"}
    images = np.load(job.images) if side else None
    with MDSWriter(out=str(job.work / "shards"), columns=columns) as writer:
        for index, label in enumerate(job.labels):
            image = Image.open(job.photos[index][0]) if images is None else images[index]
            writer.write({"image": image, "label": label})


class Images(StreamingDataset):
    """The shards as a dataset with a transform."""

    def __init__(self, job: Job) -> None:
        # "Using locally available datasets": local alone. "Is StreamingDataset's batch_size the global or
        # device batch size?": it must be given. "Shuffling": the defaults are advised.
        super().__init__(local=str(job.work / "shards"), shuffle=True, batch_size=job.task.batch_size)
        self._crop = Crop() if job.task.crops else None

    def __getitem__(self, at: Any) -> tuple[Any, int]:
        stored = super().__getitem__(at)
        image = stored["image"]
        return (image if self._crop is None else self._crop(np.asarray(image))), stored["label"]


def epochs(job: Job, variant: str) -> Iterable[Any]:
    """Each iteration is an epoch."""
    # "When training for multiple epochs, training takes a long time between epochs": persistent_workers.
    return StreamingDataLoader(
        Images(job), batch_size=job.task.batch_size, num_workers=NUM_WORKERS, persistent_workers=True
    )
