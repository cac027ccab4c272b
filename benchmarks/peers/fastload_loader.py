"""fastload: only the import changed; a cache in memory; files of which only the crop is decoded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import FLIP, NUM_WORKERS, PADDING, Job, dataset, pipeline

import fastload
from fastload import transforms

if TYPE_CHECKING:
    from collections.abc import Iterable

PACKAGE = "fastload-torch"


def epochs(job: Job, variant: str) -> Iterable[Any]:
    """Each iteration is an epoch."""
    source = dataset(job)
    batch_transform = None
    if job.task.pads and variant:
        batch_transform = [
            transforms.RandomCrop(job.task.side, PADDING),
            transforms.RandomHorizontalFlip(FLIP),
        ]
    if variant == "regions":
        folder = fastload.ImageFolder(Path(job.photos[0][0]).parents[1])
        folder.samples = job.photos  # type: ignore[assignment]
        source = fastload.CachedDataset(folder, transform=pipeline(), cache=None)
    elif variant == "batches":
        source.transform = None
    elif variant:
        transform = pipeline() if job.task.crops else None
        source.transform = None
        source = fastload.CachedDataset(source, transform=transform, cache="ram")
        source.fill(progress=False)
    return fastload.DataLoader(
        source,
        job.task.batch_size,
        shuffle=True,
        num_workers=NUM_WORKERS,
        persistent_workers=True,
        batch_transform=batch_transform,
        worker_type="thread" if variant == "threads" else "process",
    )
