"""The iterator of a DataLoader with `device=`: it returns batches on the device, already transformed.

Runs in the consumer's process, and wraps the iterator that brings the batches to the host. Rules:

1. On a GPU, batches are copied and transformed `DEPTH` ahead of the caller (device/copies.py). On other
   devices they are moved and transformed when the caller asks for them.
2. `state_dict()` counts the batches that the caller received, not those copied ahead.
3. The random numbers of a transform follow from the batch (rng/batch_draws.py), at whatever time it runs.
4. A loader has one copy stream on each device for its whole life. The stream is kept here and not in the
   loader, because frameworks copy a loader's attributes.
"""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from fastload.device.augment import chained
from fastload.device.copies import CopiesAhead, apply_transform
from fastload.device.cuda import choose_backend
from fastload.device.streamless import StreamlessDevice
from fastload.epochs import resume
from fastload.epochs.order import rank_of
from fastload.epochs.stats import MeasuredIterator
from fastload.errors import LoaderClosedError
from fastload.rng.batch_draws import BatchStreams, drawing_from

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.batch.iterable_state import IterableState
    from fastload.device.cuda import Backend
    from fastload.epochs.epoch import Epoch
    from fastload.workers.settings import LoaderSettings

DEPTH = 2

_backends: weakref.WeakKeyDictionary[Any, dict[str, tuple[Backend, Any]]] = weakref.WeakKeyDictionary()


def choose_device(loader: LoaderSettings) -> tuple[Backend, Any] | StreamlessDevice | None:
    """The backend and copy stream of this loader, or a device without copies ahead; None for the CPU.

    Raises:
        DeviceUnavailableError: CUDA was requested by name and is not available.
    """
    known = _backends.setdefault(loader, {})
    name = str(loader.device)
    if name not in known:
        backend = choose_backend(loader.device, "DataLoader")  # type: ignore[arg-type]  # not None here
        if backend is None or isinstance(backend, StreamlessDevice):
            return backend
        known[name] = (backend, backend.make_stream())
    return known[name]


class DeviceIterator(MeasuredIterator, Iterator[Any]):
    """The iterator of a loader with `device=`, for one epoch, or for several with persistent workers.

    Args:
        loader: The loader, with its device and transform.
        source: Returns the loader's batches on the host.
        device: The result of `choose_device`.

    Attributes:
        source: As given.
    """

    def __init__(
        self, loader: LoaderSettings, source: Any, device: tuple[Backend, Any] | StreamlessDevice | None
    ) -> None:
        super().__init__()
        self._loader = weakref.ref(loader)
        self.source = source
        self.num_measured_workers = source.num_measured_workers
        self._device = device
        self._batches: Iterator[Any] | None = None
        self._counted: _Counted | None = None
        self._epoch: Epoch | None = None
        self._begin(loader)

    def _begin(self, loader: LoaderSettings) -> None:
        epoch = resume.current_epoch(loader)
        transform = None if loader.device_transform is None else _Transform(loader, epoch)
        self._epoch = self._counted = None
        if self._device is None or isinstance(self._device, StreamlessDevice):
            self._batches = self.source
            device = torch.device("cpu")
            if self._device is not None:
                device = self._device.device
                self._batches = map(self._device.move, self._batches)
            if transform is not None:
                transformed = functools.partial(_transform_now, transform, device)
                self._batches = map(transformed, self._batches)
            return
        self._epoch = epoch
        counted = self._counted = _Counted(self.source, self._epoch)
        next_transform = None if transform is None else transform.of_fetched
        self._batches = CopiesAhead(counted, *self._device, DEPTH, next_transform, counted.hand_over)

    def _next(self) -> Any:
        if self._batches is None:
            raise LoaderClosedError
        try:
            batch = next(self._batches)
        except StopIteration:
            if self._epoch is not None:
                self._epoch.position.is_finished = True
            raise
        self.sizes.append(self._counted.taken_size if self._counted is not None else self.source.sizes.pop())
        return batch

    def __len__(self) -> int:
        return len(self.source)

    def _reset(self, loader: LoaderSettings, first_iter: bool = False) -> None:
        """Begin the next epoch; torch's loader calls this with persistent workers."""
        self._batches = None  # ends the copies of the old epoch and frees its slots
        self.source._reset(loader, first_iter)
        self._begin(loader)

    def belongs_to(self, loader: LoaderSettings) -> bool:
        """Whether ``loader`` made this iterator."""
        return self._loader() is loader

    @property
    def _workers(self) -> Any:
        return self.source._workers  # as in torch, an iterator without workers has no such attribute

    def close(self) -> None:
        """End the copies ahead and close the source; batches that the caller holds stay valid."""
        self._batches = None
        self._shutdown_workers()

    def _shutdown_workers(self) -> None:
        self.source.close()


class _Transform:
    """A loader's `device_transform` in one epoch, and the random streams of each batch."""

    def __init__(self, loader: LoaderSettings, epoch: Epoch) -> None:
        given = loader.device_transform
        self._function: Any = chained(given) if isinstance(given, (list, tuple)) else given
        self._epoch = epoch
        self._auto_collation = loader._auto_collation
        # With in_order=False, the batches of torch's workers come in another order than their indices.
        is_in_order = loader.in_order or loader.num_workers == 0
        self._is_of_samples = loader.rng == "sample" and is_in_order
        self._rank = 0 if self._is_of_samples else rank_of(loader) or 0

    def of_fetched(self) -> Callable[[Any], Any]:
        """The transform of the batch that was fetched last."""
        epoch = self._epoch
        if self._is_of_samples:
            if epoch.fetched_origin is None:
                raise AssertionError('the epoch of a loader with rng="sample" counts its indices')
            index, origin = epoch.fetched_origin
            streams = BatchStreams.of_samples(origin, index if self._auto_collation else (index,))
        else:
            position, number = epoch.position, epoch.num_fetched - 1
            streams = BatchStreams.of_batch(position.base_seed, position.epoch, self._rank, number)
        return functools.partial(self._call, streams)

    def _call(self, streams: BatchStreams, batch: Any) -> Any:
        with drawing_from(streams):
            return self._function(batch)


def _transform_now(transform: _Transform, device: torch.device, batch: Any) -> Any:
    return apply_transform(transform.of_fetched(), batch, device)


class _Counted(Iterator[Any]):
    """A source of batches that the loader's state counts only when the caller takes them.

    Attributes:
        taken_size: The size of the batch that the caller took last, as in `MeasuredIterator.sizes`.
    """

    def __init__(self, source: Any, epoch: Epoch) -> None:
        self._source = source
        self._epoch = epoch
        # For each fetched batch or error: how many batches the caller will have received with it; its size.
        self._marks: collections.deque[tuple[int, tuple[int, int | None]]] = collections.deque()
        self.taken_size: tuple[int, int | None] = (0, 0)
        self.register_slots = getattr(source, "register_slots", None)
        self._waiting: collections.deque[tuple[Any, int, IterableState | None]] = collections.deque()
        epoch.ahead = self._waiting

    def __next__(self) -> Any:
        try:
            batch = next(self._source)
        except StopIteration:
            raise
        except Exception:
            self._mark((0, 0))
            raise
        self._mark(self._source.sizes.pop())
        return batch

    def _mark(self, size: tuple[int, int | None]) -> None:
        self._marks.append((self._epoch.position.num_received + len(self._waiting), size))

    def hand_over(self) -> None:
        """Count the next fetched batch or error, which the caller takes now."""
        mark, self.taken_size = self._marks.popleft()
        while self._epoch.position.num_received < mark:
            self._epoch.received(*self._waiting.popleft())
