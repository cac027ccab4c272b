"""How busy the CPUs were between two moments, and how much of that was the work of other processes."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from fastload.system.cpus import usable_cpus

_IDLE_FIELDS = (3, 4)  # of a line of /proc/stat: idle and iowait
_NUM_FIELDS = 8  # the fields after them count time again that is in the first ones


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
    def now(cls, stat: Path = Path("/proc/stat")) -> CpuTimes:
        """The readings at this moment."""
        busy_s = _busy_s(stat)
        if busy_s is None:  # not Linux, or /proc is hidden
            return cls(time.monotonic(), None, 0.0)
        own_s = _own_s(psutil.Process())
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended
                own_s += _own_s(child)
        return cls(time.monotonic(), busy_s, own_s)


def _own_s(process: psutil.Process) -> float:
    """CPU time of a process, and of its children that have ended."""
    times = process.cpu_times()
    return sum(getattr(times, name, 0.0) for name in ("user", "system", "children_user", "children_system"))


def _busy_s(stat: Path) -> float | None:
    try:
        text = stat.read_text()
    except OSError:
        return None
    usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = 0
    for name, *fields in map(str.split, text.splitlines()):
        if name in usable:
            counts = [int(field) for field in fields[:_NUM_FIELDS]]
            ticks += sum(counts) - sum(counts[number] for number in _IDLE_FIELDS)
    return ticks / os.sysconf("SC_CLK_TCK")


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
