"""`prepare_data_loader` of Ray Train for fastload's loaders, without `fastload.patch_torch()`.

`DataLoader(worker_type="ray")` needs nothing from here: its workers are actors of the same job (see
`workers.ray_pool`). In a Ray Train worker, both go together. The trainer's placement group has no CPUs for
these actors, so the cluster needs further ones, or `fastload.RayWorkers` a placement group of its own.

Importing this file imports Ray Train.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray.train.torch

from fastload.epochs.resume import progress_of
from fastload.integrations.prepared import check_loader, loader_in_place_of

if TYPE_CHECKING:
    import fastload.loader

__all__ = ["prepare"]

_CALLER = "fastload.integrations.ray.prepare()"


def __dir__() -> list[str]:
    return __all__


def prepare(
    loader: fastload.loader.DataLoader, *, add_dist_sampler: bool = True, move_to_device: bool = True
) -> fastload.loader.DataLoader:
    """Like ``ray.train.torch.prepare_data_loader(loader)``, but the result keeps all arguments.

    Ray gives the loader a `DistributedSampler` if there is more than one Ray worker. Call it in the training
    function.

    Args:
        loader: The loader. It stays unchanged; do not iterate over it.
        add_dist_sampler: As in Ray.
        move_to_device: Whether batches arrive on this worker's device. On a GPU, fastload prefetches two
            batches on a side stream, where Ray's `auto_transfer` prefetches one.

    Returns:
        A new `fastload.DataLoader`. Its ``set_epoch()`` reaches the sampler, too.

    Raises:
        TypeError: ``loader`` is not a `fastload.DataLoader`.
        ValueError: A state was loaded into the loader before; or the loader has a ``device`` other than this
            worker's.
    """
    check_loader(loader, _CALLER)
    built: Any = ray.train.torch.prepare_data_loader(
        loader, add_dist_sampler=add_dist_sampler, move_to_device=False
    )
    device = ray.train.torch.get_device() if move_to_device else None
    prepared = loader_in_place_of(built, loader, device)
    if device is not None and device.type != "cpu":
        prepared.device = device
    progress = progress_of(loader)
    if progress.has_set_epoch:
        prepared.set_epoch(progress.next_number)
    return prepared
