"""torch's own iterators, for what is left to them: what `iter(loader)` gives where `why_torch` has a reason.

Theirs are the workers and the transport; ours are the seeds, the memory format, and the count of batches by
which a state knows that it lies within an epoch. Such an epoch cannot be resumed in its middle.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from fastload.batch.collate import to_channels_last
from fastload.batch.loader_collate import own_collate
from fastload.epochs import resume
from fastload.rng.keyed import KeyedDataset, KeyedSampler
from fastload.rng.local_pipelines import local_pipelines
from fastload.rng.seeding import seed_worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from fastload.epochs.epoch import Epoch
    from fastload.workers.settings import LoaderSettings


def torch_iterator(loader: LoaderSettings, reason: str) -> TorchIterator:
    """Torch's iterator over the loader's batches, with our seeds and our memory format.

    Args:
        loader: Whose batches.
        reason: Why they are torch's to bring.
    """
    epoch = resume.begin(loader, "workers" if loader.num_workers else "local", reason)
    twin = copy.copy(loader)
    if loader.rng == "sample":
        place = "batch_sampler" if loader._auto_collation else "sampler"
        begun = functools.partial(_epoch_of, weakref.ref(loader))
        keys = KeyedSampler(loader._index_sampler, auto_collation=loader._auto_collation, epoch=begun)
        # Past torch's own guard: this loader is seen by its iterator alone.
        vars(twin)[place] = keys
        vars(twin)["dataset"] = KeyedDataset(loader.dataset, with_pipelines=loader.seed_pipelines)
    # What torch's loader does not know is done here: its iterator is to see the collate_fn as it is.
    vars(twin).update(rng="worker", memory_format=None, device=None, device_transform=None)
    if loader.memory_format is torch.channels_last:
        twin.collate_fn = functools.partial(_collate_channels_last, own_collate(loader.collate_fn))
    if loader.seed_pipelines and loader.num_workers > 0:
        init = loader.worker_init_fn
        twin.worker_init_fn = seed_worker if init is None else seed_worker.then(init)
    if loader.num_workers > 0:
        twin.check_worker_number_rationality()
    iterator: TorchIterator = (_TorchWorkers if loader.num_workers > 0 else _TorchLocal)(twin)
    iterator.owner = weakref.ref(loader)
    iterator.epoch = epoch
    iterator.reason = reason
    if loader.seed_pipelines and loader.num_workers == 0:
        base_seed = int(iterator._base_seed)  # type: ignore[attr-defined]  # torch's
        iterator.pipelines = local_pipelines(loader.dataset, base_seed)
    return iterator


class TorchIterator:
    """What is ours in torch's iterators: whom they belong to, and what the caller has received.

    Attributes:
        owner: The loader that the user has; torch's iterator was made for a copy of it.
        epoch: The epoch that it is in; another iterator of the loader may be in a later one.
        reason: Why the batches are torch's to bring.
        pipelines: The block in which batches are fetched here, without workers.
    """

    owner: weakref.ref[Any]
    epoch: Epoch
    reason: str
    pipelines: AbstractContextManager[None] = contextlib.nullcontext()

    def _next_data(self) -> Any:
        try:
            with self.pipelines:
                data = super()._next_data()  # type: ignore[misc]  # torch's
        except StopIteration:
            self.epoch.ended()
            raise
        except Exception:
            self.epoch.fetched(None)  # a caller who goes on after an error gets the next batch
            raise
        self.epoch.fetched(None)
        return data

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:  # the next epoch of workers that persist
            self.epoch = resume.begin(loader, "again", self.reason)
        super()._reset(loader, first_iter)  # type: ignore[misc]  # torch's

    def belongs_to(self, loader: LoaderSettings) -> bool:
        """Whether ``loader`` made this iterator."""
        return self.owner() is loader

    def close(self) -> None:
        """Stop the workers, if there are any."""
        stop: Callable[[], None] | None = getattr(self, "_shutdown_workers", None)
        if stop is not None:
            stop()


class _TorchWorkers(TorchIterator, _MultiProcessingDataLoaderIter):
    pass


class _TorchLocal(TorchIterator, _SingleProcessDataLoaderIter):
    pass


def _epoch_of(owner: weakref.ref[Any]) -> Epoch:
    return resume.current_epoch(owner())


def _collate_channels_last(collate_fn: Callable[[Any], Any], samples: Any) -> Any:
    return to_channels_last(collate_fn(samples))
