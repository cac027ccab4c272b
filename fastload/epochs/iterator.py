"""The base classes of all iterators over an epoch."""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any

from fastload.system.torch_private import BaseDataLoaderIter, needs_torch_next

if TYPE_CHECKING:
    from fastload.epochs.stats import Clock, Size
    from fastload.workers.settings import LoaderSettings


class EpochIterator:
    """The base of all iterators.

    Attributes:
        owner: The loader that made it; not kept alive.
        clock: Measures the epoch; None: an iterator around this one measures.
        num_measured_workers: The number of workers; None: they do not report how busy they are.
        device_wait_ns: How long `next` has waited for the device to catch up, not for data, so far.
    """

    owner: weakref.ref[LoaderSettings]
    clock: Clock | None = None
    num_measured_workers: int | None = None
    device_wait_ns: int = 0

    def next_sized(self) -> tuple[Any, Size]:
        """The next batch and its size."""
        raise NotImplementedError

    def poll_sized(self) -> tuple[Any, Size] | None:
        """As `next_sized`; None if the batch would have to be waited for, where the iterator can tell."""
        return self.next_sized()

    def __next__(self) -> Any:
        clock = self.clock
        if clock is None:
            return self.next_sized()[0]
        called_ns, before_ns = time.perf_counter_ns(), self.device_wait_ns
        try:
            batch, size = self.next_sized()
        except StopIteration:
            clock.end(called_ns, self.device_wait_ns - before_ns)
            raise
        except BaseException:
            clock.count(called_ns, None, self.device_wait_ns - before_ns)
            raise
        clock.count(called_ns, size, self.device_wait_ns - before_ns)
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
