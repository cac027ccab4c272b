"""How many CPUs this process may use: those that it may run on, and the share of time that cgroups grant."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def worthwhile_cpus() -> int:
    """How many processes can compute at the same time: `usable_cpus()`, or a lower CPU quota, rounded up."""
    quota = cpu_quota()
    return usable_cpus() if quota is None else max(1, min(usable_cpus(), math.ceil(quota)))


def usable_cpus() -> int:
    """On how many CPUs this process may run; all of the machine where the system does not say (not Linux)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(root: str | Path = "/") -> float | None:
    """CPUs' worth of time that the tightest cgroup of this process grants; None without a limit.

    Args:
        root: Where `proc` and `sys` are looked for; another one than `/` is for tests.
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
        for depth in range(len(parts) + 1):  # in a container the mount may show its own group as the root
            group = mount.joinpath(*parts[:depth])
            if controllers:
                quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
            else:
                quota, _, period = _read(group / "cpu.max").partition(" ")
            if quota.strip().isdigit() and period.strip().isdigit():  # not "max", "-1" or no file
                yield int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # not on this system, or hidden from this user
