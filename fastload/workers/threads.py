"""Worker threads instead of worker processes: `worker_method="thread"`.

Threads are for code that releases the GIL, and for Python without a
GIL: nothing is pickled, and a batch is passed as an object. Rules:

1. Each thread has its own pipelines, buffers and queues, and with rng="sample" its own copies of the
   generators that the dataset and collate_fn keep; it shares the rest of these.
2. The generators of random, numpy and torch belong to the process: nothing here seeds them.
3. Threads cannot be killed. close() asks them to end, and waits a limited time for their current batches.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import random
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.batch.fetch import Fetcher
from fastload.batch.nbytes import nbytes_of
from fastload.errors import LoaderClosedError
from fastload.memory.lease import Buffers
from fastload.rng import seeding
from fastload.rng.sample_rng import SampleRng
from fastload.rng.worker_info import WorkerInfo, working_as
from fastload.system.logs import log
from fastload.system.sent_error import SentError
from fastload.workers.tally import Meter
from fastload.workers.task import Task
from fastload.workers.thread_copy import copies_for_threads
from fastload.workers.worker import AT_START, Begin, Kind
from fastload.workers.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.batch.iterable_state import IterableState
    from fastload.batch.replacing import BatchId
    from fastload.rng.sample_streams import StreamOrigin
    from fastload.workers.job import Job
    from fastload.workers.process import WorkerView
    from fastload.workers.tally import Tally

_GRACE_S = 5.0
# One for the caller's batch, one for the batch it takes next, one for the batch being written.
_BUFFERS_BEYOND_PREFETCH = 3


class ThreadPool(Workers):
    """The worker threads of one iterator, from `start` on.

    Args:
        job: Their job.
        prefetch_factor: How many batches each thread may be ahead.
        ring_bytes: Upper bound for the memory that all threads keep.
        finish: Called with each batch, in its thread; the caller gets the result.
        tally: Counts the work of the threads; other pools may share it.
        watches: Whether the first batch is fetched alone, to see if it draws from the process's generators.
        timeout_s: How long to wait for that first batch; 0 waits without limit.

    Raises:
        ValueError: A pipeline cannot be copied for each thread.
    """

    def __init__(
        self,
        job: Job,
        prefetch_factor: int,
        ring_bytes: int,
        finish: Callable[[Any], Any],
        tally: Tally,
        *,
        watches: bool,
        timeout_s: float = 0,
    ) -> None:
        self.processes: list[WorkerView] = []
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._is_closed = False
        self._watches = watches
        self._is_late = False  # whether `submit` waited in vain for the batch that `take` returns next
        limit_bytes = ring_bytes // job.num_workers
        max_buffers = prefetch_factor + _BUFFERS_BEYOND_PREFETCH
        copies = copies_for_threads(
            job.dataset, job.collate_fn, job.num_workers, with_generators=job.seeds_samples
        )
        self._workers = [
            _Worker(number, job, dataset, collate_fn, Buffers(limit_bytes, max_buffers), finish, tally)
            for number, (dataset, collate_fn) in enumerate(copies)
        ]

    def start(self) -> None:
        """Start the threads."""
        num_threads = torch.get_num_threads()
        try:
            for worker in self._workers:
                worker.thread.start()
            for worker in self._workers:
                worker.has_begun.wait()
        finally:
            torch.set_num_threads(num_threads)  # threads that begin later inherit the last setting

    @property
    def is_ours(self) -> bool:
        """Whether this process started the threads."""
        return os.getpid() == self._pid

    def submit(
        self,
        worker_id: int,
        number: int,
        index: Any,
        origin: StreamOrigin | None = None,
        batch_id: BatchId | None = None,
    ) -> None:
        """Give a worker its next task; if the first batch is watched, wait for it."""
        self.expect_open()
        worker = self._workers[worker_id]
        watches, self._watches = self._watches, False
        before = _generator_states() if watches else {}
        task = Task(number, index, origin, batch_id)
        worker.sent.append(task)
        worker.tasks.put(task)
        if watches:  # no other worker thread draws during this wait
            self._is_late = not worker.is_idle.wait(self._timeout_s or None)
            if not self._is_late:
                after = _generator_states()
                _warn([name for name, state in before.items() if state != after[name]])

    def begin_epoch(self, epoch: int | None, dataset_states: list[IterableState] | None) -> None:
        """Drop all older tasks and begin an epoch; threads do not use `dataset_states`."""
        for worker in self._workers:
            worker.drop_tasks()
            worker.tasks.put(Begin(epoch, None))

    def take(self, worker_id: int, number: int, timeout_s: float) -> Task:
        """The answer; its batch is the object that the thread made."""
        worker = self._workers[worker_id]
        is_late, self._is_late = self._is_late, False
        deadline = time.monotonic() + (0 if is_late else timeout_s) if timeout_s else None
        while True:
            self.expect_open()
            while worker.sent and worker.sent[0].number < number:
                worker.sent.popleft()
            if worker.sent and worker.sent[0].kind is not None:
                return worker.sent[0]
            try:
                worker.wakes.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError from None

    def expect_open(self) -> None:
        """Raise LoaderClosedError if the pool was closed."""
        if self._is_closed:
            raise LoaderClosedError

    def close(self) -> None:
        """End the threads; batches that the caller holds stay valid.

        Waits up to five seconds for threads in the middle of a batch; after that they end on their own.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if not self.is_ours:
            return  # a forked child does not have these threads
        for worker in self._workers:
            worker.drop_tasks()
            worker.tasks.put(None)
            worker.wakes.put(None)  # a caller may be waiting in another thread
        deadline = time.monotonic() + _GRACE_S
        for worker in self._workers:
            if worker.thread.ident is not None and worker.thread is not threading.current_thread():
                worker.thread.join(max(deadline - time.monotonic(), 0.0))


