"""The machine that a benchmark runs on: its name, and how busy other processes keep it."""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from pathlib import Path
from typing import NamedTuple

import torch

import fastload
from fastload.system.cpus import usable_cpus, worthwhile_cpus

BUSY_SHARE = 0.1  # a warning is shown if other processes use a larger share of the CPUs
BUSY_LOAD = 0.5  # a warning is shown if the load for each CPU was higher before the start

_IDLE_FIELDS = (3, 4)  # of a line of /proc/stat: idle and iowait
_NUM_FIELDS = 8  # the fields after them count time again that is in the first ones


@dataclasses.dataclass(frozen=True)
class Machine:
    """The hardware and the versions on which the speed depends.

    Attributes:
        cpu: The name of the processor.
        cores: The number of CPUs that this process may use, with its CPU quota.
        kernel: The release of the kernel.
        python: The version of Python.
        torch: The version of torch.
        fastload: The version of fastload.
    """

    cpu: str
    cores: int
    kernel: str
    python: str
    torch: str
    fastload: str

    @classmethod
    def this(cls) -> Machine:
        """This machine."""
        return cls(
            cpu=_cpu_name(),
            cores=worthwhile_cpus(),
            kernel=platform.release(),
            python=platform.python_version(),
            torch=torch.__version__,
            fastload=fastload.__version__,
        )

    def __str__(self) -> str:
        return f"{self.cpu}, {self.cores} cores"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


class CpuTimes(NamedTuple):
    """Readings of clocks.

    Attributes:
        at_s: When they were read.
        busy_s: CPU time that all processes have used on the CPUs of this process; None if unknown.
        own_s: CPU time of this process, and of its children that have ended.
    """

    at_s: float
    busy_s: float | None
    own_s: float

    @classmethod
    def now(cls, stat: Path = Path("/proc/stat")) -> CpuTimes:
        """The readings at this moment."""
        own = os.times()
        own_s = own.user + own.system + own.children_user + own.children_system
        return cls(time.monotonic(), _busy_s(stat), own_s)


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


def others_share(before: CpuTimes, after: CpuTimes, num_cpus: int | None = None) -> float | None:
    """The share of the CPUs that other processes used between two readings; None if unknown.

    Args:
        before: The first readings.
        after: The second readings; the children that ran in between have ended.
        num_cpus: The number of CPUs of the readings; None for those of this process.
    """
    if before.busy_s is None or after.busy_s is None or after.at_s <= before.at_s:
        return None
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    share = others_s / ((after.at_s - before.at_s) * (num_cpus or usable_cpus()))
    return min(1.0, max(0.0, share))


def load_per_cpu() -> float | None:
    """The number of processes that wanted to run in the last minute, for each CPU; None if unknown."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (AttributeError, OSError):
        return None


def busy_warnings(share: float | None, load: float | None) -> list[str]:
    """The warnings about a busy machine.

    Args:
        share: See `others_share`.
        load: See `load_per_cpu`, before the benchmark.
    """
    said = []
    if share is not None and share > BUSY_SHARE:
        said.append(
            f"the machine was busy: other processes used {share:.0%} of the CPUs during the runs. Repeat the "
            "benchmark when they have ended"
        )
    if load is not None and load > BUSY_LOAD:
        said.append(
            f"the machine was busy before the start: in the last minute, {load:.1f} processes for each CPU "
            "wanted to run"
        )
    return said
