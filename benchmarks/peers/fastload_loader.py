"""fastload: torch's loader with the import changed, and the same over a cache in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from common import NUM_WORKERS, Job, dataset, pipeline

import fastload

if TYPE_CHECKING:
    from collections.abc import Iterable

PACKAGE = "fastload-torch"


def epochs(job: Job, variant: str) -> Iterable[Any]:
    """Each iteration is an epoch."""
    source = dataset(job)
    if variant:
        transform = pipeline() if job.task.crops else None
        source.transform = None
        source = fastload.CachedDataset(source, transform=transform, cache="ram")
        source.fill(progress=False)
    workers: dict[str, Any] = {"num_workers": NUM_WORKERS, "persistent_workers": True}
    if variant == "auto":
        workers = {"num_workers": "auto"}
    return fastload.DataLoader(source, job.task.batch_size, shuffle=True, **workers)
