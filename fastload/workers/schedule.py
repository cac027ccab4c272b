"""Decide which worker makes which batch, and which batch comes next.

Pure code: no I/O, no torch, no clock. The rules are those of torch.utils.data.DataLoader with in_order=True:

1. Batches are numbered in the order in which the sampler gave their indices.
2. Batch k goes to the next active worker in a fixed cycle, which starts at worker 0 in every epoch. With all
   workers active this is worker k mod W, so each worker's random streams are reproducible.
3. Batches are delivered in the order of their numbers.
4. A worker whose share of an iterable dataset has ended gets no more requests. The worker replies "ended" to
   those that it has, once for each and in order, and these replies are skipped.
"""

from __future__ import annotations

from collections import deque


class Schedule:
    """The order of the batches of one epoch.

    Args:
        num_workers: How many workers there are; all start active.
        first_worker: The worker that makes the first batch.

    Attributes:
        num_assigned: The batches that were numbered.
    """

    def __init__(self, num_workers: int, first_worker: int = 0) -> None:
        self._active = [True] * num_workers
        self._cursor = first_worker
        self._pending: deque[tuple[int, int]] = deque()
        self.num_assigned = 0

    def assign(self) -> tuple[int, int] | None:
        """Number a new batch and choose its worker: ``(number, worker)``; None when no worker is active."""
        for _ in self._active:
            worker = self._cursor
            self._cursor = (worker + 1) % len(self._active)
            if self._active[worker]:
                number = self.num_assigned
                self.num_assigned += 1
                self._pending.append((number, worker))
                return number, worker
        return None

    @property
    def num_pending(self) -> int:
        """The batches that were numbered and not yet removed."""
        return len(self._pending)

    def head(self) -> tuple[int, int] | None:
        """The batch that is due next and its worker; None at the end of the epoch."""
        return self._pending[0] if self._pending else None

    def pop(self) -> tuple[int, int]:
        """Remove the head: its worker has replied.

        Raises:
            IndexError: No batch is pending.
        """
        return self._pending.popleft()

    def is_active(self, worker: int) -> bool:
        """Whether ``worker`` still delivers batches in this epoch."""
        return self._active[worker]

    def exhaust(self, worker: int) -> None:
        """Record that ``worker`` has no more samples in this epoch."""
        self._active[worker] = False
