"""Workers: the interface of the workers of one iterator; `pool` has processes, `threads` has threads.

An object that implements it takes tasks for a worker and returns the worker's answers, in the order of the
tasks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from fastload.batch.iterable_state import IterableState
    from fastload.batch.replacing import BatchId
    from fastload.rng.sample_streams import StreamOrigin
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

    def submit(
        self,
        worker_id: int,
        number: int,
        index: Any,
        origin: StreamOrigin | None = None,
        batch_id: BatchId | None = None,
    ) -> None:
        """Give a worker its next task; the arguments after the first are those of `Task`."""

    def begin_epoch(self, epoch: int | None, dataset_states: list[IterableState] | None) -> None:
        """Tell all workers that an epoch begins; the caller gets no answer to an older task.

        Args:
            epoch: Its number, for datasets that have a set_epoch(); None: they know it, or the user set none.
            dataset_states: The state from which each worker's copy of the dataset goes on; None: no states.
        """

    def take(self, worker_id: int, number: int, timeout_s: float) -> Task:
        """The worker's answer to a task: its `kind` and `payload`, a batch or an error.

        The caller may ask for the same task again until it asks for a later one, and takes the payload out
        itself.

        Args:
            worker_id: The worker whose answer is due.
            number: The number of the task; the caller no longer needs earlier tasks.
            timeout_s: How long to wait; 0 waits without limit.

        Raises:
            TimeoutError: No answer came in time.
            WorkerDiedError: A worker process has ended.
            LoaderClosedError: The workers were stopped.
        """

    def expect_open(self) -> None:
        """Raise if no more answers can come.

        Raises:
            WorkerDiedError: A worker process has ended; the thread that pins batches may have noticed first.
            LoaderClosedError: The workers were stopped.
        """

    def close(self) -> None:
        """Stop the workers; idempotent. Batches that the caller holds stay valid."""
