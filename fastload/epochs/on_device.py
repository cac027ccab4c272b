"""The iterator of a DataLoader with `device=`: it returns batches on the device, already transformed.

Runs in the consumer's process, and wraps the iterator over batches on the host. On a GPU, batches are copied
and transformed `DEPTH` ahead of the caller (`stream_prefetcher`). On the CPU they are transformed when the
caller asks for them. The random numbers of a transform depend on the batch (rng/batch_draws.py), whenever it
runs.
"""

from __future__ import annotations

import collections
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from fastload.device.devices import choose_backend
from fastload.device.stream_prefetcher import StreamPrefetcher, apply_transform
from fastload.epochs.iterator import EpochIterator
from fastload.epochs.runtime import runtime_of
from fastload.errors import LoaderClosedError
from fastload.nested.tree import map_device_leaves
from fastload.rng.batch_draws import AFTER_BATCH_TRANSFORM, BatchDraws, drawing_from
from fastload.system.torch_private import has_auto_collation, is_compiled
from fastload.transforms.compose import compose

if TYPE_CHECKING:
    from fastload.device.devices import Backend
    from fastload.epochs.position import Position
    from fastload.rng.keys import BatchKey

DEPTH = 2


def choose_device(loader: Any) -> tuple[Backend, Any] | None:
    """The backend and copy stream of this loader; None for the CPU.

    Raises:
        DeviceUnavailableError: CUDA was requested by name and is not available.
    """
    copy_streams, name = runtime_of(loader).copy_streams, str(loader.device)
    if name not in copy_streams:
        backend = choose_backend(loader.device, "DataLoader")
        if backend is None:
            return None
        # One stream for the life of the loader: torch's allocator reuses memory within a stream only.
        copy_streams[name] = (backend, backend.make_stream())
    return copy_streams[name]


class DeviceIterator(EpochIterator, Iterator[Any]):
    """The iterator of a loader with `device=`, for one epoch, or for several with persistent workers.

    Args:
        loader: The loader, with its device and transform.
        host_iterator: Returns the loader's batches on the host.
        device: The result of `choose_device`.

    Attributes:
        host_iterator: As given.
    """

    def __init__(self, loader: Any, host_iterator: Any, device: tuple[Backend, Any] | None) -> None:
        self.owner = weakref.ref(loader)
        self.host_iterator = host_iterator
        self.num_workers = host_iterator.num_workers
        self._device = device
        self._is_closed = False
        self._waited_ns = 0  # of earlier epochs
        self._prefetcher: StreamPrefetcher[Any] | None = None
        self.turn = threading.RLock()  # threads can share the iterator
        self._begin(loader)

    def _begin(self, loader: Any) -> None:
        self.position = position = self.host_iterator.position
        self._transform: EpochTransform | None = None
        if loader.device_transform is not None:
            self._transform = EpochTransform(loader, self.host_iterator)
        if self._device is not None:
            self._ahead = ahead = _FetchedAhead(self.host_iterator, position)
            next_transform = None if self._transform is None else self._transform.of_fetched
            self._prefetcher = StreamPrefetcher(
                ahead, *self._device, DEPTH, next_transform, ahead.hand_over, ahead.poll
            )

    @property
    def device_wait_ns(self) -> int:  # type: ignore[override]  # an attribute costs the other iterators less
        """How long `next` has waited for the device to catch up, not for data, so far."""
        prefetcher = self._prefetcher
        return self._waited_ns + (0 if prefetcher is None else prefetcher.device_wait_ns)

    def next_sized(self) -> tuple[Any, int]:
        """The next batch and how many samples it has."""
        with self.turn:
            if self._is_closed:
                raise LoaderClosedError
            if self._prefetcher is not None:
                return next(self._prefetcher), self._ahead.num_samples
            batch, num_samples = self.host_iterator.next_sized()
            if self._transform is not None:
                batch = apply_transform(self._transform.of_fetched(), batch, torch.device("cpu"))
            return batch, num_samples

    @property
    def num_taken(self) -> int | None:  # type: ignore[override]  # as above
        """How many batches of the epoch the caller has with the one that `next_sized` returned last."""
        return None if self._prefetcher is None else self._ahead.num_taken

    def __len__(self) -> int:
        return len(self.host_iterator)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin the next epoch; torch's loader calls this with persistent workers."""
        self.host_iterator._reset(loader, first_iter)  # if it fails, the old epoch continues
        self._end_prefetching()
        self._begin(loader)

    def _end_prefetching(self) -> None:
        """Drop the batches that were copied ahead, and free their slots."""
        self._waited_ns = self.device_wait_ns
        self._prefetcher = None

    @property
    def _workers(self) -> Any:
        return self.host_iterator._workers  # as in torch, an iterator without workers has no such attribute

    def close(self) -> None:
        """Stop prefetching and close the iterator on the host; batches that the caller holds stay valid."""
        self._is_closed = True
        self._end_prefetching()
        self.host_iterator.close()

    _shutdown_workers = close  # other libraries stop torch's iterator by this method


