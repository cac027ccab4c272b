"""The stages of making a batch: how long a thread is in each of them.

A stage's time excludes the stages that it calls, so the times of a batch's stages add up to its whole time.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import TYPE_CHECKING, Any

from fastload.profiling.recording import Batch
from fastload.system.limits import resource

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.profiling.recording import Recording

MAX_SHARE = 0.01  # of the time that a batch takes
EVENT_NS = 1_500  # the measured cost of entering and leaving a stage, with its wrapper (benchmarks/NOTES.md)
BATCH_NS = 100_000  # the cost of putting probes in place for a batch, with the slower calls after it
MAX_STRIDE = 256

Key = tuple[str, str]  # stage, name
_PIXEL_BYTES = {"1": 1 / 8, "I;16": 2, "I": 4, "F": 4}  # of Pillow's modes; others have one for each band
OWN_CODE: Key = ("dataset", "")  # the dataset's own code, outside every other stage
MAPPED_FILES: Key = ("read", "mapped files")  # in which an access, and no call, reads


class Spans:
    """The stages of one batch in one thread.

    Attributes:
        num_events: How many stages were entered.
        sizes: Widths and heights of Pillow's images that were decoded.
        sums: By stage and name: calls, nanoseconds without those in stages that it called, nanoseconds of the
            CPU likewise, bytes and pixels.
    """

    def __init__(self) -> None:
        self.num_events = 0
        self.sizes: set[tuple[int, int]] = set()
        self.sums: dict[Key, list[int]] = {}
        self._stack: list[list[int]] = []
        self._wall_ns = time.perf_counter_ns()
        self._cpu_ns = time.thread_time_ns()

    def enter(self, key: Key) -> None:
        """Begin a stage."""
        self._add_time()
        sums = self.sums.setdefault(key, [0, 0, 0, 0, 0])
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
        self.sums[key][3] += nbytes
        self.sums[key][4] += num_pixels

    def note_page_faults(self) -> None:
        """Count the waiting in the dataset's own code as reading, because pages were read from storage."""
        own = self.sums[OWN_CODE]
        blocked_ns = max(own[1] - own[2], 0)
        own[1] -= blocked_ns
        self.sums[MAPPED_FILES] = [1, blocked_ns, 0, 0, 0]


class _ThreadState(threading.local):
    """What is recorded in this thread at the moment.

    Attributes:
        spans: The stages of the batch that it makes, if that batch is measured in detail.
        is_making: Whether it makes a batch.
        loader: The number of the loader whose `__iter__` or `__next__` it runs.
        is_timed: Whether it runs a function that is timed outside of batches.
    """

    spans: Spans | None = None
    is_making = False
    loader: int | None = None
    is_timed = False


this_thread = _ThreadState()


class BatchRecorder:
    """Records the batches that one thread makes for one loader, and the stages of some of them.

    Args:
        recording: Where the measurements go.
        loader: The number of the loader.
        worker: The number of the worker.
        switch: Turns the probes on before a batch that is measured in detail, and off after it.
    """

    def __init__(
        self, recording: Recording, loader: int, worker: int, switch: Callable[[bool], None]
    ) -> None:
        self._recording = recording
        self._loader = loader
        self._worker = worker
        self._switch = switch
        # Batches until the next detailed one. The first two contain one-time work, such as imports.
        self._num_skipped = 2
        self._end_ns = 0

    def measure(self, make: Callable[[], Any], num_samples: int) -> Any:
        """Call ``make``, which makes a batch, and record it; errors are passed on unrecorded."""
        self._num_skipped -= 1
        is_detailed = self._num_skipped < 0
        this_thread.is_making = True
        if is_detailed:
            self._switch(True)
        try:
            process_cpu_ns, cpu_ns = time.process_time_ns(), time.thread_time_ns()
            start_ns = time.perf_counter_ns()
            spans = Spans()
            if is_detailed:
                this_thread.spans = spans
                num_faults = _num_page_faults()
                spans.enter(OWN_CODE)
            batch = make()
            if is_detailed:
                spans.leave()
                if _num_page_faults() > num_faults:
                    spans.note_page_faults()
            end_ns = time.perf_counter_ns()
            cpu_ns, process_cpu_ns = time.thread_time_ns() - cpu_ns, time.process_time_ns() - process_cpu_ns
        finally:
            this_thread.spans, this_thread.is_making = None, False
            if is_detailed:
                self._switch(False)
        waited_ns = max(start_ns - self._end_ns, 0) if self._end_ns else 0
        self._end_ns = end_ns
        stages = [(stage, name, sums) for (stage, name), sums in spans.sums.items()]
        times = (start_ns, end_ns, cpu_ns, process_cpu_ns, waited_ns)
        self._recording.add(Batch(self._loader, self._worker, *times, num_samples, stages))
        if is_detailed:
            self._num_skipped = stride_of(spans.num_events, end_ns - start_ns) - 1
        return batch


def _num_page_faults() -> int:
    """How often this thread has waited for a page from storage; 0 where the system does not count it."""
    if resource is None or not hasattr(resource, "RUSAGE_THREAD"):
        return 0
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


def stride_of(num_events: int, wall_ns: int) -> int:
    """The interval between batches measured in detail, so that measuring costs at most `MAX_SHARE`."""
    share = (BATCH_NS + num_events * EVENT_NS) / max(wall_ns, 1)
    return min(max(1, round(share / MAX_SHARE)), MAX_STRIDE)


def probe(
    function: Callable[..., Any],
    key: Key | Callable[..., Key],
    *,
    size_of: Callable[..., tuple[int, int]] | None = None,
) -> Any:
    """Wrap a function to count its time as a stage.

    Args:
        function: The function or unbound method.
        key: The stage and name; or a function of the same arguments that returns them.
        size_of: A function of the result and the arguments: bytes and pixels, which are recorded.
    """

    @functools.wraps(function, updated=())
    def probed(*args: Any, **kwargs: Any) -> Any:
        spans = this_thread.spans
        if spans is None:  # nothing else runs in threads that make no measured batch
            return function(*args, **kwargs)
        name = key(*args, **kwargs) if callable(key) else key
        spans.enter(name)
        try:
            result = function(*args, **kwargs)
        finally:
            spans.leave()
        if size_of is not None:
            spans.note_result(name, *size_of(result, *args))
        return result

    return probed


def size_of(result: Any, *args: Any) -> tuple[int, int]:
    """Bytes and pixels of an array, tensor or Pillow image, else of the first argument; zeros if unknown."""
    image = result if hasattr(result, "size") or not args else args[0]
    shape = getattr(image, "shape", None)
    if isinstance(shape, tuple) and len(shape) in (2, 3):
        height, width = shape[:2] if len(shape) == 2 or shape[-1] <= 4 else shape[1:]
        return int(getattr(image, "nbytes", 0)), int(height) * int(width)
    size, bands = getattr(image, "size", None), getattr(image, "getbands", None)
    if isinstance(size, tuple) and bands is not None:
        num_pixels = size[0] * size[1]
        return int(num_pixels * _PIXEL_BYTES.get(image.mode, len(bands()))), num_pixels
    return 0, 0
