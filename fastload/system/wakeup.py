"""Wake a thread that waits until another one has done something visible."""

from __future__ import annotations

import queue
import time


class Wakeup:
    """One thread waits, others wake it. A wake that comes early is kept; several count as one."""

    def __init__(self) -> None:
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()

    def wake(self) -> None:
        """Wake the waiting thread, or let its next wait return immediately."""
        if self._wakes.empty():  # else the thread is already going to look
            self._wakes.put(None)

    def wait(self, deadline: float | None) -> None:
        """Wait for a `wake`.

        Raises:
            TimeoutError: None came before ``deadline``, a time of `time.monotonic`; None waits without limit.
        """
        try:
            self._wakes.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise TimeoutError from None
