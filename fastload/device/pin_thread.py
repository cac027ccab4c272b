"""`pin_memory=True` without `device=`: copy batches into torch's pinned memory, off the main thread.

Runs as one daemon thread in the consumer's process, only if an accelerator is available. The memory comes
from torch's own pinned allocator, which knows the pending copies. As soon as the thread has copied a batch,
its slot is free for the worker.
"""

from __future__ import annotations

import collections
import queue
import threading
from typing import TYPE_CHECKING, Any

import torch

from fastload.system.remote_error import RemoteError
from fastload.system.torch_private import pin_memory
from fastload.system.wakeup import Wakeup

if TYPE_CHECKING:
    from collections.abc import Callable

_JOIN_S = 5.0


def pin_batch(batch: Any, device: str | None = None) -> Any:
    """``batch`` with every tensor in pinned memory, by torch's rules for nested batches."""
    return pin_memory(batch, device)


class PinThread:
    """Receives batches in order and pins them ahead of the consumer, from `start` on.

    Args:
        receive: Called with an argument of `expect`; blocks; returns that batch, or raises its error.
        pin: Pins what `receive` returned.
    """

    def __init__(self, receive: Callable[[Any], Any], pin: Callable[[Any], None]) -> None:
        self._receive = receive
        self._pin = pin
        self._expected: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ready: collections.deque[tuple[Any, BaseException | None]] = collections.deque()
        self._wakes = Wakeup()
        self._thread = threading.Thread(target=self._run, name="fastload-pin", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def expect(self, source: Any) -> None:
        """Announce the next batch in order, as an argument for `receive`; not None."""
        self._expected.put(source)

    def take(self) -> Any | None:
        """The next batch, pinned; None if it is not ready.

        Raises:
            Exception: The error of receiving it.
        """
        if not self._ready:
            return None
        batch, error = self._ready.popleft()
        if error is None:
            return batch
        try:
            raise error
        finally:
            del error  # breaks a cycle between the error and this frame

    def wait(self, deadline: float | None) -> None:
        """Wait until the next batch is ready, as `Wakeup.wait`."""
        self._wakes.wait(deadline)

    def close(self) -> None:
        """End the thread; call this after closing the source of `receive`."""
        self._expected.put(None)
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        torch.set_num_threads(1)  # for this thread; a copy on all cores would starve the workers
        while (source := self._expected.get()) is not None:
            batch, error = None, None
            try:
                batch = self._receive(source)
                self._pin(batch)
            except BaseException as caught:  # noqa: BLE001  # raised again in the consumer's thread
                error = caught
            self._ready.append((batch, error))
            self._wakes.wake()
            del batch, error  # else this frame would keep the batch alive until the next one


def pin_error(device_index: int | None) -> RemoteError:
    """The current exception as torch's pin thread reports it."""
    return RemoteError.current(f"in pin memory thread for device {device_index}")
