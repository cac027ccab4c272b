"""A sampling profiler: which lines of the user's code take the time of making batches.

A stack sample sees waits as well as computation, which a profiler that counts CPU time does not. It takes
about 20 us, but it takes the GIL and a CPU from the thread that works: where torch computes with several
threads, all of them wait for the one that lost its CPU, up to 4 ms (benchmarks/NOTES.md, "Profiles"). So
samples are frequent at first, and rare once there are enough of them.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from typing import TYPE_CHECKING

from fastload.profiling.recording import Event
from fastload.profiling.spans import BatchRecorder

if TYPE_CHECKING:
    from types import FrameType

    from fastload.profiling.recording import Recording

INTERVAL_S = 0.02  # between the first stack samples
RARE_INTERVAL_S = 0.5  # between later ones
NUM_FREQUENT = 50  # samples taken while a thread makes a batch
LINE = "line"  # the stage under which lines are recorded

_NOT_OWN = tuple(
    {
        os.path.dirname(os.__file__) + os.sep,
        *(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")),
        os.path.dirname(os.path.dirname(__file__)) + os.sep,
        "<frozen",
    }
)


class LineSampler:
    """A thread that samples the stacks of the threads that make batches, until `stop()`.

    Args:
        recording: Where the lines go.
        making: The loader and the worker of each thread that makes a batch at the time, by the thread's id.
    """

    def __init__(self, recording: Recording, making: dict[int, tuple[int, int]]) -> None:
        self._recording = recording
        self._making = making
        self._has_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fastload-line-sampler", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        num_samples = 0
        while not self._has_stopped.wait(INTERVAL_S if num_samples < NUM_FREQUENT else RARE_INTERVAL_S):
            if self._making:
                num_samples += 1
                frames = sys._current_frames()
                for thread, (loader, worker) in list(self._making.items()):
                    line = line_of(frames.get(thread))
                    if line is not None:
                        self._recording.add(Event(loader, worker, LINE, line=line))
                del frames  # else the objects of these frames would live until the next sample

    def stop(self) -> None:
        """Stop the thread, and wait for it."""
        self._has_stopped.set()
        self._thread.join()


def is_own_code(path: str) -> bool:
    """Whether a source file is the user's: not Python's, an installed package's, or ours."""
    return bool(path) and not path.startswith(_NOT_OWN)


def line_of(frame: FrameType | None) -> str | None:
    """The innermost line of the user's code that makes the batch: "file:line in function", or None."""
    while frame is not None and frame.f_code is not BatchRecorder.measure.__code__:  # outside is the loop
        path = frame.f_code.co_filename
        if is_own_code(path):
            name = frame.f_code.co_qualname.replace("<locals>.", "")
            return f"{os.path.basename(path)}:{frame.f_lineno} in {name}"
        frame = frame.f_back
    return None
