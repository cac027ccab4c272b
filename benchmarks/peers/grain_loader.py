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
    # "Performance debugging": shuffle, then repeat, "each epoch is shuffled differently".
    samples = grain.MapDataset.source(dataset(job)).shuffle(seed=0).repeat()
    threads = NUM_WORKERS if variant == "threads" else 1
    # "Advanced Dataset usage", Multithread prefetching: threads that read elements ahead.
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * job.task.batch_size)
    batches = samples.to_iter_dataset(options).batch(job.task.batch_size)
    if variant == "processes":
        # The same page, Multiprocess Prefetch: where Python's GIL is the bottleneck.
        batches = batches.mp_prefetch(
            grain.MultiprocessingOptions(num_workers=NUM_WORKERS, per_worker_buffer_size=2)
        )
    else:
        # The same page, Thread prefetching: batches made ahead.
        batches = grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=2)
    return Epochs(batches, job.task.num_images // job.task.batch_size)
