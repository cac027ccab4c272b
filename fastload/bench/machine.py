"""The machine that a benchmark runs on: its name, and how busy other processes keep it."""

from __future__ import annotations

import dataclasses
import os
import platform
from pathlib import Path

import torch

import fastload
from fastload.system.cpus import worthwhile_cpus

BUSY_SHARE = 0.1  # a warning is shown if other processes use a larger share of the CPUs
BUSY_LOAD = 0.5  # a warning is shown if the load for each CPU was higher before the start


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


def load_per_cpu() -> float | None:
    """The number of processes that wanted to run in the last minute, for each CPU; None if unknown."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (AttributeError, OSError):
        return None


def busy_warnings(share: float | None, load: float | None) -> list[str]:
    """The warnings about a busy machine.

    Args:
        share: See `cpu_times.others_share`.
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
