"""What the processes of a profile measured: a file of JSON lines for each of them.

Times are nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import io
import itertools
import json
import os
from pathlib import Path
from typing import NamedTuple

MAX_LINES = 500_000  # of a process: about 80 MB
_numbers = itertools.count()  # of the recordings of this process


class Batch(NamedTuple):
    """One finished batch.

    Attributes:
        loader: The number of the loader.
        worker: The number of the worker; -1 for the consumer's process.
        start_ns: When the work on it began.
        end_ns: When it was collated.
        cpu_ns: CPU time of the thread.
        process_cpu_ns: CPU time of the process in the meantime, with all threads.
        waited_ns: How long this worker had waited for the batch's indices before `start_ns`.
        num_samples: Its samples.
        stages: The stage, name and sums (see `Spans`) of each function that ran; empty if they were not
            measured.
    """

    loader: int
    worker: int
    start_ns: int
    end_ns: int
    cpu_ns: int
    process_cpu_ns: int
    waited_ns: int
    num_samples: int
    stages: list[tuple[str, str, list[int]]]

    @property
    def make_s(self) -> float:
        """Seconds from the beginning of the work to the collated batch."""
        return (self.end_ns - self.start_ns) / 1e9


class Event(NamedTuple):
    """Time outside of making a batch, such as sending one, or a sample of the line that a thread runs.

    Attributes:
        loader: The number of the loader; `NO_LOADER` if it is not known.
        worker: The number of the worker; -1 for the consumer's process.
        stage: A stage of `probes`, or `LINE`.
        wall_ns: Time in it.
        line: The line.
    """

    loader: int
    worker: int
    stage: str
    wall_ns: int = 0
    line: str = ""


class Recording:
    """The file that one process writes, in a directory for all of them.

    Raises:
        OSError: The file cannot be made.
    """

    def __init__(self, directory: str) -> None:
        # Not open(), which is itself measured.
        self._file = io.FileIO(os.path.join(directory, f"{os.getpid()}-{next(_numbers)}.jsonl"), "a")
        self._num_left = MAX_LINES

    def add(self, entry: Batch | Event) -> None:
        """Record a batch or an event; thread-safe."""
        if self._num_left <= 0:
            return
        self._num_left -= 1
        try:
            # One call per line: threads need no lock, and a killed process leaves at most one partial line.
            self._file.write(f"{json.dumps([type(entry).__name__, *entry])}\n".encode())
        except (OSError, ValueError):  # the disk is full; or the profile has just ended
            self._num_left = 0

    def close(self) -> None:
        """Close the file, which stays."""
        self._file.close()


def read_recordings(directory: str) -> tuple[list[Batch], list[Event]]:
    """Everything recorded in a directory; batches by start time."""
    batches: list[Batch] = []
    events: list[Event] = []
    for path in Path(directory).glob("*.jsonl"):
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):  # not a partial line of a killed process
                kind, *values = json.loads(line)
                if kind == Batch.__name__:
                    batches.append(Batch(*values))
                else:
                    events.append(Event(*values))
    return sorted(batches, key=lambda batch: batch.start_ns), events
