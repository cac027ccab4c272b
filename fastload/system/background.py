"""Threads in the background: `Background` runs calls in order, and `Wakeup` wakes who waits for them."""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Wakeup:
    """One thread waits, others wake it. A wake that comes early is kept; several count as one."""

    def __init__(self) -> None:
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()

    def wake(self, _: object = None) -> None:
        """Wake the waiting thread, or let its next wait return immediately; can be a callback of a future."""
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


class Background:
    """A thread that runs calls, one after another; they handle their errors themselves.

    A daemon thread: an interpreter that exits with a live iterator would wait for one of
    `concurrent.futures` until its last call has returned.

    Attributes:
        thread: The thread; `start` starts it.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]] | None] = (
            queue.SimpleQueue()
        )
        self.thread = threading.Thread(target=_run, args=(self._calls,), name=name, daemon=True)

    def start(self) -> None:
        """Start the thread, which then runs what was submitted so far."""
        self.thread.start()

    def submit(self, call: Callable[..., object], *arguments: Any) -> None:
        """Run a call after all those before."""
        self._calls.put((call, arguments))

    def close(self) -> None:
        """End the thread after the calls that were submitted; does not wait for it."""
        self._calls.put(None)

    def join(self, limit_s: float) -> None:
        """Wait at most ``limit_s`` until the thread has ended, if it was started and is not this one."""
        if self.thread.ident is not None and self.thread is not threading.current_thread():
            self.thread.join(limit_s)


def _run(calls: queue.SimpleQueue[Any]) -> None:
    while (task := calls.get()) is not None:
        call, arguments = task
        del task
        call(*arguments)
        del call, arguments  # else this frame would keep them alive until the next call
