"""The contract of a pool of workers: of processes, threads and Ray actors, and of none.

A pool knows nothing of samplers and epochs' orders: it takes requests for batches of a worker, and returns
each worker's replies in the order of its requests. `settings` has the pools by name.
"""

from __future__ import annotations

import abc
import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar

from fastload.errors import LoaderClosedError, WorkerDiedError
from fastload.system.logs import log
from fastload.system.notes import add_note
from fastload.workers.messages import BeginEpoch, WorkerCounters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastload.batch.dataset_state import DatasetState
    from fastload.batch.plan import Plan
    from fastload.device.devices import Backend
    from fastload.workers.messages import PendingBatch

# How long workers have to finish their current sample when the pool is closed.
GRACE_S = 5.0

# How often a waiting caller checks its workers; a check costs little.
WATCH_INTERVAL_S = 5.0


def limit_s(deadline: float | None) -> float:
    """How long a caller waits before it checks its workers.

    Raises:
        TimeoutError: ``deadline``, a time of `time.monotonic`, has passed.
    """
    if deadline is None:
        return WATCH_INTERVAL_S
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return min(WATCH_INTERVAL_S, left_s)


def note_unsent(error: Exception, pending: PendingBatch) -> None:
    """Add to an error which index kept a request from being sent."""
    add_note(
        error,
        f"fastload: the index of batch {pending.number} could not be sent to worker {pending.worker}",
    )


class WorkerHandle:
    """The consumer's record of one worker process, thread or actor.

    Attributes:
        id: 0 to num_workers - 1.
        sent: Requests in the order of their replies, until `take` returns them.
        begin: What it begins the epoch with; a replacement, too.
    """

    def __init__(self, worker_id: int) -> None:
        self.id = worker_id
        self.sent: deque[PendingBatch] = deque()
        self.begin = BeginEpoch(None, None)

    @property
    def oldest(self) -> PendingBatch | None:
        """The request that the worker replies to next."""
        return self.sent[0] if self.sent else None

    @property
    def has_reply(self) -> bool:
        """Whether the worker has replied to its first request."""
        return bool(self.sent) and self.sent[0].reply is not None

    def begin_epoch(self, epoch: int | None, dataset_states: list[DatasetState] | None) -> BeginEpoch:
        """Note what the worker begins an epoch with, and return it."""
        self.begin = BeginEpoch(epoch, None if dataset_states is None else dataset_states[self.id])
        return self.begin


def asked(workers: Sequence[Any], worker_id: int | None) -> list[Any]:
    """The worker of this number; for None, those with requests, by the age of the `oldest`: none starves."""
    if worker_id is not None:
        return [workers[worker_id]]
    requests = [(worker.oldest, worker) for worker in workers]
    in_use = [(oldest.number, worker) for oldest, worker in requests if oldest is not None]
    return [worker for _, worker in sorted(in_use, key=lambda item: item[0])]


class WorkerPool(abc.ABC):
    """The workers of one iterator, from `start` on.

    Args:
        plan: What its workers run.
        count: Called with the counters of workers, in any thread.
        pin: Called with each batch where it is made, if the pool `pins`; the caller gets the result. None: no
            change.

    Attributes:
        processes: multiprocessing's objects of worker processes, as torch's iterators list them; stays after
            `close`.
    """

    uses_multiprocessing: ClassVar[bool] = False  # a multiprocessing context starts the workers
    uses_threads: ClassVar[bool] = False  # workers are threads that share the dataset
    pins: ClassVar[bool] = False  # batches are pinned where they are made
    runs_elsewhere: ClassVar[bool] = False  # workers need no CPUs of this machine

    def __init__(
        self, plan: Plan, count: Callable[[WorkerCounters], None], pin: Callable[[Any], Any] | None = None
    ) -> None:
        self.processes: list[Any] = []
        self._plan = plan
        self._count = count
        self._pin = pin
        self._pid = os.getpid()
        self._is_closed = False
        self._death = ""  # the message of the error, if the pool closed because workers died
        self._restarts_left = plan.num_restarts

    @property
    def is_ours(self) -> bool:
        """Whether this process started the workers; False in a process forked from it."""
        return os.getpid() == self._pid

    def expect_open(self) -> None:
        """Raise LoaderClosedError if the pool was closed, WorkerDiedError if a worker died."""
        if self._death:
            raise WorkerDiedError(self._death)
        if self._is_closed:
            raise LoaderClosedError

    def _note_death(self, who: str, causes: str) -> None:
        """From here on `expect_open` raises WorkerDiedError."""
        self._death = f"DataLoader worker ({who}) exited unexpectedly: {causes}"
        log.error("%s", self._death)

    def _use_restart(self, cause: str) -> None:
        self._restarts_left -= 1
        self._count(WorkerCounters(num_restarts=1))
        log.warning(
            "%s A new worker reads its unfinished batches again; max_worker_restarts allows %d more",
            cause,
            self._restarts_left,
        )

    @abc.abstractmethod
    def start(self) -> None:
        """Start the workers.

        Raises:
            WorkerStartError: Workers cannot be started from here.
        """

    @abc.abstractmethod
    def begin_epoch(self, epoch: int | None, dataset_states: list[DatasetState] | None) -> None:
        """Begin an epoch in each worker; requests of an older epoch are dropped.

        Args:
            epoch: As for `BatchMaker.begin_epoch`.
            dataset_states: The state of each worker's copy of the dataset; threads share the dataset.
        """

    @abc.abstractmethod
    def submit(self, pending: PendingBatch) -> None:
        """Request a batch from its worker; never blocks."""

    @abc.abstractmethod
    def finish(self, worker_id: int) -> None:
        """Let a worker exit when it has replied to its requests: there are no more.

        So it exits while the caller computes: a process that has mapped gigabytes takes a tenth of a second
        to exit, for which `close` would wait.
        """

    @abc.abstractmethod
    def take(self, worker_id: int | None) -> PendingBatch | None:
        """The worker's next batch with its reply; None if it has not replied yet.

        For the worker None, it is the next batch of any worker. A batch is an object of the worker thread, a
        view of a slot, lent to the caller, or a copy.
        """

    @abc.abstractmethod
    def wait(self, worker_id: int | None, deadline: float | None) -> None:
        """Wait until `take` has something to do: a reply, a death, or the end of the pool.

        Raises:
            TimeoutError: Nothing came before ``deadline``, a time of `time.monotonic`.
        """

    def read_slots(self, backend: Backend, stream: Any) -> None:  # noqa: B027  # most pools have no slots
        """Let a device read slots in place; the caller keeps each batch until the device has read it."""

    def stop_reading_slots(self) -> None:  # noqa: B027
        """Stop what `read_slots` began; waits for the copies in flight."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop the workers; batches that the caller holds stay valid. Can be called in any state."""
