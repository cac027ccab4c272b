"""One epoch of a loader, or several with persistent workers. Runs in the consumer's process.

It is built on torch's own base iterator, which draws the base seed, runs the sampler, warns about lengths and
labels the profile, so these are the same as torch's. A pool makes the batches: in workers, ahead of the
caller, or in the caller's own thread, when it waits for them.

A signal handler can raise at any moment. During the wait for a batch nothing changes, and the next call waits
for the same batch. During the bookkeeping, which takes microseconds, the iterator closes, so no batch is
delivered twice or out of order. After the bookkeeping, just before the batch is returned, this iterator has
lost the batch, as after an error of the sampler; the loader's state does not count it before the next one
arrives. While workers are started, all of them are stopped.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

from fastload.batch.failures import FailureCount
from fastload.device.pinning import pinning
from fastload.device.stream_prefetcher import pin_dense
from fastload.epochs.iterator import EpochIterator, raise_remote
from fastload.epochs.position import Position
from fastload.epochs.runtime import file_cache_of, runtime_of
from fastload.errors import LoaderClosedError, WorkerDiedError
from fastload.system.notes import short_repr
from fastload.system.torch_private import BaseDataLoaderIter, needs_torch_next
from fastload.workers.inline_pool import InlinePool
from fastload.workers.messages import PendingBatch, ReplyKind
from fastload.workers.pinned_pool import PinnedPool
from fastload.workers.schedule import Schedule
from fastload.workers.settings import plan_of, pool_type_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.device.devices import Backend
    from fastload.workers.messages import BatchReply
    from fastload.workers.pool import WorkerPool


class Epoch(EpochIterator, BaseDataLoaderIter):
    """Iterates over an epoch of a loader.

    Args:
        loader: The loader whose batches it returns; the caller holds its lock.
        backend: The device that batches are copied to; worker threads pin them for it.
    """

    def __init__(self, loader: Any, backend: Backend | None = None) -> None:
        self._is_inline = loader.num_workers == 0
        if not self._is_inline:
            _wait_for_exit()
        kind = "local" if self._is_inline else "workers"
        self.position = Position.begin(loader, kind)
        super().__init__(loader)
        self._num_workers = int(self._num_workers)  # torch takes 0.0, too
        self.owner = weakref.ref(loader)
        self._base_seed = self.position.choose_base_seed(int(self._base_seed))
        self._file_cache = file_cache_of(loader)
        self._plan = plan = plan_of(loader, self._base_seed, self._file_cache)
        _check_as_torch(self, plan.prefetch_factor)
        self.num_workers = self._num_workers
        self.turn = threading.RLock()  # only one thread at a time takes and counts batches
        # What `next` raises after an interruption closed this iterator, or after a worker's death, as in
        # torch.
        self._broken: type[Exception] | None = None
        self._is_drawn = False  # whether there are no more requests
        self._is_prefetched = False
        self._pool: Any = self._make_pool(loader, backend)
        # Before anything is started: whatever interrupts the rest, processes and threads stop.
        self._finalizer: Any = None if self._is_inline else weakref.finalize(self, self._pool.close)
        try:
            self._pool.start()
            self._reset(loader, first_iter=True)
        except BaseException as error:
            self._close_after(error)
            raise

    def _make_pool(self, loader: Any, backend: Backend | None) -> WorkerPool | PinnedPool:
        plan, runtime = self._plan, runtime_of(loader)
        pool_type = InlinePool if self._is_inline else pool_type_of(loader.worker_type)
        pin: Callable[[Any], Any] | None = None
        if pool_type.uses_threads and backend is not None:
            pin = functools.partial(pin_dense, backend)  # else the consumer would copy each batch
        elif self._pin_memory and loader.device is None:  # with device=, copies ahead pin memory
            pin = pinning(self._pin_memory_device)
        pool = pool_type(plan, runtime.meter.add, pin if pool_type.pins else None)
        if isinstance(pool, InlinePool):
            runtime.buffers = pool.take_buffers(runtime.buffers)
        return pool if pin is None or pool.pins else PinnedPool(pool, pin, in_order=plan.in_order)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        before = self.position, self._sampler_iter, self._num_yielded
        with self.turn:
            try:
                if not first_iter:
                    self.position = Position.begin(loader, "again", plan=self._plan)
                    self.position.choose_base_seed(int(self._base_seed))
                if not self._is_inline:  # as in torch, which asks the sampler again
                    super()._reset(loader, first_iter)
                self._sampler_iter = self.position.replay(loader, self._sampler_iter)
            except BaseException:
                self.position, self._sampler_iter, self._num_yielded = before  # the old epoch continues
                raise
            try:
                self._begin_epoch(loader, first_iter)
            except BaseException as error:
                self._close_after(error)
                raise

    def _begin_epoch(self, loader: Any, first_iter: bool) -> None:
        self._is_prefetched = False
        self._is_drawn = False
        position = self.position
        # The user's number, as in the loader's own dataset: another epoch may follow without a new one.
        self._pool.begin_epoch(None if first_iter else runtime_of(loader).set_epoch, position.dataset_states)
        self._schedule = Schedule(self._num_workers, position.next_worker, in_order=self._plan.in_order)
        self._failures = FailureCount(loader, runtime_of(loader).failed_samples)
        for _ in range(self._plan.prefetch_factor * self._num_workers):
            _raise_any(self._put_index())

    def register_slots(self, backend: Backend, stream: Any) -> None:
        """Let a device read slots in place, in this epoch.

        Call this only from a prefetcher that keeps each batch until the device has read it, and never hands
        these batches to its caller.
        """
        self._is_prefetched = True
        self._pool.read_slots(backend, stream)

    def _put_index(self) -> Exception | None:
        """Draw the next index and give it to the next worker, at the same moments as torch.

        Returns:
            The sampler's error, if it raised one. As in torch, the epoch continues after it.
        """
        try:
            index = next(self._sampler_iter)
        except StopIteration:
            self._is_drawn = True
            for each in range(max(1, self._num_workers)):
                self._finish(each)
            return None
        except Exception as error:  # noqa: BLE001  # the caller raises it
            return error
        worker = 0 if self._is_inline else self._schedule.assign()
        if worker is None:
            self._is_drawn = True
            return None
        number, key = self.position.next_number(), None
        if self._plan.needs_keys:
            index, key = self.position.keyed(index, number)
        self._pool.submit(PendingBatch(number, worker, index, key))
        return None

    def _finish(self, worker: int) -> None:
        """The worker gets no more requests in this epoch."""
        if not self._plan.is_persistent:
            self._pool.finish(worker)

    def _close_after(self, error: BaseException) -> None:
        """Close the iterator, because its bookkeeping is incomplete."""
        if isinstance(error, (LoaderClosedError, WorkerDiedError)) and not self._is_inline:
            _wait_for_exit()
        self._broken = StopIteration if isinstance(error, WorkerDiedError) else LoaderClosedError
        self.close()

    # --- the next batch -----------------------------------------------------------------------------------

    def next_sized(self) -> tuple[Any, int]:
        """The next batch and how many samples it has: torch's `__next__`, minus 5 us per batch.

        That one labels each batch in the profile; this one does so only while a profiler is on.
        """
        if needs_torch_next(self):
            batch_and_size: tuple[Any, int] = super(EpochIterator, self).__next__()
            return batch_and_size
        batch_and_size = self._next_data()
        self._num_yielded += 1
        return batch_and_size

    def poll_sized(self) -> tuple[Any, int] | None:
        """As `next_sized`; None if it would have to be waited for."""
        if self._is_inline or needs_torch_next(self):
            return self.next_sized()
        batch_and_size: tuple[Any, int] | None = self._next_data(must_wait=False)
        if batch_and_size is not None:
            self._num_yielded += 1
        return batch_and_size

    def _next_data(self, *, must_wait: bool = True) -> Any:
        if not self._is_inline and not self._pool.is_ours:
            raise RuntimeError(
                "this DataLoader iterator belongs to the parent of this forked process; start a new one "
                "here with iter(loader)"
            )
        if self._file_cache is not None:
            self._file_cache.poll()
        with self.turn:
            if self.position.has_ended:
                raise StopIteration
            if self._broken is not None:
                raise self._broken
            return self._next_inline() if self._is_inline else self._next_batch(must_wait=must_wait)

    def _next_inline(self) -> Any:
        """As `_next_batch`, without what only workers need: a schedule costs a microsecond."""
        pool = self._pool
        if pool.due is None:
            _raise_any(self._put_index())
        if pool.due is None:
            self._end()
        pending = pool.take(0)  # makes the batch
        reply = pending.reply
        if reply.kind is ReplyKind.ENDED:
            self._finish(0)
            self._end()
        self.position.fetched(pending.index, 0, reply.dataset_state)
        return self._result(pending, reply)

    def _next_batch(self, *, must_wait: bool) -> tuple[Any, int] | None:
        pool, schedule = self._pool, self._schedule
        if not self._is_prefetched:
            pool.stop_reading_slots()  # of an earlier epoch, with persistent workers
        deadline = self._deadline() if self._timeout > 0 else None
        while schedule.pending or not self._is_drawn:
            if not schedule.pending:  # an error of the sampler came instead of the only request
                _raise_any(self._put_index())
                continue
            worker = schedule.due()
            try:
                pending = pool.take(worker)
                failure = None if pending is None else self._received(pending)
            except BaseException as error:
                self._close_after(error)
                raise
            if pending is None or pending.reply is None:
                if not must_wait:
                    return None
                try:
                    pool.wait(worker, deadline)
                except TimeoutError:
                    raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds") from None
                continue
            deadline = self._deadline() if self._timeout > 0 else None
            _raise_any(failure)
            if pending.reply.kind is not ReplyKind.ENDED:
                return self._result(pending, pending.reply)
        self._end()
        return None

    def _end(self) -> NoReturn:
        self.position.has_ended = True
        if not self._plan.is_persistent:
            self.close()
        raise StopIteration

    def _result(self, pending: PendingBatch, reply: BatchReply) -> tuple[Any, int]:
        """The batch of a reply and how many samples it has, or its error."""
        payload, reply.payload = reply.payload, None
        self.last = pending
        if reply.failed:
            self._failures.note(reply.failed)
        if reply.kind is ReplyKind.ERROR:
            who = f"batch {pending.number}" + ("" if self._is_inline else f", worker {pending.worker}")
            try:
                raise_remote(payload, who, f"dataset index {short_repr(pending.index)}")
            finally:
                del payload  # an error of this process has a traceback that holds this frame
        return payload, reply.num_samples

    def _received(self, pending: PendingBatch) -> Exception | None:
        """Record a reply, and make the next request; returns the sampler's error."""
        worker = pending.worker
        self._schedule.remove(worker)
        if pending.reply is not None and pending.reply.kind is not ReplyKind.ENDED:
            self.position.fetched(pending.index, worker, pending.reply.dataset_state)
        elif self._schedule.is_active(worker):
            self._schedule.exhaust(worker)
            self._finish(worker)
        else:
            return None
        return self._put_index()

    def _deadline(self) -> float:
        return float(time.monotonic() + self._timeout)

    @property
    def is_ours(self) -> bool:
        """Whether this process can go on with it: it has no workers, or started them."""
        return bool(self._pool.is_ours)

    @property
    def _workers(self) -> list[Any]:  # as torch's iterator with workers: monitoring tools read it
        if self._is_inline:
            raise AttributeError("an iterator without workers has no _workers")
        workers: list[Any] = self._pool.processes
        return workers

    def close(self) -> None:
        """Stop the workers and free the memory; batches that the caller holds stay valid."""
        loader = self.owner()
        if loader is not None and self in (
            loader._iterator,
            getattr(loader._iterator, "host_iterator", None),
        ):
            loader._iterator = None  # stopped persistent workers cannot serve another epoch
        self._broken = self._broken or LoaderClosedError
        self._pool.close()
        if self._finalizer is not None:
            self._finalizer.detach()  # comes last: a signal can interrupt the line above

    def _shutdown_workers(self) -> None:
        self.close()  # other libraries stop torch's iterator by this method


def _check_as_torch(iterator: Any, prefetch_factor: int) -> None:
    """Raise what the constructors of torch's iterators raise: attributes can have been set meanwhile."""
    if iterator._num_workers == 0:
        if iterator._timeout != 0:
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
        return
    for name, value in (("num_workers", iterator._num_workers), ("prefetch_factor", prefetch_factor)):
        if value <= 0:
            raise AssertionError(f"{name} must be greater than 0 for MultiProcessingDataLoaderIter")


def _raise_any(error: Exception | None) -> None:
    try:
        if error is not None:
            raise error
    finally:
        del error  # its traceback holds this frame


def _wait_for_exit() -> None:
    """While the interpreter exits, block a daemon thread that asks for batches.

    Its workers are already stopped, and it would print a useless error.
    """
    if not threading.main_thread().is_alive() and threading.current_thread().daemon:
        threading.Event().wait()
