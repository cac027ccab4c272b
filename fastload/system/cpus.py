"""The CPUs that this process can use, and how busy they were between two moments."""

from __future__ import annotations

import contextlib
import math
import os
import time
from typing import TYPE_CHECKING, NamedTuple

from fastload.system.limits import cgroup_directories, read_text
from fastload.system.ranks import ranks_of_host

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def worthwhile_cpus() -> int:
    """How many processes can compute at once: `usable_cpus()`, or the CPU quota, rounded up, if lower."""
    quota = cpu_quota()
    return usable_cpus() if quota is None else max(1, min(usable_cpus(), math.ceil(quota)))


def rank_cpus() -> int:
    """This rank's share of the host's CPUs, at least 1: that of the launcher's CPUs, and of the CPU quota.

    A launcher can also bind ranks to CPUs, each rank to its own or several ranks to the same.
    """
    host, quota = usable_cpus(), cpu_quota()
    with contextlib.suppress(AttributeError, OSError):  # AttributeError: outside Linux
        host = max(host, len(os.sched_getaffinity(os.getppid())))
    if quota is not None:
        host = min(host, math.ceil(quota))
    return max(1, min(usable_cpus(), host // (ranks_of_host() or 1)))


def usable_cpus() -> int:
    """The number of CPUs that this process can run on; outside Linux, the number of CPUs of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(root: str | Path = "/") -> float | None:
    """The lowest CPU quota among the cgroups of this process, in CPUs; None without a quota.

    Args:
        root: The directory that holds `proc` and `sys`; only tests pass anything but `/`.
    """
    return min(_quotas(root), default=None)


def _quotas(root: str | Path) -> Iterator[float]:
    for group, is_v2 in cgroup_directories("cpu", root):
        if is_v2:
            quota, _, period = read_text(group / "cpu.max").partition(" ")
        else:
            quota, period = read_text(group / "cpu.cfs_quota_us"), read_text(group / "cpu.cfs_period_us")
        if quota.strip().isdigit() and period.strip().isdigit():  # skips "max", "-1" and missing files
            yield int(quota) / int(period)


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
        import psutil  # loaders need none of this, and it is slow to import

        own_s = 0.0
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has ended
                own_s += sum(process.cpu_times()[:4])  # its own, and those of its children that have ended
        return cls(time.monotonic(), _busy_s(), own_s)


def _busy_s() -> float | None:
    import psutil

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
