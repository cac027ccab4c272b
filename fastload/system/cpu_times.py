"""How busy the CPUs were between two moments, and how much of that was other processes' work."""

from __future__ import annotations

import contextlib
import os
import time
from typing import NamedTuple

import psutil

from fastload.system.cpus import usable_cpus


class CpuTimes(NamedTuple):
    """Readings of clocks.

    Attributes:
        at_s: When they were read.
        busy_s: CPU time that all processes have used on the CPUs of this process; None if unknown.
        own_s: CPU time of this process and of its children, at any depth.
    """

    at_s: float
    busy_s: float | None
    own_s: float

    @classmethod
    def now(cls) -> CpuTimes:
        """The readings at this moment."""
        own_s = 0.0
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has ended
                own_s += sum(process.cpu_times()[:4])  # its own, and those of its children that have ended
        return cls(time.monotonic(), _busy_s(), own_s)


def _busy_s() -> float | None:
    try:
        cpus = psutil.cpu_times(percpu=True)
        mine = [cpus[number] for number in os.sched_getaffinity(0)]
    except (OSError, AttributeError, IndexError):  # /proc is hidden; not Linux; a CPU was switched off
        return None
    # The fields after the eighth count time again that is in the first ones.
    return float(sum(sum(times[:8]) - times.idle - times.iowait for times in mine))


def busy_share(before: CpuTimes, after: CpuTimes, num_cpus: int | None = None) -> float | None:
    """How busy the CPUs were between two readings; None if unknown.

    Args:
        before: The first readings.
        after: The second readings.
        num_cpus: The number of CPUs of the readings; None for those of this process.
    """
    return _share(before, after, 0.0, num_cpus)


def others_share(before: CpuTimes, after: CpuTimes, num_cpus: int | None = None) -> float | None:
    """The share of the CPUs that other processes used between two readings; arguments as for `busy_share`."""
    return _share(before, after, after.own_s - before.own_s, num_cpus)


def _share(before: CpuTimes, after: CpuTimes, own_s: float, num_cpus: int | None) -> float | None:
    if before.busy_s is None or after.busy_s is None or after.at_s <= before.at_s:
        return None
    used_s = (after.busy_s - before.busy_s) - own_s
    share = used_s / ((after.at_s - before.at_s) * (num_cpus or usable_cpus()))
    return min(1.0, max(0.0, share))
