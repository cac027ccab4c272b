"""No workers: batches are made in the consumer's thread, when it waits for them."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from fastload.errors import LoaderClosedError
from fastload.memory.lease import BufferPool
from fastload.rng.entry_points import THREAD, Drawing, seeded_by
from fastload.rng.seeding import local_streams
from fastload.system.cache_counts import cache_counts
from fastload.workers.batch_maker import BatchMaker
from fastload.workers.messages import WorkerCounters
from fastload.workers.pool import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.batch.dataset_state import DatasetState
    from fastload.batch.plan import Plan
    from fastload.workers.messages import PendingBatch

Buffers = tuple[BufferPool, "weakref.ref[InlinePool]"]  # and the pool that has used them last


class InlinePool(WorkerPool):
    """The one worker of an iterator without workers; see `WorkerPool`.

    A request is read when `take` is called, and read again if Ctrl-C interrupts that. One thread reads at a
    time, because rows and buffers belong to the pool.
    """

    pins = True

    def __init__(
        self, plan: Plan, count: Callable[[WorkerCounters], None], pin: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(plan, count, pin)
        self._lock = threading.RLock()  # held by the thread that reads
        self._is_reading = self._is_used_up = False
        self.due: PendingBatch | None = None  # the request that is read next
        self._streams = None
        if plan.seeds_pipelines and not plan.seeds_samples:
            self._streams = local_streams(plan.base_seed)

    @property
    def is_ours(self) -> bool:
        """Yes: a forked process can go on with its copy."""
        return True

    def take_buffers(self, kept: Buffers | None) -> Buffers:
        """Use buffers whose pages are warm, unless another pool uses them still; return what to keep."""
        buffers, user = kept or (None, None)
        other = None if user is None else user()
        if buffers is None or (other is not None and not other._is_used_up):
            buffers = BufferPool(self._plan.max_bytes)
        self._buffers = buffers
        self._maker = BatchMaker(None, self._plan.load, buffers, self._pin, role="local")
        return buffers, weakref.ref(self)

    def start(self) -> None:
        """Do nothing."""

    def begin_epoch(self, epoch: int | None, dataset_states: list[DatasetState] | None) -> None:
        """Begin the epoch; an error of the dataset is raised here."""
        states = dataset_states
        with seeded_by(self._streams):  # iter() of an iterable dataset can draw
            self._maker.open(self._plan, None if states is None else states[0])

    def submit(self, pending: PendingBatch) -> None:
        """Note the request."""
        self.due = pending

    def finish(self, worker_id: int) -> None:
        """Let the next pool have the buffers."""
        self._is_used_up = True

    def take(self, worker_id: int | None) -> PendingBatch | None:
        """Make the batch that was asked for."""
        with self._lock:
            pending = self.due
            if self._is_reading:
                raise RuntimeError(
                    "the dataset requested a batch from the iterator that is reading it: make a second "
                    "iterator with iter(loader)"
                )
            if self._is_closed or pending is None:
                raise LoaderClosedError
            hits, misses = cache_counts.hits, cache_counts.misses
            if cache_counts.reasons:
                cache_counts.take_reasons()  # of what this thread has read outside of loaders
            outside = THREAD.drawing
            try:
                self._is_reading = True
                self._buffers.begin()
                if self._streams is not None:
                    THREAD.drawing = Drawing(self._streams)
                pending.reply = self._maker.reply_to(pending.index, pending.key)
            finally:
                # These come first, and call nothing: a signal can interrupt any call.
                THREAD.drawing = outside
                self._is_reading = False
                self._buffers.end()
                if cache_counts.hits != hits or cache_counts.misses != misses:
                    hits, misses = cache_counts.hits - hits, cache_counts.misses - misses
                    self._count(WorkerCounters(0, hits, misses, cache_counts.take_reasons()))
            self.due = None
        if self._is_closed:
            raise LoaderClosedError
        return pending

    def wait(self, worker_id: int | None, deadline: float | None) -> None:
        """Do nothing: `take` has made the batch."""

    def close(self) -> None:
        """Release the buffers, unless another thread reads; batches that the caller holds stay valid."""
        self._is_closed = True
        if self._is_used_up or not self._lock.acquire(blocking=False):
            return
        try:
            self._buffers.clear()
            self._is_used_up = True
        finally:
            self._lock.release()
