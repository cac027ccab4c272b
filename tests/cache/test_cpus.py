"""How many CPUs this process may use, and how many workers follow from that."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from fastload.cache.build import processes
from fastload.system import cpus

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"self": "0::/job\n", "job/cpu.max": "max 100000\n"}, None),
        ({"self": "0::/job\n", "job/cpu.max": "250000 100000\n"}, 2.5),
        ({"self": "0::/job/step\n", "job/cpu.max": "200000 100000\n", "job/step/cpu.max": "max 100000\n"}, 2),
        ({"self": "0::/../elsewhere\n", "cpu.max": "50000 100000\n"}, 0.5),
        (
            {
                "self": "3:cpu,cpuacct:/job\n4:memory:/other\n",
                "cpu/job/cpu.cfs_quota_us": "300000\n",
                "cpu/job/cpu.cfs_period_us": "100000\n",
                "cpu/cpu.cfs_quota_us": "-1\n",
                "cpu/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
    ],
    ids=["no cgroups", "no limit", "limit", "limit of an ancestor", "container", "version 1"],
)
def test_the_tightest_quota_counts(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    """Of the group and those above it, in both versions of cgroups."""
    for name, content in files.items():
        path = tmp_path / ("proc/self/cgroup" if name == "self" else f"sys/fs/cgroup/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    assert cpus.cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(
    ("quota", "expected"), [(None, 8), (100.0, 8), (8.0, 8), (7.1, 8), (2.5, 3), (1.0, 1), (0.2, 1)]
)
def test_workers_follow_the_quota(
    quota: float | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default there are as many workers as CPUs that the process may run on, or its quota, rounded up."""
    monkeypatch.setattr(cpus, "usable_cpus", lambda: 8)
    monkeypatch.setattr(cpus, "cpu_quota", lambda: quota)

    assert processes.choose_workers(None, 1000) == expected


def test_the_user_s_number_of_workers_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quota bounds the default alone."""
    monkeypatch.setattr(cpus, "cpu_quota", lambda: 1.0)

    assert processes.choose_workers(5, 1000) == 5


@pytest.mark.parametrize(
    ("variables", "usable", "launcher", "quota", "expected"),
    [
        ({}, 8, 64, None, 8),
        ({"LOCAL_WORLD_SIZE": "1"}, 8, 64, 2.5, 3),
        ({"LOCAL_WORLD_SIZE": "8"}, 64, 64, None, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 64, 64, None, 21),
        ({"LOCAL_WORLD_SIZE": "8"}, 8, 64, None, 8),
        ({"LOCAL_WORLD_SIZE": "8"}, 32, 64, None, 8),
        ({"LOCAL_WORLD_SIZE": "4"}, 64, 64, 16.0, 4),
        ({"LOCAL_WORLD_SIZE": "4"}, 2, 2, None, 1),
        ({"LOCAL_WORLD_SIZE": ""}, 8, 8, None, 8),
        ({"LOCAL_WORLD_SIZE": "many"}, 8, 8, None, 8),
        ({"LOCAL_WORLD_SIZE": "2"}, 8, None, None, 4),
    ],
    ids=[
        *("no launcher", "one rank", "eight ranks", "three ranks", "bound to CPUs", "bound to a NUMA node"),
        *("quota", "fewer CPUs than ranks", "empty", "no number", "unknown launcher"),
    ],
)
def test_ranks_of_a_host_share_its_cpus(
    variables: dict[str, str],
    usable: int,
    launcher: int | None,
    quota: float | None,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CPUs that are a rank's alone are not divided again."""
    for name in cpus.RANKS_OF_HOST:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def affinity(pid: int) -> range:
        if launcher is None:
            raise PermissionError
        return range(launcher)

    monkeypatch.setattr(cpus, "usable_cpus", lambda: usable)
    monkeypatch.setattr(cpus, "cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", affinity)

    assert cpus.rank_cpus() == expected


def test_usable_cpus_are_those_that_the_process_may_run_on() -> None:
    """By its affinity."""
    assert cpus.usable_cpus() == len(os.sched_getaffinity(0))
