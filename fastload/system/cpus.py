"""Counts the CPUs that this process may use, from its CPU affinity and its cgroup quotas."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def worthwhile_cpus() -> int:
    """How many processes can compute at once: `usable_cpus()`, or the CPU quota, rounded up, if lower."""
    quota = cpu_quota()
    return usable_cpus() if quota is None else max(1, min(usable_cpus(), math.ceil(quota)))


def usable_cpus() -> int:
    """The number of CPUs that this process may run on; outside Linux, the number of CPUs of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(root: str | Path = "/") -> float | None:
    """The lowest CPU quota among the cgroups of this process, in CPUs; None without a quota.

    Args:
        root: The directory that holds `proc` and `sys`; only tests pass another one than `/`.
    """
    return min(_quotas(Path(root)), default=None)


def _quotas(root: Path) -> Iterator[float]:
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):  # a container's mount may start at the container's group
            group = mount.joinpath(*parts[:depth])
            if controllers:
                quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
            else:
                quota, _, period = _read(group / "cpu.max").partition(" ")
            if quota.strip().isdigit() and period.strip().isdigit():  # skips "max", "-1" and missing files
                yield int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # the file does not exist on this system, or this user may not read it
