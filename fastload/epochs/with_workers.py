"""The iterator of a loader with workers. Runs in the consumer's process.

It is built on torch's own base iterator (see `iterator`), which draws the base seed, runs the sampler, warns
about lengths and labels the profile, so these are the same as torch's. fastload replaces the memory of
batches and their transport.

A signal handler can raise at any moment. During the wait for a batch nothing changes, and the next call waits
for the same batch. During the bookkeeping, which takes microseconds, the iterator closes, so no batch is
delivered twice or out of order. After the bookkeeping, just before the batch is returned, this iterator has
lost the batch, as after an error of the sampler; the loader's state does not count it before the next one
arrives. While workers are started, all of them are stopped.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch

from fastload.batch.dataset_state import NOT_BEGUN
from fastload.batch.failures import FailureCount
from fastload.device.pin_thread import PinThread, pin_batch, pin_error
from fastload.device.stream_prefetcher import pin_dense
from fastload.epochs.iterator import HostIterator
from fastload.epochs.loader_state import file_cache_of, recorder_of, state_of
from fastload.epochs.position import Position, why_unresumable
from fastload.errors import BatchLostError, LoaderClosedError, WorkerDiedError
from fastload.system.budget import parse_prefetch_memory
from fastload.system.notes import add_place, short_repr
from fastload.system.torch_private import needs_torch_next
from fastload.workers.batch_maker import AT_START
from fastload.workers.messages import PendingBatch, ReplyKind
from fastload.workers.pool import PoolSettings
from fastload.workers.schedule import Schedule
from fastload.workers.settings import needs_keys, pool_type_of, worker_spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.device.devices import Backend
    from fastload.epochs.stats import Size
    from fastload.workers.messages import BatchReply
    from fastload.workers.pool import WorkerPool
    from fastload.workers.settings import LoaderSettings


class WorkerIterator(HostIterator):
    """Iterates over epochs with workers: one epoch, or several with persistent workers.

    Args:
        loader: The loader whose batches it returns.
        backend: The device that batches are copied to; worker threads pin them for it.
    """

    def __init__(self, loader: LoaderSettings, backend: Backend | None = None) -> None:
        _wait_for_exit()
        self.position = Position.begin(loader, "workers", why_unresumable(loader))
        super().__init__(loader)
        self._base_seed = self.position.choose_base_seed(int(self._base_seed))
        if self._num_workers <= 0:  # as torch's _MultiProcessingDataLoaderIter.__init__, and the next one
            raise AssertionError("num_workers must be greater than 0 for MultiProcessingDataLoaderIter")
        # As in torch's constructor: num_workers can have been set after it.
        self._prefetch_factor: int = 2 if loader.prefetch_factor is None else loader.prefetch_factor
        if self._prefetch_factor <= 0:
            raise AssertionError("prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter")
        self._pid = os.getpid()
        self._schedule = Schedule(self._num_workers)
        self.turn = threading.RLock()  # only one thread at a time takes and counts batches
        # What `next` raises after an interruption closed this iterator, or after a worker's death, as in
        # torch.
        self._broken: type[Exception] | None = None
        self._failed_sampler = ""  # the error that ended the sampler, if one did
        self._is_prefetched = False
        self._needs_keys = needs_keys(loader)
        pool_type = pool_type_of(loader.worker_type)
        pin: Callable[[Any], Any] | None = None
        if pool_type.uses_threads:
            if backend is not None:  # else the consumer's thread would copy each batch to pinned memory
                pin = functools.partial(pin_dense, backend)
            elif self._pin_memory:
                pin = _pinning(self._pin_memory_device, _accelerator_index())
        self._in_order = loader.in_order
        settings = PoolSettings(
            count=recorder_of(loader).add,
            pin=pin,
            context=loader.multiprocessing_context or torch.multiprocessing.get_context(),
            prefetch_factor=self._prefetch_factor,
            max_bytes=parse_prefetch_memory(loader.max_prefetch_memory),
            num_restarts=loader.max_worker_restarts,
            is_persistent=loader.persistent_workers,
            worker_type=loader.worker_type,
            in_order=loader.in_order,
        )
        self._file_cache = file_cache_of(loader)
        self._pool = pool_type(worker_spec(loader, int(self._base_seed), self._file_cache), settings)
        self._pin_thread: PinThread | None = None
        if self._pin_memory and not pool_type.uses_threads and loader.device is None:
            self._pin_thread = _make_pin_thread(self._pool, self._pin_memory_device)
        # Before anything is started: whatever interrupts the rest, processes and threads stop.
        self._finalizer = weakref.finalize(self, _close, self._pool, self._pin_thread)
        _watch_exit()
        try:
            self._pool.start()
            if self._pin_thread is not None:
                self._pin_thread.start()
            self._reset(loader, first_iter=True)
        except BaseException as error:
            self._close_after(error)
            raise

    def _reset(self, loader: LoaderSettings, first_iter: bool = False) -> None:
        before = self.position, self._sampler_iter, self._num_yielded
        with self.turn:
            try:
                if not first_iter:
                    self.position = Position.begin(loader, "again", why_unresumable(loader))
                    self.position.choose_base_seed(int(self._base_seed))
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

    def _begin_epoch(self, loader: LoaderSettings, first_iter: bool) -> None:
        self._is_prefetched = False
        self._failed_sampler = ""
        epoch, position = None, self.position
        states = position.dataset_states
        if not first_iter:
            self._drop_pinned()
            if state_of(loader).has_set_epoch:
                epoch = position.epoch
            if states is not None and not position.loads_dataset_states:
                states = [NOT_BEGUN] * len(states)  # the copies in the workers have their states
        self._pool.begin_epoch(epoch, states)
        self._schedule = Schedule(self._num_workers, position.next_worker, in_order=self._in_order)
        self._failures = FailureCount(loader, state_of(loader).failed_samples)
        for _ in range(self._prefetch_factor * self._num_workers):
            failure = self._put_index()
            if failure is not None:
                _raise(failure)

    def register_slots(self, backend: Backend, stream: Any) -> None:
        """Let a device read slots in place, in this epoch.

        Call this only from a prefetcher that keeps each batch until the device has read it, and never hands
        these batches to its caller.
        """
        self._is_prefetched = True
        if self._pin_thread is None:
            self._pool.read_slots(backend, stream)

    def _put_index(self) -> Exception | None:
        """Draw the next index and give it to the next worker, at the same moments as torch.

        Returns:
            The sampler's error, if it raised one. As in torch, the epoch continues after it.
        """
        try:
            index = self._next_index()  # type: ignore[no-untyped-call]
        except StopIteration:
            for each in range(self._num_workers):
                self._finish(each)
            return None
        except Exception as error:  # noqa: BLE001  # the caller raises it
            if _is_finished_generator(self.position.sampler_iter or self._sampler_iter):
                self._failed_sampler = repr(error)
            return error
        worker = self._schedule.assign()
        if worker is None:
            return None
        number = self.position.next_number()
        key = None
        if self._needs_keys:
            index, key = self.position.keyed(index, number)
        self._pool.submit(PendingBatch(number, worker, index, key))
        if self._pin_thread is not None:
            self._pin_thread.expect((worker if self._in_order else None,))  # in a tuple: None would end it
        return None

    def _finish(self, worker: int) -> None:
        """The worker gets no more requests in this epoch."""
        if not self._persistent_workers:
            self._pool.finish(worker)

    def _close_after(self, error: BaseException) -> None:
        """Close the iterator, because its bookkeeping is incomplete."""
        if isinstance(error, (LoaderClosedError, WorkerDiedError)):
            _wait_for_exit()
        self._broken = StopIteration if isinstance(error, WorkerDiedError) else LoaderClosedError
        self.close()

    def poll_sized(self) -> tuple[Any, Size] | None:
        """The next batch and its size; None if it would have to be waited for."""
        if needs_torch_next(self):
            return self.next_sized()
        batch_and_size: tuple[Any, Size] | None = self._next_data(must_wait=False)
        if batch_and_size is not None:
            self._num_yielded += 1
        return batch_and_size

    def _next_data(self, *, must_wait: bool = True) -> Any:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this DataLoader iterator belongs to the parent of this forked process; start a new one "
                "here with iter(loader)"
            )
        if self._file_cache is not None:
            self._file_cache.poll()
        with self.turn:
            return self._next_batch(must_wait=must_wait)

    def _next_batch(self, *, must_wait: bool) -> tuple[Any, Size] | None:
        if self._broken is not None:
            raise self._broken
        if not self._is_prefetched:
            self._pool.stop_reading_slots()  # of an earlier epoch, with persistent workers
        deadline = self._deadline()
        while self._schedule.num_pending:
            worker = self._schedule.due()
            try:
                self._pool.expect_open()  # if the pool is closed, the pin thread has nothing
                pending = self._pool.take(worker) if self._pin_thread is None else self._pin_thread.take()
                failure = None if pending is None else self._received(pending)
            except BaseException as error:
                self._close_after(error)
                raise
            if pending is None or pending.reply is None:
                if not must_wait:
                    return None
                self._wait(worker, deadline)
                continue
            deadline = self._deadline()
            if failure is not None:
                _raise(failure)
            reply = pending.reply
            if reply.failed:
                self._failures.note(reply.failed)
            if reply.kind is ReplyKind.ENDED:
                continue
            if reply.kind is ReplyKind.ERROR:
                self._raise(reply, pending)
            return reply.payload, (reply.num_samples, reply.nbytes)
        if self._failed_sampler:
            raise BatchLostError(
                f"an exception ended the sampler, {self._failed_sampler}, and was raised before; the batches "
                "after it are missing: start a new iterator"
            )
        self.position.has_ended = True
        if not self._persistent_workers:
            self.close()
        raise StopIteration

    def _received(self, pending: PendingBatch) -> Exception | None:
        """Record a reply, and make the next request; returns the sampler's error."""
        worker = pending.worker
        self._schedule.remove(worker)
        if pending.reply is not None and pending.reply.kind is not ReplyKind.ENDED:
            self.position.fetched(pending.index, worker, pending.reply.dataset_state, pending.number)
        elif self._schedule.is_active(worker):
            self._schedule.exhaust(worker)
            self._finish(worker)
        else:
            return None
        return self._put_index()

    def _deadline(self) -> float | None:
        return time.monotonic() + self._timeout if self._timeout > 0 else None

    def _wait(self, worker: int | None, deadline: float | None) -> None:
        try:
            if self._pin_thread is None:
                self._pool.wait(worker, deadline)
            else:
                self._pin_thread.wait(deadline)
        except TimeoutError:
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds") from None

    def _raise(self, reply: BatchReply, pending: PendingBatch) -> None:
        # The error of a thread has a traceback that holds this frame and the caller's.
        remote_error, reply.payload = reply.payload, None
        try:
            remote_error.reraise()
        except BaseException as error:
            place = remote_error.place or f"dataset index {short_repr(pending.index)}"
            batch = "" if place == AT_START else f"batch {pending.number}, "
            add_place(error, f"{batch}worker {pending.worker}, {place}")
            raise
        finally:
            del remote_error

    def _drop_pinned(self) -> None:
        """Take the remaining batches of the old epoch out of the pin thread."""
        deadline = self._deadline()
        while self._pin_thread is not None and self._schedule.num_pending:
            self._pool.expect_open()
            pending = self._pin_thread.take()
            if pending is None:
                self._wait(self._schedule.due(), deadline)
            else:
                self._schedule.remove(pending.worker)

    @property
    def is_ours(self) -> bool:
        """Whether this process started the workers; False in a process forked from it."""
        return self._pool.is_ours

    @property
    def was_interrupted(self) -> bool:
        """Whether Ctrl-C has ended a worker, which then serves no further epoch."""
        return self._pool.was_interrupted

    # torch's iterator has the next four attributes, and monitoring tools read them.

    @property
    def _workers(self) -> list[Any]:
        return self._pool.processes

    @property
    def _tasks_outstanding(self) -> int:
        return self._schedule.num_pending

    @property
    def _send_idx(self) -> int:
        return self._schedule.num_assigned

    @property
    def _rcvd_idx(self) -> int:
        return self._schedule.num_assigned - self._schedule.num_pending

    def close(self) -> None:
        """Stop the workers and free the slots; batches that the caller holds stay valid."""
        loader = self.owner()
        if loader is not None and self in (loader._iterator, getattr(loader._iterator, "source", None)):
            loader._iterator = None  # stopped persistent workers cannot serve another epoch
        _close(self._pool, self._pin_thread)
        self._finalizer.detach()  # comes last: a signal can interrupt the line above

    def _shutdown_workers(self) -> None:
        self.close()  # other libraries stop torch's iterator by this method


