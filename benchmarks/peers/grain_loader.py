"""Grain: its Dataset API, with reading threads or with worker processes."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import grain
import numpy as np
import torch
from common import NUM_WORKERS, Job, dataset

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PACKAGE = "grain"


class Epochs:
    """Each iteration is an epoch of one endless iterator."""

    def __init__(self, batches: Any, num_batches: int) -> None:
        self._batches = iter(batches)
        self._num_batches = num_batches

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for images, labels in itertools.islice(self._batches, self._num_batches):
            yield torch.from_numpy(np.asarray(images)), torch.from_numpy(np.asarray(labels))


def epochs(job: Job, variant: str) -> Iterable[Any]:
    """Each iteration is an epoch."""
    # "How to use a Torchvision dataset in the Grain pipeline": a dataset of torch's kind is a source.
    # "Dataset Basics": shuffle and batch of MapDataset, so threads read whole batches. "Performance
    # debugging": shuffle comes before repeat, so "each epoch is shuffled differently".
    source = grain.MapDataset.source(dataset(job))
    batches = source.shuffle(seed=0).repeat().batch(job.task.batch_size)
    if variant == "processes":
        # "Advanced Dataset usage", Multiprocess Prefetch: where Python's GIL is the bottleneck.
        one_by_one = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        options = grain.MultiprocessingOptions(num_workers=NUM_WORKERS, per_worker_buffer_size=2)
        prefetched = batches.to_iter_dataset(one_by_one).mp_prefetch(options)
    else:
        # The same page, Multithread prefetching.
        ahead = grain.ReadOptions(num_threads=NUM_WORKERS, prefetch_buffer_size=2 * NUM_WORKERS)
        prefetched = batches.to_iter_dataset(ahead)
    return Epochs(prefetched, job.task.num_images // job.task.batch_size)