class _FetchedAhead(Iterator[Any]):
    """Batches on the host, with what the loader counts when the caller takes them.

    Attributes:
        num_samples: Of the batch that the caller took last.
        num_taken: How many batches the caller has with it.
    """

    def __init__(self, host_iterator: Any, position: Position) -> None:
        self._host = host_iterator
        self.position = position
        # For each fetched batch or error: how many batches the caller will have received with it; samples.
        self._marks: collections.deque[tuple[int, int]] = collections.deque()
        self.num_samples = self.num_taken = 0
        self.register_slots = getattr(host_iterator, "register_slots", None)

    def __next__(self) -> Any:
        return self._marked(self._host.next_sized)[0]

    def poll(self) -> tuple[Any] | None:
        """The next batch in a tuple; None if it would have to be waited for."""
        batch: tuple[Any] | None = self._marked(self._host.poll_sized)
        return batch

    def _marked(self, fetch: Callable[[], Any]) -> Any:
        try:
            batch_and_size = fetch()
        except Exception as error:
            if not isinstance(error, StopIteration):
                self._marks.append((self.position.num_fetched, 0))
            raise
        if batch_and_size is None:
            return None
        self._marks.append((self.position.num_fetched, batch_and_size[1]))
        return batch_and_size[:1]

    def hand_over(self) -> None:
        """Go to the next fetched batch or error, which the caller takes now."""
        self.num_taken, self.num_samples = self._marks.popleft()


class EpochTransform:
    """A loader's `device_transform` in one epoch.

    Args:
        loader: The loader.
        host_iterator: Fetches its batches.
    """

    def __init__(self, loader: Any, host_iterator: Any) -> None:
        function = loader.device_transform
        self._function = compose(function)
        self._clones = any(map(is_compiled, function if isinstance(function, (list, tuple)) else [function]))
        self._host = host_iterator
        self._auto_collation = has_auto_collation(loader)
        self._first_call = 0 if loader.batch_transform is None else AFTER_BATCH_TRANSFORM

    def of_fetched(self) -> Callable[[Any], Any]:
        """The transform of the last fetched batch."""
        last = self._host.last
        key = last.key or self._host.position.batch_key(last.number)
        return functools.partial(self._call, key, last.index if self._auto_collation else (last.index,))

    def _call(self, key: BatchKey, indices: Any, batch: Any) -> Any:
        # New draws for each call: a batch that found no memory on the device is transformed again.
        with drawing_from(BatchDraws(key, indices, first_call=self._first_call)):
            transformed = self._function(batch)
        # With CUDA graphs, a compiled function overwrites its last outputs, and batches wait for the caller.
        return map_device_leaves(transformed, _cloned) if self._clones else transformed


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.is_cuda else leaf
