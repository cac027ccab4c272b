"""What the machine grants: memory by meminfo and every cgroup, budgets, CPUs and workers."""

from __future__ import annotations

import os
import resource
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest

from fastload.cache import fill
from fastload.system import budget as budget_module
from fastload.system import cpus, ranks
from fastload.system.budget import (
    available_bytes,
    cgroup_limit_bytes,
    check_memory,
    parse_memory,
    parse_prefetch_memory,
)
from tests.kit.faults import limited

GB = 10**9
MEMINFO = {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   16000000 kB\n"}
SELF, GROUPS = "proc/self/cgroup", "sys/fs/cgroup"
V1, UNLIMITED = "5:cpu:/x\n3:memory,hugetlb:/a/b\n", 9223372036854771712


def write(root: Any, files: dict[str, Any]) -> Any:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.fsencode(str(text)))
    return root


def v2(path: str, limit: Any, used: int, inactive: int = 0) -> dict[str, Any]:
    return {
        f"sys/fs/cgroup/{path}/memory.max": f"{limit}\n",
        f"sys/fs/cgroup/{path}/memory.current": f"{used}\n",
        f"sys/fs/cgroup/{path}/memory.stat": f"anon 1\ninactive_file {inactive}\nactive_file 7\n",
    }


def v1(path: str, limit: int, used: int, inactive: int = 0) -> dict[str, Any]:
    return {
        f"sys/fs/cgroup/memory/{path}/memory.limit_in_bytes": limit,
        f"sys/fs/cgroup/memory/{path}/memory.usage_in_bytes": used,
        f"sys/fs/cgroup/memory/{path}/memory.stat": f"inactive_file 3\ntotal_inactive_file {inactive}\n",
    }


