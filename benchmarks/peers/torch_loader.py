"""torch.utils.data.DataLoader, sample by sample and in its bulk idiom."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from common import NUM_WORKERS, Job, dataset
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

if TYPE_CHECKING:
    from collections.abc import Iterable

PACKAGE = "torch"


class InBulk:
    """A dataset that makes whole batches from lists of indices."""

    def __init__(self, source: Any, labels: list[int]) -> None:
        self._source = source
        self._labels = torch.tensor(labels)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, indices: list[int]) -> tuple[Any, Any]:
        return torch.from_numpy(self._source.pixels[indices]), self._labels[indices]


def epochs(job: Job, variant: str) -> Iterable[Any]:
    """Each iteration is an epoch."""
    source = dataset(job)
    # "Saving and loading data: persistent_workers" of torch.utils.data: workers stay alive between epochs.
    workers: dict[str, Any] = {"num_workers": NUM_WORKERS, "persistent_workers": True}
    if variant == "bulk":
        # "Disable automatic batching", torch.utils.data: the sampler gives lists and the dataset batches.
        sampler = BatchSampler(RandomSampler(source), job.task.batch_size, drop_last=False)
        return DataLoader(InBulk(source, job.labels), batch_size=None, sampler=sampler, **workers)
    return DataLoader(source, job.task.batch_size, shuffle=True, **workers)
