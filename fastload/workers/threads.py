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

from fastload.batch.nbytes import nbytes_of
from fastload.errors import LoaderClosedError
from fastload.memory.lease import Buffers
from fastload.system.logs import log
from fastload.system.wakes import Wakes
from fastload.workers.core import Kind, WorkerCore
from fastload.workers.task import Begin, Task
from fastload.workers.thread_copy import copies_for_threads
from fastload.workers.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastload.batch.iterable_state import IterableState
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
        self._is_late = False  # whether `submit` waited in vain for the batch that is due next
        limit_bytes = ring_bytes // job.num_workers
        max_buffers = prefetch_factor + _BUFFERS_BEYOND_PREFETCH
        copies = copies_for_threads(
            job.dataset, job.collate_fn, job.num_workers, with_generators=job.seeds_samples
        )
        # The loader has called set_epoch() of its own dataset; a thread's may be a copy.
        self._has_copies = copies[0][0] is not job.dataset
        self._workers = [
            _Worker(
                number,
                dataclasses.replace(job, dataset=dataset, collate_fn=collate_fn),
                Buffers(limit_bytes, max_buffers),
                finish,
                tally,
            )
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

    def submit(self, worker_id: int, task: Task) -> None:
        """Give a worker its next task; if the first batch is watched, wait for it."""
        self.expect_open()
        worker = self._workers[worker_id]
        watches, self._watches = self._watches, False
        before = _generator_states() if watches else {}
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
            worker.tasks.put(Begin(epoch if self._has_copies else None, None))

    def take(self, worker_id: int) -> Task | None:
        """The next task that the worker has answered; its batch is the object that the thread made."""
        self.expect_open()
        sent = self._workers[worker_id].sent
        return sent.popleft() if sent and sent[0].answer is not None else None

    def wait(self, worker_id: int, deadline: float | None) -> None:
        """Wait until the worker has answered, or `close` was called."""
        is_late, self._is_late = self._is_late, False
        self._workers[worker_id].wakes.wait(time.monotonic() if is_late else deadline)

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
            worker.wakes.wake()  # a caller may be waiting in another thread
        deadline = time.monotonic() + _GRACE_S
        for worker in self._workers:
            if worker.thread.ident is not None and worker.thread is not threading.current_thread():
                worker.thread.join(max(deadline - time.monotonic(), 0.0))


class _Worker:
    """One thread: its queues and its buffers."""

    def __init__(
        self, worker_id: int, job: Job, buffers: Buffers, finish: Callable[[Any], Any], tally: Tally
    ) -> None:
        self._core = WorkerCore(worker_id, job, buffers.arena, finish, is_thread=True)
        self._buffers = buffers
        self._tally = tally
        self.tasks: queue.SimpleQueue[Task | Begin | None] = queue.SimpleQueue()
        self.wakes = Wakes()  # the consumer, which looks into its tasks for answers
        self.sent: deque[Task] = deque()  # the consumer's tasks, in the order of their answers
        self.has_begun = threading.Event()
        self.is_idle = threading.Event()  # set once the first task is answered
        # A daemon thread: else an interpreter that exits with a live iterator would wait without end.
        self.thread = threading.Thread(target=self._run, name=f"fastload-worker-{worker_id}", daemon=True)

    def drop_tasks(self) -> None:
        """Drop the unanswered tasks: no caller waits for them any more."""
        for task in self.sent:
            task.is_stale = True
        self.sent.clear()

    def _run(self) -> None:
        torch.set_num_threads(1)  # of this thread
        self.has_begun.set()
        self._core.begin()
        while (task := self._next_task()) is not None:
            if isinstance(task, Begin):
                self._core.begin_epoch(task.epoch, None)
            elif not task.is_stale:
                self._answer(task)
            del task  # else this frame would keep the index alive until the next task
        self._buffers.clear()
        self.is_idle.set()  # another thread may be waiting for the first batch of a closed pool

    def _next_task(self) -> Task | Begin | None:
        since_ns = time.perf_counter_ns()
        task = self.tasks.get()
        self._core.meter.waited(since_ns)
        return task

    def _answer(self, task: Task) -> None:
        self._buffers.begin()
        answer = self._core.answer(task.index, task.origin, task.batch_id, self._coming(task))
        self._buffers.arena.end()
        if answer.kind is Kind.BATCH and not answer.nbytes:
            answer.nbytes = nbytes_of(answer.payload)
        self._tally.add(answer.work)
        task.answer = answer  # last, because the consumer checks it
        self.wakes.wake()
        self.is_idle.set()

    def _coming(self, task: Task) -> Iterator[Any]:
        for coming in self.sent.copy():
            if coming.number > task.number:
                yield coming.index


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
