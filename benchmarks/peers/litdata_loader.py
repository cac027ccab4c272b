"""LitData: its chunks on the local disk, read through the page cache.

Its own decoder of JPEGs is torchvision's, of which there is no build here that agrees with torch's for the
CPU. So photographs are stored as bytes and decoded by Pillow in the transform.
"""

from __future__ import annotations

import functools
import io
from typing import TYPE_CHECKING, Any

import litdata
import numpy as np
from common import NUM_WORKERS, Crop, Job, decoded

if TYPE_CHECKING:
    from collections.abc import Iterable

PACKAGE = "litdata"


def sample(index: int, job: Job) -> dict[str, Any]:
    """What is stored of an image."""
    if job.task.side:
        return {"image": np.load(job.images, mmap_mode="r")[index].copy(), "label": job.labels[index]}
    with open(job.photos[index][0], "rb") as file:
        return {"image": file.read(), "label": job.photos[index][1]}


def prepare(job: Job) -> None:
    """Write the chunks."""
    # "Speed up model training", Step 1: optimize() with chunks of 64 MB.
    litdata.optimize(
        fn=functools.partial(sample, job=job),
        inputs=list(range(job.task.num_images)),
        output_dir=str(job.work / "chunks"),
        chunk_bytes="64MB",
        num_workers=NUM_WORKERS,
        verbose=False,
    )


class Images(litdata.StreamingDataset):
    """The chunks as a dataset with a transform."""

    def __init__(self, job: Job) -> None:
        # "batch_decode" of StreamingDataset: 0 decodes item by item. By default items are decoded in windows,
        # and those of 100 KB in windows smaller than the blocks that are shuffled: many times each.
        super().__init__(str(job.work / "chunks"), shuffle=True, drop_last=False, batch_decode=0)
        self._crop = Crop() if job.task.crops else None
        self._of_bytes = not job.task.side

    def __getitem__(self, index: Any) -> tuple[Any, int]:
        # "Use any data transforms": a subclass overrides __getitem__.
        stored = super().__getitem__(index)
        image = decoded(io.BytesIO(stored["image"])) if self._of_bytes else stored["image"]
        return (image if self._crop is None else self._crop(image)), stored["label"]


def epochs(job: Job, variant: str) -> Iterable[Any]:
    """Each iteration is an epoch."""
    # "Speed up model training", Step 3; persistent_workers as torch's documentation has it.
    return litdata.StreamingDataLoader(
        Images(job),
        batch_size=job.task.batch_size,
        num_workers=NUM_WORKERS,
        persistent_workers=True,
    )
