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
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from fastload.memory.lease import BufferPool
from fastload.nested.attributes import attributes
from fastload.rng.generators import Search
from fastload.system.background import Background, Wakeup
from fastload.workers.batch_maker import BatchMaker
from fastload.workers.pool import GRACE_S, WorkerHandle, WorkerPool, asked

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.batch.dataset_state import DatasetState
    from fastload.batch.plan import Plan
    from fastload.workers.messages import PendingBatch, WorkerCounters

# One for the caller's batch, one for the batch it takes next, one for the batch being written.
_BUFFERS_BEYOND_PREFETCH = 3


class ThreadPool(WorkerPool):
    """The worker threads of one iterator; see `WorkerPool`."""

    uses_threads = pins = True

    def __init__(
        self, plan: Plan, count: Callable[[WorkerCounters], None], pin: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__(plan, count, pin)
        copies = copies_for_threads(
            plan.dataset, plan.collate_fn, plan.num_workers, with_generators=plan.seeds_samples
        )
        # The loader has called set_epoch() of its own dataset; a thread's can be a copy.
        self._has_copies = copies[0][0] is not plan.dataset
        self._wakes = Wakeup()  # the consumer, which looks into its requests for replies
        plans = [dataclasses.replace(plan, dataset=own, collate_fn=collate_fn) for own, collate_fn in copies]
        self._workers = [
            _WorkerThread(worker_id, own, count, pin, self._wakes) for worker_id, own in enumerate(plans)
        ]

    def start(self) -> None:
        """Start the threads."""
        num_threads = torch.get_num_threads()
        try:
            for worker in self._workers:
                worker.background.start()
            for worker in self._workers:
                worker.has_begun.wait()
        finally:
            torch.set_num_threads(num_threads)  # threads that begin later inherit the last setting

    def submit(self, pending: PendingBatch) -> None:
        """Request a batch from its worker."""
        self.expect_open()
        worker = self._workers[pending.worker]
        worker.sent.append(pending)
        worker.background.submit(worker.reply, pending)

    def finish(self, worker_id: int) -> None:
        """Do nothing: threads stop at once."""

    def begin_epoch(self, epoch: int | None, dataset_states: list[DatasetState] | None) -> None:
        """Drop all older requests and begin an epoch; threads do not use `dataset_states`."""
        for worker in self._workers:
            worker.drop_requests()
            worker.background.submit(worker.maker.begin_epoch, epoch if self._has_copies else None, None)

    def take(self, worker_id: int | None) -> PendingBatch | None:
        """The worker's next batch with its reply, as the object that the thread made; None: no reply yet."""
        self.expect_open()
        worker: _WorkerThread
        for worker in asked(self._workers, worker_id):
            if worker.has_reply:
                return worker.sent.popleft()
        return None

    def wait(self, worker_id: int | None, deadline: float | None) -> None:
        """Wait until a worker has replied, or `close` was called."""
        self._wakes.wait(deadline)

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
            worker.drop_requests()
            worker.background.submit(worker.buffers.clear)
            worker.background.close()
        self._wakes.wake()  # a caller can be waiting in another thread
        deadline = time.monotonic() + GRACE_S
        for worker in self._workers:
            worker.background.join(max(deadline - time.monotonic(), 0.0))


class _WorkerThread(WorkerHandle):
    """One thread: its queues and its buffers."""

    def __init__(
        self,
        worker_id: int,
        plan: Plan,
        count: Callable[[WorkerCounters], None],
        pin: Callable[[Any], Any] | None,
        wakes: Wakeup,
    ) -> None:
        super().__init__(worker_id)
        self.buffers = BufferPool(
            plan.max_bytes // plan.num_workers, plan.prefetch_factor + _BUFFERS_BEYOND_PREFETCH
        )
        self.maker = BatchMaker(worker_id, plan.load, self.buffers, pin, role="thread")
        self._count = count
        self._wakes = wakes
        self.has_begun = threading.Event()
        self.background = Background(f"fastload-worker-{worker_id}")
        self.background.submit(self._begin)

    def drop_requests(self) -> None:
        """Drop the requests without a reply: no caller waits for them."""
        for pending in self.sent:
            pending.is_stale = True
        self.sent.clear()

    def _begin(self) -> None:
        torch.set_num_threads(1)  # of this thread
        self.has_begun.set()
        self.maker.begin()

    def reply(self, pending: PendingBatch) -> None:
        """Make a batch, in the thread, unless nobody waits for it any more."""
        if not pending.is_stale:
            self.buffers.begin()
            reply = self.maker.make(pending.index, pending.key)
            self.buffers.end()
            self._count(reply.counters)
            pending.reply = reply  # last, because the consumer checks it
            self._wakes.wake()


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
        random_ones += [described.generator for described in search.seedable]
    holders = search.holding(random_ones)
    parts = [dataset, collate_fn]
    for holder in holders.values():
        if not any(holder is value for value in random_ones):
            parts += attributes(holder).values()
            parts += holder.values() if isinstance(holder, dict) else ()
            parts += holder if isinstance(holder, (list, tuple, deque)) else ()
    # A copy takes what is in its memo as it is.
    shared = {id(part): part for part in parts if id(part) not in holders}
    return [copy.deepcopy((dataset, collate_fn), dict(shared)) for _ in range(num_threads)]
