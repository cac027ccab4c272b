"""A device that only takes time, on a virtual clock: each stream is the moment at which its work ends.

Copies and kernels take the seconds that the test says, the host's work advances the clock, and a host that
waits for an event jumps to its moment. So waits and idle times are exact figures.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

MS = 1_000_000


class Clock:
    """Stands in for the module `time`; its moments are in nanoseconds."""

    def __init__(self) -> None:
        self.now_ns = 0

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def perf_counter(self) -> float:
        return self.now_ns / 1e9

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class TimedStream:
    def __init__(self) -> None:
        self.end_ns = 0


class TimedBackend:
    """A backend whose copies take `copy_ms` each."""

    def __init__(self, clock: Clock, copy_ms: float = 2.0) -> None:
        self.device = torch.device("cpu")
        self.clock = clock
        self.copy_ns = round(copy_ms * MS)
        self.main = TimedStream()
        self.idle_ns = 0  # of the main stream, between kernels
        self._last_ns: int | None = None

    def kernel(self, ms: float) -> None:
        """Launch a kernel on the consumer's stream."""
        start_ns = max(self.clock.now_ns, self.main.end_ns)
        if self._last_ns is not None:
            self.idle_ns += start_ns - self._last_ns
        self.main.end_ns = self._last_ns = start_ns + round(ms * MS)

    # --- what the prefetcher asks for ---

    def expect_no_capture(self) -> None:
        pass

    def make_stream(self) -> TimedStream:
        return TimedStream()

    def current_stream(self) -> TimedStream:
        return self.main

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def allocate(self, likes: list[torch.Tensor], stream: TimedStream) -> list[torch.Tensor]:
        return list(map(torch.empty_like, likes))

    def copy(self, pinned: list[torch.Tensor], targets: list[torch.Tensor], stream: TimedStream) -> None:
        for source, target in zip(pinned, targets, strict=True):
            stream.end_ns = max(self.clock.now_ns, stream.end_ns) + self.copy_ns
            target.copy_(source)

    def move(self, value: Any) -> Any:
        return value

    def record_event(self, stream: TimedStream) -> int:
        return max(stream.end_ns, self.clock.now_ns)

    def wait_event(self, stream: TimedStream, event: int) -> None:
        stream.end_ns = max(stream.end_ns, event)

    def record_stream(self, tensor: torch.Tensor, stream: TimedStream) -> None:
        pass

    def is_done(self, event: int) -> bool:
        return self.clock.now_ns >= event

    def synchronize(self, event: int) -> None:
        self.clock.now_ns = max(self.clock.now_ns, event)

    @contextlib.contextmanager
    def on(self, stream: TimedStream) -> Iterator[None]:
        before, self.main = self.main, stream
        try:
            yield
        finally:
            self.main = before

    def register(self, address: int, nbytes: int) -> str:
        return ""

    def unregister(self, address: int) -> str:
        return ""