class _Worker:
    """One thread: its dataset and collate_fn, its queues, its fetcher."""

    def __init__(
        self,
        number: int,
        job: Job,
        dataset: Any,
        collate_fn: Any,
        buffers: Buffers,
        finish: Callable[[Any], Any],
        tally: Tally,
    ) -> None:
        self._id = number
        self._job = job
        self._buffers = buffers
        self._finish = finish
        self._tally = tally
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._fetcher: Fetcher | None = None
        self._init_error: SentError | None = None
        self.tasks: queue.SimpleQueue[Task | Begin | None] = queue.SimpleQueue()
        self.wakes: queue.SimpleQueue[None] = queue.SimpleQueue()  # signals an answer; the task holds it
        self.sent: deque[Task] = deque()  # the consumer's tasks, in the order of their answers
        self.has_begun = threading.Event()
        self.is_idle = threading.Event()  # set once the first task is answered
        # A daemon thread: else an interpreter that exits with a live iterator would wait without end.
        self.thread = threading.Thread(target=self._run, name=f"fastload-worker-{number}", daemon=True)

    def drop_tasks(self) -> None:
        """Drop the unanswered tasks: no caller waits for them any more."""
        for task in self.sent:
            task.is_stale = True
        self.sent.clear()

    def _run(self) -> None:
        torch.set_num_threads(1)  # of this thread
        self.has_begun.set()
        job = self._job
        info = WorkerInfo(self._id, job.num_workers, job.base_seed + self._id, self._dataset, "thread")
        with working_as(info):
            try:
                self._begin(info.seed)
            except BaseException:  # noqa: BLE001  # it is the answer to every task
                self._init_error = self._wrap_error()
            meter = Meter()
            while (task := self._next_task(meter)) is not None:
                if isinstance(task, Begin):
                    self._begin_epoch(task.epoch)
                elif not task.is_stale:
                    kind = self._answer(task)
                    self._tally.add(meter.work())
                    task.kind = kind  # last, because the consumer checks it
                    if self.wakes.empty():  # else the consumer is already going to look
                        self.wakes.put(None)
                    self.is_idle.set()
                del task  # else this frame would keep the index alive until the next task
        self._buffers.clear()
        self.is_idle.set()  # another thread may be waiting for the first batch of a closed pool

    def _next_task(self, meter: Meter) -> Task | Begin | None:
        since_ns = time.perf_counter_ns()
        task = self.tasks.get()
        meter.waited(since_ns)
        return task

    def _begin(self, seed: int) -> None:
        job = self._job
        if job.seed_pipelines:
            seeding.seed_pipelines(self._dataset, seed, self._collate_fn)
        if job.worker_init_fn is not None:
            job.worker_init_fn(self._id)
        sample_rng = None
        if job.seeds_samples:
            sample_rng = SampleRng(
                self._dataset,
                self._collate_fn,
                with_pipelines=job.seed_pipelines,
                is_guest=False,
                with_globals=False,
            )
        # Not a worker in torch's sense: torch's get_worker_info() is None here.
        self._fetcher = Fetcher(
            dataclasses.replace(job, collate_fn=self._collate_fn),
            self._dataset,
            self._buffers.arena,
            in_worker=False,
            sample_rng=sample_rng,
            worker_id=self._id,
        )

    def _begin_epoch(self, epoch: int | None) -> None:
        # The loader has called set_epoch() of its own dataset; this one may be a copy.
        if epoch is not None and self._dataset is not self._job.dataset:
            try:
                if callable(getattr(self._dataset, "set_epoch", None)):
                    self._dataset.set_epoch(epoch)
            except BaseException:  # noqa: BLE001  # as above
                self._init_error = self._wrap_error()

    def _answer(self, task: Task) -> Kind:
        """Put the answer into the task, and return its kind."""
        if self._init_error is not None or self._fetcher is None:
            task.payload = self._init_error
            return Kind.ERROR
        self._buffers.begin()
        try:
            if self._fetcher.reads_ahead:
                for coming in self.sent.copy():
                    if coming.number >= task.number:
                        self._fetcher.announce(coming.index)
            task.payload = self._finish(self._fetcher.fetch(task.index, task.origin, task.batch_id))
            task.size = self._fetcher.num_samples, self._fetcher.gathered_bytes or nbytes_of(task.payload)
            task.failed = () if self._fetcher.replacer is None else tuple(self._fetcher.replacer.failed)
            return Kind.BATCH
        except BaseException as error:  # noqa: BLE001  # raised in the consumer's thread, at its batch's turn
            task.payload = SentError.itself(error, self._fetcher.place_of_error(task.index, error))
            return Kind.ERROR
        finally:
            self._buffers.arena.end()

    def _wrap_error(self) -> SentError:
        return SentError.current(f"in DataLoader worker thread {self._id}", AT_START)


def _generator_states() -> dict[str, Any]:
    _, keys, position, *_ = np.random.get_state(legacy=True)
    return {
        "random": random.getstate(),
        "numpy.random": (keys.tobytes(), position),  # type: ignore[union-attr]
        "torch": torch.default_generator.get_state().numpy().tobytes(),
    }


def _warn(drawn: list[str]) -> None:
    if drawn:
        log.warning(
            "the first batch drew random numbers from %s, which worker threads share: these draws have no "
            'fixed order and cannot be reproduced, not even with rng="sample". Draw from '
            'fastload.sample_generator() with rng="sample", or use worker_method="process"',
            " and ".join(drawn),
        )
