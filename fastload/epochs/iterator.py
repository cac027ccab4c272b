"""The base classes of all iterators over an epoch."""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import TYPE_CHECKING, Any

from fastload.system.torch_private import BaseDataLoaderIter, needs_torch_next

if TYPE_CHECKING:
    from fastload.epochs.position import Position
    from fastload.epochs.stats import Clock, Size
    from fastload.workers.settings import LoaderSettings


class EpochIterator:
    """The base of all iterators.

    Attributes:
        owner: The loader that made it; not kept alive.
        position: Of the epoch. Only `__next__` counts batches as received, so an iterator around this one
            counts them instead.
        turn: Held by the one thread that takes and counts batches.
        clock: Measures the epoch; None: an iterator around this one measures.
        num_measured_workers: The number of workers; None: they do not report how busy they are.
        device_wait_ns: How long `next` has waited for the device to catch up, not for data, so far.
    """

    owner: weakref.ref[LoaderSettings]
    position: Position
    turn: Any = contextlib.nullcontext()  # an RLock where threads can share the iterator
    clock: Clock | None = None
    num_measured_workers: int | None = None
    device_wait_ns: int = 0

    def next_sized(self) -> tuple[Any, Size]:
        """The next batch and its size."""
        raise NotImplementedError

    def poll_sized(self) -> tuple[Any, Size] | None:
        """As `next_sized`; None if the batch would have to be waited for, where the iterator can tell."""
        return self.next_sized()

    @property
    def num_taken(self) -> int:
        """How many batches of the epoch the caller has with the one that `next_sized` returned last."""
        return self.position.num_fetched

    def __next__(self) -> Any:
        clock = self.clock
        called_ns, before_ns = time.perf_counter_ns(), self.device_wait_ns
        try:
            batch, size = self.next_sized()
        except StopIteration:
            if clock is not None:
                clock.end(called_ns, self.device_wait_ns - before_ns)
            with self.turn:
                self.position.receive_end()
            raise
        except BaseException:
            if clock is not None:
                clock.count(called_ns, None, self.device_wait_ns - before_ns)
            raise
        if clock is not None:
            clock.count(called_ns, size, self.device_wait_ns - before_ns)
        with self.turn:  # comes last: a batch counts if nothing can keep it from the caller any more
            self.position.receive_until(self.num_taken)
        return batch

    def close(self) -> None:
        """Stop the workers and free the memory; batches that the caller holds stay valid."""


class HostIterator(EpochIterator, BaseDataLoaderIter):
    """The base of the iterators with and without workers: torch's, minus 5 us per batch.

    torch's `__next__` labels each batch in the profile; this one does so only while a profiler is on.
    """

    def __init__(self, loader: LoaderSettings) -> None:
        super().__init__(loader)
        self.owner = weakref.ref(loader)
        self.num_measured_workers = self._num_workers

    def next_sized(self) -> tuple[Any, Size]:
        """The next batch and its size."""
        if needs_torch_next(self):
            batch_and_size: tuple[Any, Size] = super(EpochIterator, self).__next__()
            return batch_and_size
        batch_and_size = self._next_data()
        self._num_yielded += 1
        return batch_and_size
