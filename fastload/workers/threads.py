"""Worker threads instead of worker processes: `worker_type="thread"`.

Threads are for code that releases the GIL, and for Python without a GIL: nothing is pickled, and batches are
passed as objects. Rules:

1. Each thread has its own buffers and queues, its own copies of the pipelines that the dataset and collate_fn
   keep, and with seeding="sample" of their generators; it shares the rest of these.
2. The generators of random, numpy and torch belong to the process: nothing here seeds them.
3. Threads cannot be killed. close() asks them to stop, and waits a limited time for their current batches.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import queue
import threading
import time
import types
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from fastload.batch.nbytes import nbytes_of
from fastload.errors import LoaderClosedError
from fastload.memory.lease import BufferPool
from fastload.nested.attributes import attributes
from fastload.rng.generators import Search, held_generators
from fastload.system.wakeup import Wakeup
from fastload.workers.batch_maker import BatchMaker
from fastload.workers.messages import Begin, Kind, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastload.batch.dataset_state import DatasetState
    from fastload.workers.messages import Work
    from fastload.workers.worker_spec import Job

_GRACE_S = 5.0
# One for the caller's batch, one for the batch it takes next, one for the batch being written.
_BUFFERS_BEYOND_PREFETCH = 3


class ThreadPool:
    """The worker threads of one iterator, from `start` on.

    Args:
        job: Their job.
        prefetch_factor: How many batches each thread can be ahead.
        max_bytes: Upper bound on the memory that all threads keep.
        finish: Called with each batch, in its thread; the caller gets the result. None changes nothing.
        note_work: Called with the work of the threads, in them.
    """

    def __init__(
        self,
        job: Job,
        prefetch_factor: int,
        max_bytes: int,
        finish: Callable[[Any], Any] | None,
        note_work: Callable[[Work], None],
    ) -> None:
        self.processes: list[Any] = []
        self._pid = os.getpid()
        self._is_closed = False
        limit_bytes = max_bytes // job.num_workers
        max_buffers = prefetch_factor + _BUFFERS_BEYOND_PREFETCH
        copies = copies_for_threads(
            job.dataset, job.collate_fn, job.num_workers, with_generators=job.seeds_samples
        )
        # The loader has called set_epoch() of its own dataset; a thread's can be a copy.
        self._has_copies = copies[0][0] is not job.dataset
        self._workers = [
            _Worker(
                number,
                dataclasses.replace(job, dataset=dataset, collate_fn=collate_fn),
                BufferPool(limit_bytes, max_buffers),
                finish,
                note_work,
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
        """Give a worker its next task."""
        self.expect_open()
        worker = self._workers[worker_id]
        with worker.sent_lock:
            worker.sent.append(task)
        worker.tasks.put(task)

    def finish(self, worker_id: int) -> None:
        """Do nothing: threads stop at once."""

    def begin_epoch(self, epoch: int | None, dataset_states: list[DatasetState] | None) -> None:
        """Drop all older tasks and begin an epoch; threads do not use `dataset_states`."""
        for worker in self._workers:
            worker.drop_tasks()
            worker.tasks.put(Begin(epoch if self._has_copies else None, None))

    def take(self, worker_id: int) -> Task | None:
        """The next task that the worker has answered; its batch is the object that the thread made."""
        self.expect_open()
        worker = self._workers[worker_id]
        if not worker.sent or worker.sent[0].answer is None:
            return None
        with worker.sent_lock:
            return worker.sent.popleft()

    def wait(self, worker_id: int, deadline: float | None) -> None:
        """Wait until the worker has answered, or `close` was called."""
        self._workers[worker_id].wakes.wait(deadline)

    def expect_open(self) -> None:
        """Raise LoaderClosedError if the pool was closed."""
        if self._is_closed:
            raise LoaderClosedError

    def close(self) -> None:
        """Stop the threads; batches that the caller holds stay valid.

        Waits up to five seconds for threads in the middle of a batch; after that they stop on their own.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if not self.is_ours:
            return  # a forked child does not have these threads
        for worker in self._workers:
            worker.drop_tasks()
            worker.tasks.put(None)
            worker.wakes.wake()  # a caller can be waiting in another thread
        deadline = time.monotonic() + _GRACE_S
        for worker in self._workers:
            if worker.thread.ident is not None and worker.thread is not threading.current_thread():
                worker.thread.join(max(deadline - time.monotonic(), 0.0))


