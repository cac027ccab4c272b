"""`pin_memory=True` without a device: batches copied into torch's pinned memory, off the main thread.

Runs as one daemon thread in the consumer's process, only while an accelerator is there. The memory comes
from torch's own pinned allocator, which knows which copies are pending; the slot goes back to its worker as
soon as the thread has copied it.
"""

from __future__ import annotations

import collections
import queue
import threading
import time
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
        receive: Gives the next answer, by what `expect` was given; blocks; raises to end the work on it.
        pin: Pins the batch of an answer.
        device_index: The accelerator that was current when the iterator was made.
    """

    def __init__(
        self, receive: Callable[[Any], Any], pin: Callable[[Any], None], device_index: int | None
    ) -> None:
        self._receive = receive
        self._pin = pin
        self._device_index = device_index
        self._due: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # An answer stays until the consumer says that it has it: a signal handler that raises loses none.
        self._ready: collections.deque[tuple[Any, BaseException | None]] = collections.deque()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fastload-pin", daemon=True)
        self._thread.start()

    def expect(self, due: Any) -> None:
        """Announce which answer is due next, as `receive` takes it; not None."""
        self._due.put(due)

    def get(self, timeout_s: float) -> Any:
        """The next answer, pinned; the same again until `take_out`.

        Raises:
            TimeoutError: None came within ``timeout_s`` (0 waits for ever).
            Exception: What receiving raised; the answer is taken out then.
        """
        deadline = time.monotonic() + timeout_s if timeout_s else None
        while not self._ready:
            try:
                self._wakes.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError from None
        answer, error = self._ready[0]
        if error is None:
            return answer
        self.take_out()
        try:
            raise error
        finally:
            del error  # or it would hold this frame, and this frame it

    def take_out(self) -> None:
        """The consumer has the answer that `get` gave."""
        self._ready.popleft()

    def close(self) -> None:
        """End the thread; call it after what `receive` waits for has been closed."""
        self._due.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        torch.set_num_threads(1)  # of this thread; a copy by all cores would starve the workers
        if self._device_index is not None:
            torch.accelerator.set_device_index(self._device_index)
        while (due := self._due.get()) is not None:
            answer, error = None, None
            try:
                answer = self._receive(due)
                self._pin(answer)
            except BaseException as caught:  # noqa: BLE001  # raised again in the consumer's thread
                error = caught
            self._ready.append((answer, error))
            if self._wakes.empty():  # else the consumer will look, and finds this answer too
                self._wakes.put(None)
            del answer, error  # or this frame would keep a batch alive until the next one


def pin_error(device_index: int | None) -> ExceptionWrapper:
    """The current exception as torch's pin thread reports it."""
    return ExceptionWrapper(where=f"in pin memory thread for device {device_index}")
