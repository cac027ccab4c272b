"""Workers: the interface of the workers of one iterator; `pool` has processes, `threads` has threads.

An object that implements it takes tasks for a worker and returns the worker's answers, in the order of the
tasks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fastload.batch.iterable_state import IterableState
    from fastload.workers.process import WorkerView
    from fastload.workers.task import Task


class Workers(Protocol):
    """All workers of one iterator.

    Attributes:
        processes: The worker processes, by worker number; empty for threads. They stay after `close`.
    """

    processes: list[WorkerView]

    @property
    def is_ours(self) -> bool:
        """Whether this process started the workers; False in a process forked from it."""

    def start(self) -> None:
        """Start the workers, once. After an exception, `close` ends those that were started.

        Raises:
            WorkerStartError: Worker processes cannot be started from here.
        """

    def submit(self, worker_id: int, task: Task) -> None:
        """Give a worker its next task."""

    def begin_epoch(self, epoch: int | None, dataset_states: list[IterableState] | None) -> None:
        """Tell all workers that an epoch begins; the caller gets no answer to an older task.

        Args:
            epoch: Its number, for datasets that have a set_epoch(); None: they know it, or the user set none.
            dataset_states: The state from which each worker's copy of the dataset goes on; None: no states.
        """

    def take(self, worker_id: int) -> Task | None:
        """The worker's next task, with its answer; None if it has not answered yet. Never waits.

        Raises:
            WorkerDiedError: A worker process has ended.
            LoaderClosedError: The workers were stopped.
        """

    def wait(self, worker_id: int, deadline: float | None) -> None:
        """Wait until `take` may return an answer of this worker, or raise; it may also return None again.

        An exception from a signal handler changes nothing: the next call waits again.

        Args:
            worker_id: The worker whose answer is due.
            deadline: A time of `time.monotonic`; None waits without limit.

        Raises:
            TimeoutError: The deadline has passed.
        """

    def expect_open(self) -> None:
        """Raise if no more answers can come.

        Raises:
            WorkerDiedError: A worker process has ended; the thread that pins batches may have noticed first.
            LoaderClosedError: The workers were stopped.
        """

    def close(self) -> None:
        """Stop the workers; idempotent. Batches that the caller holds stay valid."""
