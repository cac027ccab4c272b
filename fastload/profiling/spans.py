"""Which stage a thread is in, and for how long; measured for whole batches.

Rules:

1. A stage's time excludes the stages that it calls: the times of a batch's stages add up to its whole time.
2. A thread that is not in a measured batch pays for one attribute of a thread-local object per probe.
3. Not every batch is measured in detail. `Sampling` chooses how many, so that measuring costs at most
   `MAX_SHARE` of the time.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import TYPE_CHECKING, Any

from fastload.profiling.recording import Row, Sums

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.profiling.recording import Recording

MAX_SHARE = 0.01  # of the time that a batch takes
EVENT_NS = 1_500  # the measured cost of entering and leaving a stage, with its wrapper (benchmarks/NOTES.md)
BATCH_NS = (
    100_000  # the cost of putting probes in place for a batch, and of the calls that are slower after it
)
MAX_STRIDE = 256

Key = tuple[str, str]  # stage, name
OWN_CODE: Key = ("dataset", "")  # the dataset's own code, outside every other stage


class Spans:
    """The stages of one batch in one thread."""

    def __init__(self) -> None:
        self.num_events = 0
        self.sums: dict[Key, list[int]] = {}
        self._stack: list[list[int]] = []
        self._wall_ns = time.perf_counter_ns()
        self._cpu_ns = time.thread_time_ns()

    def enter(self, key: Key) -> None:
        """Begin a stage."""
        self._add_time()
        sums = self.sums.get(key)
        if sums is None:
            sums = self.sums[key] = [0, 0, 0, 0, 0]
        sums[0] += 1
        self._stack.append(sums)
        self.num_events += 1

    def leave(self) -> None:
        """End the stage that began last."""
        self._add_time()
        self._stack.pop()

    def _add_time(self) -> None:
        wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        if self._stack:
            sums = self._stack[-1]
            sums[1] += wall_ns - self._wall_ns
            sums[2] += cpu_ns - self._cpu_ns
        self._wall_ns, self._cpu_ns = wall_ns, cpu_ns

    def note_result(self, key: Key, nbytes: int, num_pixels: int) -> None:
        """Add the size of a stage's result."""
        sums = self.sums[key]
        sums[3] += nbytes
        sums[4] += num_pixels


class _Here(threading.local):
    spans: Spans | None = None
    is_making = False


here = _Here()  # whether this thread makes a batch; its spans, if it is measured in detail


class Sampling:
    """Chooses the batches that are measured in detail: the third, and then every `stride`-th.

    The first two contain what happens once, such as imports at first use.
    """

    def __init__(self) -> None:
        self.stride = 1
        self._left = 2

    def is_due(self) -> bool:
        """Whether to measure the batch that begins now."""
        self._left -= 1
        return self._left < 0

    def note(self, num_events: int, wall_ns: int) -> None:
        """Choose the stride from the cost of a measured batch."""
        share = (BATCH_NS + num_events * EVENT_NS) / max(wall_ns, 1)
        self.stride = min(max(1, round(share / MAX_SHARE)), MAX_STRIDE)
        self._left = self.stride - 1


