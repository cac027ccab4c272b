"""Counts the CPUs that this process can use, from its CPU affinity and its cgroup quotas."""

from __future__ import annotations

import contextlib
import math
import os
from typing import TYPE_CHECKING

from fastload.system.cgroups import groups, read_text
from fastload.system.launchers import ranks_of_host

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
    for group, is_v2 in groups("cpu", root):
        if is_v2:
            quota, _, period = read_text(group / "cpu.max").partition(" ")
        else:
            quota, period = read_text(group / "cpu.cfs_quota_us"), read_text(group / "cpu.cfs_period_us")
        if quota.strip().isdigit() and period.strip().isdigit():  # skips "max", "-1" and missing files
            yield int(quota) / int(period)
