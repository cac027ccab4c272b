"""`pin_memory=True` without a device: batches copied into torch's pinned memory, off the main thread.

Runs as one daemon thread in the consumer's process, only while an accelerator is there. The memory comes
from torch's own pinned allocator, which knows which copies are pending; the slot goes back to its worker as
soon as the thread has copied it.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.pin_memory import pin_memory

if TYPE_CHECKING:
    from collections.abc import Callable

_JOIN_S = 5.0


def pin_batch(batch: Any, device: str | None = None) -> Any:
    """``batch`` with every tensor in pinned memory, by torch's rules for nests."""
    return pin_memory(batch, device)


class PinThread:
    """Receives answers in order and pins their batches ahead of the consumer.

    Args:
        receive: Gives the next answer of a worker; blocks; raises to end the thread's work on it.
        pin: Turns an answer into one whose batch is pinned.
        device_index: The accelerator that was current when the iterator was made.
    """

    def __init__(
        self, receive: Callable[[int], Any], pin: Callable[[Any], Any], device_index: int | None
    ) -> None:
        self._receive = receive
        self._pin = pin
        self._device_index = device_index
        self._due: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fastload-pin", daemon=True)
        self._thread.start()

    def expect(self, worker: int) -> None:
        """Announce that an answer of ``worker`` is due next."""
        self._due.put(worker)

    def get(self, timeout_s: float) -> Any:
        """The next answer, pinned.

        Raises:
            TimeoutError: None came within ``timeout_s`` (0 waits for ever).
            Exception: What receiving raised.
        """
        try:
            answer, error = self._ready.get(timeout=timeout_s or None)
        except queue.Empty:
            raise TimeoutError from None
        if error is None:
            return answer
        try:
            raise error
        finally:
            del error  # or it would hold this frame, and this frame it

    def close(self) -> None:
        """End the thread; call it after what `receive` waits for has been closed."""
        self._due.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        torch.set_num_threads(1)  # of this thread; a copy by all cores would starve the workers
        if self._device_index is not None:
            torch.accelerator.set_device_index(self._device_index)
        while (worker := self._due.get()) is not None:
            answer, error = None, None
            try:
                answer = self._receive(worker)
            except Exception as caught:  # noqa: BLE001  # raised again in the consumer's thread
                error = caught
            else:
                answer = self._pin(answer)
            self._ready.put((answer, error))
            del answer, error  # or this frame would keep a batch alive until the next one


def pin_error(device_index: int | None) -> ExceptionWrapper:
    """The current exception as torch's pin thread reports it."""
    return ExceptionWrapper(where=f"in pin memory thread for device {device_index}")
