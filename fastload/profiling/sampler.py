"""The stack sampler of a process: what its threads do, every few milliseconds, written to a file.

A sample weighs the time since the last one, and the CPU time of the thread in between. It is taken when the
sampler gets the GIL, so work that holds the GIL would count for what releases it next: a short switch
interval keeps that below a millisecond.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastload.profiling.stages import work_of

if TYPE_CHECKING:
    from fastload.profiling.counter import Counter

INTERVAL_S = 0.01  # in a worker that has a CPU to itself: the samplers of all workers cost this one
CONSUMER_INTERVAL_S = 0.02  # torch may compute with a thread for each CPU, and all wait for one that lost it
_SWITCH_S = 0.001  # instead of Python's 0.005
_FLUSH_S = 0.25


class Sums(NamedTuple):
    """What a process did for a loader in a part of a second.

    Attributes:
        loader: The number of the loader.
        start_ns: Its beginning, by the clock that all processes of a machine share.
        cpu_ns: CPU time of the process.
        work: Stage, name, line, and wall and CPU nanoseconds of each kind of work.
    """

    loader: int
    start_ns: int
    cpu_ns: int
    work: list[tuple[str, str, str, int, int]]


class Sampler:
    """A daemon thread that watches threads of this process, until `stop()` or until the folder is gone.

    Args:
        folder: Where the sums are written.
        interval_s: The time between two samples.

    Attributes:
        threads: The loader, and since when it works for it, of each thread to watch, by its identifier.
        counters: Count the files that this process decodes.
    """

    def __init__(self, folder: str, interval_s: float) -> None:
        self.threads: dict[int, tuple[int, int]] = {}
        self.counters: list[Counter] = []
        self._path = os.path.join(folder, f"{os.getpid()}.jsonl")
        self._interval_s = interval_s
        self._sums: dict[int, dict[Any, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
        self._flushed_ns, self._cpu_ns = time.perf_counter_ns(), time.process_time_ns()
        self._last: dict[int, tuple[int, int]] = {}  # of each thread: the last sample, and CPU time then
        self._stopped = threading.Event()
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch_s, _SWITCH_S))
        self._thread = threading.Thread(target=self._run, name="fastload-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take no more samples, and write what is left."""
        self._stopped.set()
        self._thread.join()
        sys.setswitchinterval(self._switch_s)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self._interval_s):
                self._sample()
                if time.perf_counter_ns() - self._flushed_ns > _FLUSH_S * 1e9:
                    self._flush()
            self._flush()
        except OSError:  # the profile is over, or the disk is full
            pass

    def _sample(self) -> None:
        frames, last = sys._current_frames(), {}
        for thread, (loader, since_ns) in self.threads.copy().items():
            frame, now_ns = frames.get(thread), time.perf_counter_ns()
            if frame is None:  # it has ended
                continue
            cpu_ns = time.clock_gettime_ns(time.pthread_getcpuclockid(thread))
            before_ns, cpu_before_ns = self._last.get(thread, (0, cpu_ns))
            wall_ns = now_ns - max(before_ns, since_ns)
            sums = self._sums[loader][work_of(frame)]
            sums[:] = sums[0] + wall_ns, sums[1] + min(cpu_ns - cpu_before_ns, wall_ns)
            last[thread] = now_ns, cpu_ns
            del frame
        self._last = last
        del frames  # else the objects of these frames would live until the next sample

    def _flush(self) -> None:
        """Append the sums to the file."""
        now_ns, cpu_ns = time.perf_counter_ns(), time.process_time_ns()
        sums = [
            (loader, self._flushed_ns, cpu_ns - self._cpu_ns, [(*key, *spent) for key, spent in work.items()])
            for loader, work in self._sums.items()
        ]
        counts = [counted for counter in self.counters if (counted := counter.taken())]
        self._sums.clear()
        self._flushed_ns, self._cpu_ns = now_ns, cpu_ns
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, (json.dumps([sums, counts]) + "\n").encode())
        finally:
            os.close(descriptor)


def read_sums(folder: str) -> tuple[list[Sums], list[Any]]:
    """What all processes wrote: the sums, and what the counters took."""
    sums: list[Sums] = []
    counts: list[Any] = []
    for path in Path(folder).glob("*.jsonl"):
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):  # not a partial line of a killed process
                some_sums, some_counts = json.loads(line)
                sums += [Sums(*each) for each in some_sums]
                counts += some_counts
    return sums, counts
