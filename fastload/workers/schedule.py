"""Decide which worker makes which batch, and which batch comes next.

Pure code: no I/O, no torch, no clock. The rules are those of torch.utils.data.DataLoader:

1. Batches are requested in the order in which the sampler gave their indices.
2. In order, batch k goes to the next active worker in a fixed cycle, which starts at worker 0 in every epoch.
   With all workers active this is worker k mod W, so each worker's random streams are reproducible.
3. In order, batches are delivered in the order of the requests. Otherwise, whichever worker replies first is
   next, and a request goes to an active worker that has the fewest.
4. A worker whose share of an iterable dataset has ended gets no more requests. The worker replies "ended" to
   those that it has, once for each and in order, and these replies are skipped.
"""

from __future__ import annotations

from collections import deque


class Schedule:
    """The order of the requests and replies of one epoch.

    Args:
        num_workers: How many workers there are; all start active.
        first_worker: The worker that makes the first batch.
        in_order: Whether batches are delivered in the order of the requests.

    Attributes:
        pending: The workers of the requests whose replies were not yet removed, the oldest first.
    """

    def __init__(self, num_workers: int, first_worker: int = 0, *, in_order: bool = True) -> None:
        self._active = [True] * num_workers
        self._cursor = first_worker
        self._in_order = in_order
        self.pending: deque[int] = deque()

    def assign(self) -> int | None:
        """Choose the worker of a new request; None when no worker is active."""
        num_workers, worker = len(self._active), self._cursor
        if not (self._in_order and self._active[worker]):
            in_turn = [*range(worker, num_workers), *range(worker)]
            active = [other for other in in_turn if self._active[other]]
            if not active:
                return None
            worker = active[0] if self._in_order else min(active, key=self.pending.count)
        self._cursor = (worker + 1) % num_workers
        self.pending.append(worker)
        return worker

    def due(self) -> int | None:
        """The worker whose reply is due next; None: whichever replies first. Call it while any is pending."""
        return self.pending[0] if self._in_order else None

    def remove(self, worker: int) -> None:
        """Remove the oldest request of ``worker``, which has replied.

        Raises:
            ValueError: It has none.
        """
        self.pending.remove(worker)

    def is_active(self, worker: int) -> bool:
        """Whether ``worker`` still delivers batches in this epoch."""
        return self._active[worker]

    def exhaust(self, worker: int) -> None:
        """Record that ``worker`` has no more samples in this epoch."""
        self._active[worker] = False
