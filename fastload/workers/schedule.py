"""Decide which worker makes which batch, and which batch comes next.

Pure code: no I/O, no torch, no clock. The rules are those of torch.utils.data.DataLoader with in_order=True:

1. Tasks are numbered in the order in which the sampler gave their indices.
2. Task k goes to the next active worker in a fixed cycle, which starts at worker 0 in every epoch. With all
   workers active this is worker k mod W, so each worker's random streams are reproducible.
3. Batches are delivered in the order of their tasks.
4. A worker whose share of an iterable dataset has ended gets no more tasks. The worker answers "ended" to its
   remaining tasks, once for each and in order, and these answers are skipped.
"""

from __future__ import annotations

from collections import deque


class Schedule:
    """The order of one epoch.

    Args:
        num_workers: How many workers there are; all start active.
        first_worker: The worker that gets the first task.
    """

    def __init__(self, num_workers: int, first_worker: int = 0) -> None:
        self._active = [True] * num_workers
        self._cursor = first_worker
        self._pending: deque[tuple[int, int]] = deque()
        self._num_tasks = 0

    def assign(self) -> tuple[int, int] | None:
        """Number a new task and choose its worker: ``(task, worker)``, or None when no worker is active."""
        for _ in self._active:
            worker = self._cursor
            self._cursor = (worker + 1) % len(self._active)
            if self._active[worker]:
                task = self._num_tasks
                self._num_tasks += 1
                self._pending.append((task, worker))
                return task, worker
        return None

    def head(self) -> tuple[int, int] | None:
        """The unanswered task whose answer is due next, or None at the end of the epoch."""
        return self._pending[0] if self._pending else None

    def answer(self) -> tuple[int, int]:
        """Remove the head: its worker has answered.

        Raises:
            IndexError: No task is pending.
        """
        return self._pending.popleft()

    def is_active(self, worker: int) -> bool:
        """Whether ``worker`` still delivers batches in this epoch."""
        return self._active[worker]

    def exhaust(self, worker: int) -> None:
        """Record that ``worker`` has no more samples in this epoch."""
        self._active[worker] = False
