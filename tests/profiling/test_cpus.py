"""Claims about how busy the CPUs were between two moments, and by whom."""

from __future__ import annotations

import collections
import os
import subprocess
import sys

import psutil
import pytest

from fastload.system.cpus import CpuTimes, busy_share, others_share


@pytest.mark.parametrize(
    ("busy_s", "own_s", "share"), [(8.0, 8.0, 0.0), (8.0, 4.0, 0.2), (20.0, 0.0, 1.0), (1.0, 3.0, 0.0)]
)
def test_the_share_of_others_is_cpu_time_not_ours(busy_s: float, own_s: float, share: float) -> None:
    """Of two CPUs over ten seconds."""
    before, after = CpuTimes(100.0, 50.0, 7.0), CpuTimes(110.0, 50.0 + busy_s, 7.0 + own_s)
    assert others_share(before, after, num_cpus=2) == pytest.approx(share)
    assert busy_share(before, after, num_cpus=2) == pytest.approx(min(busy_s / 20, 1.0))


def test_the_clocks_are_those_of_our_cpus_without_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU 1 is not ours; idle and iowait are no work, and the time of guests is counted already."""
    names = "user nice system idle iowait irq softirq steal guest guest_nice"
    times = collections.namedtuple("times", names)  # type: ignore[misc]
    readings = [times(1.0, 0.2, 0.3, 9.9, 9.9, 0.04, 0.05, 0.41, 0.7, 0.7), times(*[9.0] * 10)]
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: readings)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert CpuTimes.now().busy_s == pytest.approx(2.0)

    def fail(percpu: bool) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/proc/stat")

    monkeypatch.setattr(psutil, "cpu_times", fail)  # without /proc, the share is unknown
    reading = CpuTimes.now()
    assert (reading.busy_s, others_share(reading, reading)) == (None, None)


@pytest.mark.slow
def test_children_are_ours_while_they_live() -> None:
    """Workers of a loader may live on after the last reading."""
    burn = "import sys, time\nwhile time.process_time() < 0.2: pass\nprint(flush=True); sys.stdin.read()"
    command = [sys.executable, "-S", "-c", burn]
    before = CpuTimes.now()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        during = CpuTimes.now()
        child.communicate()
    assert during.own_s - before.own_s >= 0.15
    assert CpuTimes.now().own_s >= during.own_s - 1e-6  # they are sums of floats