class BatchWatch:
    """Measures the batches that one thread makes for one loader.

    Args:
        recording: Where the measurements go.
        switch: Called with True before a detailed batch and with False after it: it turns the probes on and
            off.
    """

    def __init__(self, recording: Recording, switch: Callable[[bool], None]) -> None:
        self._recording = recording
        self._switch = switch
        self._sampling = Sampling()
        self._end_ns = 0

    def measure(self, make: Callable[..., Any], index: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``make(index, ...)``, which makes a batch, and record it; errors are passed on unrecorded."""
        if here.is_making:
            return make(index, *args, **kwargs)  # a loader inside the dataset: part of the outer batch
        here.is_making = True
        try:
            return self._measure(make, index, *args, **kwargs)
        finally:
            here.is_making = False

    def _measure(self, make: Callable[..., Any], index: Any, *args: Any, **kwargs: Any) -> Any:
        if self._sampling.is_due():
            self._switch(True)
            try:
                return self._measure_stages(make, index, *args, **kwargs)
            finally:
                self._switch(False)
        start_ns, start_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        batch = make(index, *args, **kwargs)
        self._add(start_ns, time.thread_time_ns() - start_cpu_ns, -1, -1, index, is_detailed=False)
        return batch

    def _measure_stages(self, make: Callable[..., Any], index: Any, *args: Any, **kwargs: Any) -> Any:
        queued_ns, process_cpu_ns = _queued_ns(), time.process_time_ns()
        start_cpu_ns, start_ns = time.thread_time_ns(), time.perf_counter_ns()
        spans = here.spans = Spans()
        spans.enter(OWN_CODE)
        try:
            batch = make(index, *args, **kwargs)
        finally:
            spans.leave()
            here.spans = None
        cpu_ns = time.thread_time_ns() - start_cpu_ns
        process_cpu_ns = time.process_time_ns() - process_cpu_ns
        queued_ns = -1 if queued_ns < 0 else _queued_ns() - queued_ns
        wall_ns = self._add(start_ns, cpu_ns, process_cpu_ns, queued_ns, index, is_detailed=True)
        self._sampling.note(spans.num_events, wall_ns)
        for (stage, name), sums in spans.sums.items():
            self._recording.add(stage, name, Sums(*sums))
        return batch

    def _add(
        self,
        start_ns: int,
        cpu_ns: int,
        process_cpu_ns: int,
        queued_ns: int,
        index: Any,
        *,
        is_detailed: bool,
    ) -> int:
        end_ns = time.perf_counter_ns()
        waited_ns = start_ns - self._end_ns if self._end_ns else 0
        self._end_ns = end_ns
        size = len(index) if isinstance(index, (list, tuple)) else 1
        self._recording.add_row(
            Row(start_ns, end_ns, cpu_ns, process_cpu_ns, queued_ns, waited_ns, 0, size, int(is_detailed))
        )
        return end_ns - start_ns


def probe(
    function: Callable[..., Any],
    key: Key | Callable[..., Key],
    *,
    image: Callable[[Any, tuple[Any, ...]], Any] | None = None,
) -> Any:
    """Wrap a function so that its time counts as a stage.

    Args:
        function: The function or unbound method.
        key: The stage and name; or a function of the same arguments that returns them.
        image: Chooses the image whose size is recorded, from the result and the arguments; None: no size.
    """

    @functools.wraps(function, updated=())
    def probed(*args: Any, **kwargs: Any) -> Any:
        spans = here.spans
        if spans is None:
            return function(*args, **kwargs)
        name = key(*args, **kwargs) if callable(key) else key
        spans.enter(name)
        try:
            result = function(*args, **kwargs)
        finally:
            spans.leave()
        if image is not None:
            spans.note_result(name, *_size(image(result, args)))
        return result

    return probed


def _size(result: Any) -> tuple[int, int]:
    """Bytes and pixels of an array, tensor or Pillow image; zeros for anything else."""
    shape = getattr(result, "shape", None)
    if isinstance(shape, tuple) and len(shape) in (2, 3):
        height, width = shape[:2] if len(shape) == 2 or shape[-1] <= 4 else shape[1:]
        return int(getattr(result, "nbytes", 0)), int(height) * int(width)
    size, bands = getattr(result, "size", None), getattr(result, "getbands", None)
    if isinstance(size, tuple) and bands is not None:
        return size[0] * size[1] * len(bands()), size[0] * size[1]
    return 0, 0


def _queued_ns() -> int:
    """How long this thread was ready to run and had no CPU, since it began; -1 if the system does not say."""
    try:
        with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
            ran_ns, queued_ns, _ = map(int, file.read().split())
    except (OSError, ValueError):
        return -1
    return queued_ns if ran_ns else -1  # some sandboxes show zeros