@pytest.mark.parametrize(
    ("files", "free_bytes", "limit_bytes"),
    [
        ({}, 16_000_000 * 1024, None),
        ({SELF: "0::/job\n", **v2("job", 4 * GB, 3 * GB, GB // 2)}, 3 * GB // 2, 4 * GB),
        ({SELF: "0::/a/b\n", **v2("a/b", "max", GB), **v2("a", 2 * GB, GB)}, GB, 2 * GB),
        ({SELF: "0::/a/b\n", **v2("a/b", 4 * GB, GB), **v2("a", 2 * GB, GB)}, GB, 2 * GB),
        ({SELF: "0::/a\n", **v2("a", "max", GB), f"{GROUPS}/a/memory.high": 3 * GB}, 2 * GB, 3 * GB),
        ({SELF: "0::/docker/abc\n", **v2("", 4 * GB, GB)}, 3 * GB, 4 * GB),
        ({SELF: V1, **v1("a/b", UNLIMITED, GB), **v1("a", 2 * GB, GB, GB // 4)}, GB * 5 // 4, 2 * GB),
        ({SELF: "0::/a\n", **v2("a", GB, 2 * GB)}, 0, GB),
        ({SELF: "0::/a\n", **v2("a", "max", GB)}, 16_000_000 * 1024, None),
        ({SELF: "0::/job\udcff\n", **v2("job\udcff", 2 * GB, GB)}, GB, 2 * GB),  # a name that is no text
    ],
)
def test_the_tightest_group_limits(files: Any, free_bytes: int, limit_bytes: Any, tmp_path: Any) -> None:
    """What is free: MemAvailable, or a limit on the way up less what is used and cannot be given back."""
    write(tmp_path, MEMINFO | files)
    assert available_bytes(tmp_path) == free_bytes
    assert cgroup_limit_bytes(tmp_path) == limit_bytes


def test_a_limit_on_address_space_counts(tmp_path: Any) -> None:
    """RLIMIT_AS less what is mapped already; without /proc that is unknown."""
    write(tmp_path, MEMINFO | {"proc/self/statm": "1000 200 30 1 0 40 0\n"})
    with limited(resource.RLIMIT_AS, 10 * GB):
        assert available_bytes(tmp_path) == 10 * GB - 1000 * resource.getpagesize()
        (tmp_path / "proc/self/statm").unlink()
        assert available_bytes(tmp_path) == 10 * GB


def test_without_proc_the_system_is_asked_itself(tmp_path: Any, monkeypatch: Any) -> None:
    """What psutil cannot read sysinfo(2) tells: the free pages."""
    monkeypatch.setattr(psutil, "virtual_memory", mock.Mock(side_effect=FileNotFoundError(2, "No such file")))
    assert 0 < available_bytes(tmp_path) <= os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()


BUDGETS: Any = {
    "auto": 7 * GB,
    0.5: 5 * GB,
    1.0: 10 * GB,
    12345: 12345,
    "40GB": 40 * GB,
    "512MiB": 512 << 20,
    "1.5 gb": 3 * GB // 2,
    "7 KB": 7000,
    "100B": 100,
    "2TiB": 2 << 40,
    "16G": 16 * GB,
    "512m": 512_000_000,
    "1K": 1000,
    "2T": 2000 * GB,
    "3Gi": 3 << 30,
}


@pytest.mark.parametrize(("max_memory", "expected"), BUDGETS.items())
def test_budgets(max_memory: Any, expected: int) -> None:
    """Every documented way to say a budget means the bytes that it should."""
    assert parse_memory(max_memory, available=10 * GB) == expected


@pytest.mark.parametrize(
    "max_memory", ["", "40", "GB", "4 parsecs", "-1GB", "0GB", 0, -5, 0.0, 1.5, float("nan"), True, None]
)
def test_nonsense_is_refused(max_memory: Any) -> None:
    """What is no budget raises, showing it under the name of its argument, and the ways to say one."""
    with pytest.raises(ValueError, match=r'^max_memory=.*"40GB"'):
        parse_memory(max_memory, available=GB)
    with pytest.raises(ValueError, match=r'^max_prefetch_memory=.*"40GB"'):
        parse_memory(max_memory, name="max_prefetch_memory", available=GB)


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        (1, r'^max_memory=1 is 1 byte: write max_memory="1GB" for gigabytes, max_memory=1\.0 for a share'),
        (
            64,
            r'^max_memory=64 is 64 bytes: .*"64GB" for gigabytes, max_memory=0\.5 .*"64B" if you mean bytes$',
        ),
        (999_999, "is 999999 bytes"),
    ],
)
def test_an_int_below_a_megabyte_is_refused(wrong: int, advice: str) -> None:
    """It is a slip for gigabytes or a share, and the error shows how to write each of them."""
    with pytest.raises(ValueError, match=advice):
        check_memory(wrong, name="max_memory")
    for right in (1_000_000, f"{wrong}B", "auto", 0.5, 1.0):
        check_memory(right, name="max_memory")


def test_the_automatic_limit_of_batches_is_a_quarter_of_the_free_memory(monkeypatch: Any) -> None:
    """Read once a second, as it takes longer than a small epoch; others are read as `max_memory` is."""
    readings, seconds = iter([4000, 8000]), iter([10.0, 10.9, 11.0])
    monkeypatch.setattr(budget_module, "available_bytes", lambda: next(readings))
    monkeypatch.setattr(budget_module, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    assert [parse_prefetch_memory("auto") for _ in range(3)] == [1000, 1000, 2000]
    assert [parse_prefetch_memory(limit) for limit in ("3kB", 77)] == [3000, 77]


def cfs(path: str, quota: int) -> dict[str, str]:
    """The files of a group in version 1."""
    return {f"cpu/{path}cpu.cfs_quota_us": f"{quota}\n", f"cpu/{path}cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({SELF: "0::/job\n", "job/cpu.max": "max 100000\n"}, None),
        ({SELF: "0::/job\n", "job/cpu.max": "250000 100000\n"}, 2.5),
        ({SELF: "0::/a/b\n", "a/cpu.max": "200000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2),
        ({SELF: "0::/../elsewhere\n", "cpu.max": "50000 100000\n"}, 0.5),  # a container
        ({SELF: "3:cpu,cpuacct:/job\n4:memory:/other\n", **cfs("job/", 300_000), **cfs("", -1)}, 3),
    ],
)
def test_the_tightest_quota_counts(tmp_path: Any, files: dict[str, str], quota: float | None) -> None:
    """Of the group and those above it, in both versions of cgroups."""
    placed = {name if name == SELF else f"{GROUPS}/{name}": text for name, text in files.items()}
    assert cpus.cpu_quota(write(tmp_path, placed)) == quota


@pytest.mark.parametrize(
    ("variables", "usable", "launcher", "quota", "expected"),
    [
        *(({}, 8, 64, quota, 8) for quota in (None, 100.0, 8.0, 7.1)),
        *(({}, 8, 64, quota, number) for quota, number in ((2.5, 3), (1.0, 1), (0.2, 1))),
        ({"LOCAL_WORLD_SIZE": "1"}, 8, 64, 2.5, 3),
        ({"LOCAL_WORLD_SIZE": "8"}, 64, 64, None, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 64, 64, None, 21),
        ({"LOCAL_WORLD_SIZE": "8"}, 8, 64, None, 8),  # bound to CPUs
        ({"LOCAL_WORLD_SIZE": "8"}, 32, 64, None, 8),  # bound to a NUMA node
        ({"LOCAL_WORLD_SIZE": "4"}, 64, 64, 16.0, 4),
        ({"LOCAL_WORLD_SIZE": "4"}, 2, 2, None, 1),
        ({"LOCAL_WORLD_SIZE": ""}, 8, 8, None, 8),
        ({"LOCAL_WORLD_SIZE": "many"}, 8, 8, None, 8),
        ({"LOCAL_WORLD_SIZE": "2"}, 8, None, None, 4),  # an unknown launcher
    ],
)
def test_workers_follow_cpus_quotas_and_ranks(
    variables: Any, usable: int, launcher: Any, quota: Any, expected: int, monkeypatch: Any
) -> None:
    """The quota, rounded up, and CPUs that are not a rank's alone are shared; the user's number is taken."""
    for name in ranks.RANKS_OF_HOST:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    affinity = mock.Mock(side_effect=PermissionError) if launcher is None else lambda pid: range(launcher)
    monkeypatch.setattr(cpus, "usable_cpus", lambda: usable)
    monkeypatch.setattr(cpus, "cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    assert cpus.rank_cpus() == expected
    assert variables or fill.choose_workers(None, 1000) == expected
    assert fill.choose_workers(5, 1000) == 5
