"""torchdata.nodes, in threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torchdata.nodes as tn
from common import NUM_WORKERS, Job, dataset
from torch.utils.data import RandomSampler, default_collate

if TYPE_CHECKING:
    from collections.abc import Iterable

PACKAGE = "torchdata"


class MapAndCollate:
    """Makes a batch of a list of indices."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __call__(self, indices: list[int]) -> Any:
        """Images and labels."""
        return default_collate([self._source[index] for index in indices])


def epochs(job: Job, variant: str) -> Iterable[Any]:
    """Each iteration is an epoch."""
    source = dataset(job)
    # "Migrating to torchdata.nodes from torch.utils.data": batches of indices, a mapper that makes samples
    # and collates them, a prefetcher. Worker processes, which it starts for each epoch, took 1.4 to 4 times
    # as long.
    node: Any = tn.Batcher(tn.SamplerWrapper(RandomSampler(source)), job.task.batch_size, drop_last=False)
    node = tn.ParallelMapper(
        node, MapAndCollate(source), num_workers=NUM_WORKERS, method="thread", in_order=True
    )
    return tn.Loader(tn.Prefetcher(node, prefetch_factor=2 * NUM_WORKERS))