class _Worker:
    """One thread: its queues and its buffers."""

    def __init__(
        self,
        worker_id: int,
        job: Job,
        buffers: BufferPool,
        finish: Callable[[Any], Any] | None,
        note_work: Callable[[Work], None],
    ) -> None:
        self._core = BatchMaker(worker_id, job, buffers, finish, is_thread=True)
        self._buffers = buffers
        self._note_work = note_work
        self.tasks: queue.SimpleQueue[Task | Begin | None] = queue.SimpleQueue()
        self.wakes = Wakeup()  # the consumer, which looks into its tasks for answers
        self.sent: deque[Task] = deque()  # the consumer's tasks, in the order of their answers
        self.sent_lock = threading.Lock()  # without the GIL, a deque cannot be copied while it changes
        self.has_begun = threading.Event()
        # A daemon thread: else an interpreter that exits with a live iterator would wait forever.
        self.thread = threading.Thread(target=self._run, name=f"fastload-worker-{worker_id}", daemon=True)

    def drop_tasks(self) -> None:
        """Drop the unanswered tasks: no caller waits for them."""
        with self.sent_lock:
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

    def _next_task(self) -> Task | Begin | None:
        since_ns = time.perf_counter_ns()
        task = self.tasks.get()
        self._core.meter.waited(since_ns)
        return task

    def _answer(self, task: Task) -> None:
        self._buffers.begin()
        answer = self._core.answer(task.index, task.key, self._coming(task))
        self._buffers.end()
        if answer.kind is Kind.BATCH and not answer.nbytes:
            answer.nbytes = nbytes_of(answer.payload)
        self._note_work(answer.work)
        task.answer = answer  # last, because the consumer checks it
        self.wakes.wake()

    def _coming(self, task: Task) -> Iterator[Any]:
        with self.sent_lock:
            sent = list(self.sent)
        for coming in sent:
            if coming.number > task.number:
                yield coming.index


# --- copies of what is random ----------------------------------------------------------------------------
#
# A pipeline keeps values of the current call in its attributes, so two threads must not call it at once. With
# `seeding="sample"` two threads must not draw from the same generator either. But a copy of the whole dataset
# would copy its images. So each thread gets deep copies of both and shallow copies of the few objects that
# hold them, and shares all other objects. Pipelines elsewhere are shared: threads call them one at a time
# (see `rng.entry_points`).


def copies_for_threads(
    dataset: Any, collate_fn: Any, num_threads: int, *, with_generators: bool
) -> list[tuple[Any, Any]]:
    """For each thread, copies of ``dataset`` and ``collate_fn`` with their own pipelines.

    An object without pipelines is not copied. An object that both hold stays one object in a thread's copies.

    Args:
        dataset: The dataset.
        collate_fn: The function that collates.
        num_threads: The number of copies.
        with_generators: Whether the copies also have their own generators, if they can be seeded.
    """
    search = Search(dataset, collate_fn)
    random_ones = search.transforms
    if with_generators:
        random_ones += [held.generator for held in held_generators(search) if held.seed is not None]
    holders = search.holding(random_ones)
    copiers = [_Copier(random_ones, holders) for _ in range(num_threads)]
    return [(copier.copied(dataset), copier.copied(collate_fn)) for copier in copiers]


class _Copier:
    """Makes one copy."""

    def __init__(self, random_ones: list[Any], holders: dict[int, Any]) -> None:
        self._holders = holders
        self._random_ones = {id(value) for value in random_ones}
        # Also deepcopy's memo: an object that two pipelines share is shared by their copies.
        self._copies: dict[int, Any] = {}

    def _holds(self, value: Any) -> bool:
        return id(value) in self._holders

    def copied(self, value: Any) -> Any:
        """The counterpart of a value in the copy."""
        if not self._holds(value):
            return value
        if id(value) not in self._copies:
            if id(value) in self._random_ones:
                self._copies[id(value)] = copy.deepcopy(value, self._copies)
            else:
                self._copies[id(value)] = self._rebuilt(value)
        return self._copies[id(value)]

    def _rebuilt(self, value: Any) -> Any:
        """A shallow copy that holds copies."""
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.copied(value.__self__))
        if isinstance(value, functools.partial):
            named = {name: self.copied(part) for name, part in value.keywords.items()}
            return type(value)(self.copied(value.func), *map(self.copied, value.args), **named)
        if isinstance(value, tuple):
            parts = map(self.copied, value)
            return value._make(parts) if hasattr(value, "_make") else tuple(parts)
        twin = self._copies[id(value)] = copy.copy(value)  # before its parts, which can refer to it
        if isinstance(value, dict):
            twin.update({key: self.copied(part) for key, part in value.items()})
        elif hasattr(type(value), "extend") and hasattr(type(value), "clear"):  # lists and deques
            twin.clear()
            twin.extend(map(self.copied, value))
        for name, part in attributes(value).items():
            if self._holds(part):
                object.__setattr__(twin, name, self.copied(part))
        return twin
