"""Epochs with workers: what `iter(loader)` gives with `num_workers`, in the consumer's process.

Built on torch's own base iterator, which draws the base seed, runs the sampler, warns about lengths and
labels the profile, so that these are torch's by construction. What is ours is where a batch is written and
how it travels.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fastload import resume
from fastload.device.pin_thread import PinThread, pin_batch, pin_error
from fastload.errors import LoaderClosedError, WorkerDiedError
from fastload.transport.job import Job
from fastload.transport.obituary import short
from fastload.transport.pool import Pool, Task
from fastload.transport.ring import Ring, limit_bytes
from fastload.transport.schedule import Schedule
from fastload.transport.threads import ThreadPool
from fastload.transport.worker import Kind

if TYPE_CHECKING:
    from fastload.device.cuda import Backend
    from fastload.loader import DataLoader


class WorkerIterator(_BaseDataLoaderIter):
    """Epochs with worker processes: one, or one after another with persistent workers."""

    def __init__(self, loader: DataLoader) -> None:
        _wait_for_exit()
        self._epoch = resume.begin(loader, "workers", resume.obstacle(loader))
        super().__init__(loader)
        self._base_seed = self._epoch.choose_base_seed(int(self._base_seed))
        self._prefetch_factor: int = loader.prefetch_factor or 0
        if self._prefetch_factor <= 0:  # torch's assertion, word for word
            raise AssertionError("prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter")
        self._loader = weakref.ref(loader)
        self._pid = os.getpid()
        self._schedule = Schedule(self._num_workers)
        context = loader.multiprocessing_context or torch.multiprocessing.get_context()
        job = Job.of(loader, int(self._base_seed), self._epoch.dataset_states)
        self._is_prefetched = False
        self._pin_thread: PinThread | None = None
        self._pool: Pool | ThreadPool
        if loader.worker_method == "thread":
            self._pool = _start_threads(loader, job, self._pin_memory)
        else:
            ring = Ring(self._num_workers, self._prefetch_factor, limit_bytes(loader.ring_bytes))
            self._pool = Pool(job, context, ring)
            if self._pin_memory and loader.device is None:  # else the device reads slots in place
                self._pin_thread = _start_pin_thread(self._pool, self._pin_memory_device)
        self._finalizer = weakref.finalize(self, _close, self._pool, self._pin_thread)
        _watch_exit()
        self._reset(loader, first_iter=True)

    def _reset(self, loader: DataLoader, first_iter: bool = False) -> None:
        before = self._epoch, self._sampler_iter, self._num_yielded
        try:
            if not first_iter:
                self._epoch = resume.begin(loader, "again", resume.obstacle(loader))
                self._epoch.choose_base_seed(int(self._base_seed))
            super()._reset(loader, first_iter)
            self._sampler_iter = self._epoch.replay(loader, self._sampler_iter)
        except BaseException:
            self._epoch, self._sampler_iter, self._num_yielded = before  # the epoch before goes on
            raise
        self._is_prefetched = False
        if not first_iter:
            self._drop_pinned()
            number = self._epoch.number if resume.book_of(loader).has_set_epoch else None
            self._pool.restart(number, self._epoch.dataset_states)
        self._schedule = Schedule(self._num_workers, first_worker=self._epoch.next_worker)
        for _ in range(self._prefetch_factor * self._num_workers):
            self._put_index()

    def register_slots(self, backend: Backend, stream: Any) -> None:
        """Let a device read slots in place, in this epoch.

        For a prefetcher: it keeps each batch until the device has read it, and its caller sees nothing of it.
        """
        self._is_prefetched = True
        if isinstance(self._pool, Pool) and self._pin_thread is None:
            self._pool.let_read(backend, stream)

    def _put_index(self) -> None:
        """Draw the next index and give it to the next worker, at the moments when torch does."""
        try:
            index = self._next_index()  # type: ignore[no-untyped-call]
        except StopIteration:
            return
        assigned = self._schedule.assign()
        if assigned is None:
            return
        task, worker = assigned
        try:
            self._pool.submit(worker, task, *self._epoch.draw(index))
        except LoaderClosedError:
            _wait_for_exit()
            raise
        except WorkerDiedError:
            self._end_after_death()
            raise
        if self._pin_thread is not None:
            self._pin_thread.expect(worker)

    def _next_data(self) -> Any:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this DataLoader iterator belongs to the process that forked this one; "
                "start a new one here with iter(loader)"
            )
        if not self._is_prefetched and isinstance(self._pool, Pool):
            self._pool.unregister()  # of an epoch before, on persistent workers
        while (head := self._schedule.head()) is not None:
            task, kind, batch = self._receive(head[1])
            _, worker = self._schedule.answer()
            if kind is Kind.ENDED:
                if self._schedule.is_active(worker):
                    self._schedule.exhaust(worker)
                    self._put_index()
                continue
            self._put_index()
            self._epoch.fetched(task.index, worker, task.dataset_state)
            if kind is Kind.ERROR or isinstance(batch, ExceptionWrapper):
                try:
                    self._raise(batch, task, worker)
                finally:
                    del batch  # an error's traceback holds this frame: no cycle may keep workers and batches
            return batch
        self._epoch.ended()
        if not self._persistent_workers:
            self.close()
        raise StopIteration

    def _receive(self, worker: int) -> tuple[Task, Kind, Any]:
        try:
            if self._pin_thread is not None:
                self._pool.expect_open()  # or the thread has ended, and gives no answer and no error
                answer: tuple[Task, Kind, Any] = self._pin_thread.get(self._timeout)
                return answer
            return self._pool.take(worker, self._timeout)
        except TimeoutError:
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds") from None
        except LoaderClosedError:
            _wait_for_exit()
            raise
        except WorkerDiedError:
            self._end_after_death()
            raise

    def _end_after_death(self) -> None:
        _wait_for_exit()
        self._schedule = Schedule(self._num_workers)  # as torch has it: nothing more comes
        self._sampler_iter = iter(())
        self.close()

    def _raise(self, error: ExceptionWrapper | BaseException, task: Task, worker: int) -> None:
        try:
            if isinstance(error, ExceptionWrapper):
                _raise_anew(error)
            else:
                raise error  # of a thread: the error itself
        except BaseException as error:
            error.add_note(
                f"fastload: batch {task.number}, worker {worker}, dataset index {short(task.index)}"
            )
            raise

    def _drop_pinned(self) -> None:
        """Take what the pin thread still has of the old epoch out of its hands."""
        if self._pin_thread is not None:
            while (head := self._schedule.head()) is not None:
                self._receive(head[1])
                self._schedule.answer()

    def belongs_to(self, loader: DataLoader) -> bool:
        """Whether ``loader`` made this iterator."""
        return self._loader() is loader

    def close(self) -> None:
        """Stop the workers and give the slots back; batches that the caller holds stay valid."""
        loader = self._loader()
        if loader is not None and self in (loader._iterator, getattr(loader._iterator, "source", None)):
            loader._iterator = None  # persistent workers that are gone serve no more epochs
        self._finalizer()

    def _shutdown_workers(self) -> None:
        self.close()  # the name under which torch's iterator is stopped by others


def _raise_anew(wrapper: ExceptionWrapper) -> None:
    try:
        wrapper.reraise()
    except BaseException as error:
        error.__traceback__ = None  # torch's frame has a variable that holds the error, which holds the frame
        raise


_interpreter_exits = threading.Event()


@functools.cache
def _watch_exit() -> None:
    """Know that the interpreter exits before the finalizers of iterators run, which are older."""
    atexit.register(_interpreter_exits.set)


def _wait_for_exit() -> None:
    """Let a daemon thread that wants batches wait for its end, if the interpreter is on its way out.

    Its workers are stopped by then, and it would print an error for nobody.
    """
    if _interpreter_exits.is_set() and threading.current_thread().daemon:
        threading.Event().wait()


def _close(pool: Pool | ThreadPool, pin_thread: PinThread | None) -> None:
    pid_is_ours = pool.is_ours
    pool.close()
    if pin_thread is not None and pid_is_ours:
        pin_thread.close()


def _start_threads(loader: DataLoader, job: Job, pins: bool) -> ThreadPool:
    index = _accelerator_index()

    def finish(batch: Any) -> Any:
        if not pins:
            return batch
        if index is not None:
            torch.accelerator.set_device_index(index)  # of the worker's thread
        return pin_batch(batch, loader.pin_memory_device or None)

    watches = resume.book_of(loader).next_number <= 1
    return ThreadPool(
        job, loader.prefetch_factor or 0, limit_bytes(loader.ring_bytes), finish, watches=watches
    )


def _accelerator_index() -> int | None:
    return torch.accelerator.current_device_index() if torch.accelerator.is_available() else None


def _start_pin_thread(pool: Pool, device: str | None) -> PinThread:
    index = _accelerator_index()

    def receive(worker: int) -> tuple[Task, Kind, Any]:
        return pool.take(worker, 0)

    def pin(answer: tuple[Task, Kind, Any]) -> tuple[Task, Kind, Any]:
        task, kind, batch = answer
        if kind is Kind.BATCH:
            try:
                batch = pin_batch(batch, device)
            except Exception:  # noqa: BLE001  # raised in the consumer's thread at this batch's turn
                batch = pin_error(index)
        return task, kind, batch

    return PinThread(receive, pin, index)
