"""A pool whose batches are copied into pinned memory, off the main thread (`pin_memory=True`)."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from fastload.device.pinning import pin_error
from fastload.system.background import Background, Wakeup
from fastload.workers.messages import ReplyKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.batch.dataset_state import DatasetState
    from fastload.workers.messages import PendingBatch
    from fastload.workers.pool import WorkerPool

_JOIN_S = 5.0


class PinnedPool:
    """Another pool, all of whose replies one thread takes, in their order, and pins ahead of the consumer.

    As soon as a batch is copied, its slot is free for the worker.

    Args:
        pool: The other pool.
        pin: Pins a batch.
        in_order: Whether replies are taken in the order of the requests.
    """

    def __init__(self, pool: WorkerPool, pin: Callable[[Any], Any], *, in_order: bool) -> None:
        self._pool = pool
        self._pin = pin
        self._in_order = in_order
        self._num_left = 0  # requests whose replies the consumer has not taken
        self._ready: deque[tuple[PendingBatch | None, BaseException | None]] = deque()
        self._wakes = Wakeup()
        self._thread = Background("fastload-pin")
        self._thread.submit(torch.set_num_threads, 1)  # a copy on all cores would starve the workers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def start(self) -> None:
        """Start the workers and the thread."""
        self._pool.start()
        self._thread.start()

    def begin_epoch(self, epoch: int | None, dataset_states: list[DatasetState] | None) -> None:
        """Begin an epoch, once the thread has no reply of an older one to wait for."""
        while self._num_left:
            if self.take(None) is None:
                self.wait(None, None)
        self._pool.begin_epoch(epoch, dataset_states)

    def submit(self, pending: PendingBatch) -> None:
        """Request a batch from its worker."""
        self._pool.submit(pending)
        self._num_left += 1
        self._thread.submit(self._receive, pending.worker if self._in_order else None)

    def _receive(self, worker_id: int | None) -> None:
        pending, error = None, None
        try:
            while (pending := self._pool.take(worker_id)) is None:
                self._pool.wait(worker_id, None)
            if pending.reply is not None and pending.reply.kind is ReplyKind.BATCH:
                try:
                    pending.reply.payload = self._pin(pending.reply.payload)
                except Exception:  # noqa: BLE001  # raised in the consumer's thread at this batch's turn
                    pending.reply.kind, pending.reply.payload = ReplyKind.ERROR, pin_error()
        except BaseException as caught:  # noqa: BLE001  # as above
            error = caught
        self._ready.append((pending, error))
        self._wakes.wake()

    def take(self, worker_id: int | None) -> PendingBatch | None:
        """The next batch, pinned; None if it is not ready.

        Raises:
            Exception: The error of receiving it.
        """
        self._pool.expect_open()  # if the pool is closed, the thread has nothing
        if not self._ready:
            return None
        pending, error = self._ready.popleft()
        self._num_left -= 1
        if error is None:
            return pending
        try:
            raise error
        finally:
            del error  # breaks a cycle between the error and this frame

    def wait(self, worker_id: int | None, deadline: float | None) -> None:
        """Wait until the next batch is ready, as `Wakeup.wait`."""
        self._wakes.wait(deadline)

    def read_slots(self, backend: Any, stream: Any) -> None:
        """Do nothing: batches are copied out of their slots."""

    def close(self) -> None:
        """Stop the workers and the thread."""
        self._pool.close()
        if self._pool.is_ours:
            self._thread.close()
            self._thread.join(_JOIN_S)