def _raise(error: Exception) -> None:
    try:
        raise error
    finally:
        del error  # its traceback holds this frame


_interpreter_exits = threading.Event()


@functools.cache
def _watch_exit() -> None:
    """Record the exit of the interpreter before the iterators' finalizers run."""
    atexit.register(_interpreter_exits.set)


def _wait_for_exit() -> None:
    """While the interpreter exits, block a daemon thread that asks for batches.

    Its workers are already stopped, and it would print a useless error.
    """
    if _interpreter_exits.is_set() and threading.current_thread().daemon:
        threading.Event().wait()


def _close(pool: WorkerPool, pin_thread: PinThread | None) -> None:
    pool.close()
    if pin_thread is not None and pool.is_ours:
        pin_thread.close()


def _pinning(device: str | None, index: int | None) -> Callable[[Any], Any]:
    """A function that pins batches, in any thread, for the accelerator with this index."""

    def pin(batch: Any) -> Any:
        if index is not None:
            torch.accelerator.set_device_index(index)
        return pin_batch(batch, device)

    return pin


def _accelerator_index() -> int | None:
    return torch.accelerator.current_device_index() if torch.accelerator.is_available() else None


def _make_pin_thread(pool: WorkerPool, device: str | None) -> PinThread:
    index = _accelerator_index()
    pin_one = _pinning(device, index)

    def receive(source: tuple[int | None]) -> PendingBatch:
        (worker,) = source
        while (pending := pool.take(worker)) is None:
            pool.wait(worker, None)
        return pending

    def pin(pending: PendingBatch) -> None:
        reply = pending.reply
        if reply is not None and reply.kind is ReplyKind.BATCH:
            try:
                reply.payload = pin_one(reply.payload)
            except Exception:  # noqa: BLE001  # raised in the consumer's thread at this batch's turn
                reply.kind, reply.payload = ReplyKind.ERROR, pin_error(index)

    return PinThread(receive, pin)


def _is_finished_generator(indices: Any) -> bool:
    """Whether asking for the next index would look like the end of the epoch."""
    return isinstance(indices, types.GeneratorType) and indices.gi_frame is None
