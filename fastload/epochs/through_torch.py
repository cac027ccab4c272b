"""torch's own iterators, for loaders that fastload's cannot serve (see `DataLoader._why_torch`).

torch provides the workers and the transport. fastload adds its seeds, the memory format, and the count of
batches that tells whether a state is in the middle of an epoch. Such an epoch cannot be resumed in the
middle.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import weakref
from typing import TYPE_CHECKING, Any

import torch

from fastload.augmentation import ends
from fastload.batch.collate import to_channels_last
from fastload.batch.loader_collate import own_collate
from fastload.batch.packing import nbytes_of
from fastload.device.stream_prefetcher import apply_transform
from fastload.epochs.iterator import EpochIterator
from fastload.epochs.loader_state import file_cache_of
from fastload.epochs.position import Position
from fastload.epochs.transform import EpochTransform
from fastload.rng.entry_points import THREAD, Streams
from fastload.rng.seeding import local_streams, seed_worker
from fastload.system import torch_private

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from fastload.cache.file_cache import FileCache
    from fastload.epochs.stats import Size
    from fastload.rng.seeding import WorkerStreams
    from fastload.workers.settings import LoaderSettings


def torch_iterator(loader: LoaderSettings, reason: str, *, pins: bool = False) -> TorchIterator:
    """Torch's iterator over the loader's batches, with fastload's seeds and memory format.

    Args:
        loader: The loader to iterate over.
        reason: Why it must use torch's iterator.
        pins: Whether batches come in pinned memory even without `pin_memory`; torch's thread copies them.
    """
    position = Position.begin(loader, "workers" if loader.num_workers else "local", reason)
    twin, is_batch = copy.copy(loader), torch_private.has_auto_collation(loader)
    # fastload's own arguments are applied here, so torch's iterator sees the plain collate_fn.
    vars(twin).update(memory_format=None, device=None, batch_transform=None, device_transform=None)
    if pins:
        vars(twin)["pin_memory"] = True
    channels_last = loader.memory_format is torch.channels_last
    own = own_collate(loader.collate_fn)
    twin.collate_fn = functools.partial(_collate, own, is_batch, channels_last)
    if loader.seeding != "torch" and loader.num_workers > 0:
        init = loader.worker_init_fn
        twin.worker_init_fn = seed_worker if init is None else seed_worker.then(init)
    file_cache = file_cache_of(loader)
    if file_cache is not None and loader.num_workers > 0:
        twin.worker_init_fn = _Remembering(file_cache, twin.worker_init_fn)
    if loader.num_workers > 0:
        twin.check_worker_number_rationality()
    iterator: TorchIterator = (_TorchWorkers if loader.num_workers > 0 else _TorchLocal)(twin)
    iterator.owner = weakref.ref(loader)
    iterator.position = position
    base_seed = position.base_seed = int(iterator._base_seed)  # type: ignore[attr-defined]  # torch's
    iterator.reason = reason
    iterator.file_cache = file_cache
    if file_cache is not None and loader.num_workers == 0:
        iterator.reading = file_cache.reading
    iterator.begin_transform()
    if loader.seeding != "torch" and loader.num_workers == 0:
        iterator.streams = local_streams(base_seed)
    return iterator


class TorchIterator(EpochIterator):
    """fastload's part of torch's iterators: the batches that the caller has received.

    Attributes:
        reason: Why the loader must use torch's iterator.
        file_cache: What the loader's `cache` is.
        reading: Makes what samples are read in, without workers.
        streams: What albumentations draws from in this process, without workers.
        transform: The loader's `batch_transform`, which is applied in this process.
    """

    reason: str
    streams: WorkerStreams | None = None
    transform: EpochTransform | None = None
    file_cache: FileCache | None = None
    reading: Callable[[], AbstractContextManager[None] | None] = staticmethod(ends.met)

    def begin_transform(self) -> None:
        """Take the loader's `batch_transform` for this epoch."""
        loader = self.owner()
        if loader is not None and loader.batch_transform is not None:
            self.transform = EpochTransform(loader, self.position, "batch_transform")

    def _next_data(self) -> Any:
        if self.file_cache is not None:
            self.file_cache.poll()
        outside = THREAD.streams
        try:
            if self.streams is not None:
                THREAD.streams = Streams(self.streams)
            with self.reading() or contextlib.nullcontext():
                num_samples, data = super()._next_data()  # type: ignore[misc]  # torch's
        except StopIteration:
            self.position.has_ended = True
            raise
        except Exception:
            self._fetched()  # a caller who continues after an error gets the next batch
            raise
        finally:
            # First, and without a call: signals interrupt calls.
            THREAD.streams = outside
        self._fetched()
        if self.transform is not None:
            transform, cpu = self.transform.of_fetched(), torch.device("cpu")
            data = apply_transform(transform, data, cpu, "batch_transform")
        return data, (num_samples, nbytes_of(data))

    def _fetched(self) -> None:
        is_in_order = getattr(self, "_in_order", True)  # torch's
        self.position.fetched(None, number=self.position.num_fetched if is_in_order else None)

    def next_sized(self) -> tuple[Any, Size]:
        """The next batch and its size."""
        batch_and_size: tuple[Any, Size] = super(EpochIterator, self).__next__()  # type: ignore[misc]  # torch's
        return batch_and_size

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:  # the next epoch of persistent workers
            self.position = Position.begin(loader, "again", self.reason)
            self.position.base_seed = int(self._base_seed)  # type: ignore[attr-defined]  # torch's
            self.begin_transform()
        super()._reset(loader, first_iter)  # type: ignore[misc]  # torch's

    def close(self) -> None:
        """Stop the workers, if there are any."""
        stop: Callable[[], None] | None = getattr(self, "_shutdown_workers", None)
        if stop is not None:
            stop()


class _Remembering:
    """A `worker_init_fn` after which files are remembered."""

    def __init__(self, file_cache: FileCache, init: Callable[[int], Any] | None) -> None:
        self._file_cache = file_cache
        self._init = init

    def __call__(self, worker_id: int) -> None:
        if self._init is not None:
            self._init(worker_id)
        self._file_cache.read_for_good()


class _TorchWorkers(TorchIterator, torch_private.MultiProcessingDataLoaderIter):
    _shutdown = True  # torch's: until there is something to stop, or its __del__ would fail after an error


class _TorchLocal(TorchIterator, torch_private.SingleProcessDataLoaderIter):
    pass


def _collate(
    collate_fn: Callable[[Any], Any], is_batch: bool, channels_last: bool, samples: Any
) -> tuple[int, Any]:
    """How many samples a batch has, and the batch."""
    batch = collate_fn(samples)
    num_samples = operator.length_hint(samples) if is_batch else 1
    return num_samples, to_channels_last(batch) if channels_last else batch
