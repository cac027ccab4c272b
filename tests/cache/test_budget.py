"""What the machine grants: memory by meminfo and every cgroup, budgets, CPUs and workers."""

from __future__ import annotations

import os
import resource
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from fastload.cache.build import processes
from fastload.system import budget as budget_module
from fastload.system import cpus
from fastload.system.budget import available_bytes, cgroup_limit_bytes, parse_memory, parse_prefetch_memory
from fastload.system.cgroups import oom_kills
from tests.kit.faults import limited

if TYPE_CHECKING:
    from pathlib import Path


GB = 10**9


def write(root: Path, files: dict[str, Any]) -> Path:
    files = {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   16000000 kB\n", **files}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
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
        ({"proc/self/cgroup": "0::/job\n", **v2("job", 4 * GB, 3 * GB, GB // 2)}, 3 * GB // 2, 4 * GB),
        ({"proc/self/cgroup": "0::/a/b\n", **v2("a/b", "max", GB), **v2("a", 2 * GB, GB)}, GB, 2 * GB),
        ({"proc/self/cgroup": "0::/a/b\n", **v2("a/b", 4 * GB, GB), **v2("a", 2 * GB, GB)}, GB, 2 * GB),
        (
            {"proc/self/cgroup": "0::/a\n", **v2("a", "max", GB), "sys/fs/cgroup/a/memory.high": 3 * GB},
            2 * GB,
            3 * GB,
        ),
        ({"proc/self/cgroup": "0::/docker/abc\n", **v2("", 4 * GB, GB)}, 3 * GB, 4 * GB),
        (
            {
                "proc/self/cgroup": "5:cpu:/x\n3:memory,hugetlb:/a/b\n",
                **v1("a/b", 9223372036854771712, GB),
                **v1("a", 2 * GB, GB, GB // 4),
            },
            GB * 5 // 4,
            2 * GB,
        ),
        ({"proc/self/cgroup": "0::/a\n", **v2("a", GB, 2 * GB)}, 0, GB),
        ({"proc/self/cgroup": "0::/a\n", **v2("a", "max", GB)}, 16_000_000 * 1024, None),
    ],
    ids=["none", "own", "ancestor", "both", "memory.high", "container", "version 1", "above it", "no limit"],
)
def test_the_tightest_group_limits(
    files: dict[str, Any], free_bytes: int, limit_bytes: int | None, tmp_path: Path
) -> None:
    """What is free: MemAvailable, or a limit on the way up less what is used and cannot be given back."""
    write(tmp_path, files)

    assert available_bytes(tmp_path) == free_bytes
    assert cgroup_limit_bytes(tmp_path) == limit_bytes


def test_a_group_whose_name_is_not_text_limits_all_the_same(tmp_path: Path) -> None:
    """Names of groups are bytes."""
    write(tmp_path, v2(os.fsdecode(b"job\xff"), 2 * GB, GB))
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_bytes(b"0::/job\xff\n")

    assert cgroup_limit_bytes(tmp_path) == 2 * GB


@pytest.mark.parametrize("path", ["a/b/", ""], ids=["own group", "container"])
def test_kills_are_counted_in_the_group_of_the_process(tmp_path: Path, path: str) -> None:
    """In a container whose path is the host's, the group at the mount counts."""
    files = {"proc/self/cgroup": "0::/a/b\n", f"sys/fs/cgroup/{path}memory.events": "oom 3\noom_kill 2\n"}

    assert oom_kills(write(tmp_path, files)) == 2


def test_without_a_count_there_were_no_kills(tmp_path: Path) -> None:
    """Also on a system without cgroups."""
    assert oom_kills(tmp_path) == 0


def test_a_limit_on_address_space_counts(tmp_path: Path) -> None:
    """RLIMIT_AS less what is mapped already; without /proc that is unknown."""
    write(tmp_path, {"proc/self/statm": "1000 200 30 1 0 40 0\n"})
    with limited(resource.RLIMIT_AS, 10 * GB):
        assert available_bytes(tmp_path) == 10 * GB - 1000 * resource.getpagesize()
        (tmp_path / "proc/self/statm").unlink()
        assert available_bytes(tmp_path) == 10 * GB


def test_without_proc_the_system_is_asked_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What psutil cannot read sysinfo(2) tells: the free pages."""

    def fail() -> Any:
        raise FileNotFoundError(2, "No such file or directory", "/proc/meminfo")

    monkeypatch.setattr(psutil, "virtual_memory", fail)

    assert 0 < available_bytes(tmp_path) <= os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()


@pytest.mark.parametrize(
    ("max_memory", "expected"),
    [
        ("auto", 8 * GB),
        (0.5, 5 * GB),
        (1.0, 10 * GB),
        (12345, 12345),
        ("40GB", 40 * GB),
        ("512MiB", 512 << 20),
        ("1.5 gb", 3 * GB // 2),
        ("7 KB", 7000),
        ("100B", 100),
        ("2TiB", 2 << 40),
    ],
)
def test_budgets(max_memory: Any, expected: int) -> None:
    """Every documented way to say a budget means the bytes that it should."""
    assert parse_memory(max_memory, available=10 * GB) == expected


@pytest.mark.parametrize(
    "max_memory",
    ["", "40", "GB", "40 parsecs", "-1GB", "0GB", 0, -5, 0.0, 1.5, float("nan"), True, None, "1e3MB"],
)
def test_nonsense_is_refused(max_memory: Any) -> None:
    """What is no budget raises, showing it under the name of its argument, and the ways to say one."""
    with pytest.raises(ValueError, match=r'^max_memory=.*"40GB"'):
        parse_memory(max_memory, available=GB)
    with pytest.raises(ValueError, match=r'^prefetch_memory=.*"40GB"'):
        parse_memory(max_memory, name="prefetch_memory", available=GB)


def test_the_automatic_limit_of_batches_is_a_quarter_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other settings are read as `max_memory` of a cache is."""
    monkeypatch.setattr(budget_module, "available_bytes", lambda: 4000)

    assert parse_prefetch_memory("auto") == 1000
    assert parse_prefetch_memory("3kB") == 3000
    assert parse_prefetch_memory(77) == 77


def test_many_loaders_read_the_free_memory_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the kernel's figures takes longer than a small epoch."""
    readings = iter([4000, 8000])
    monkeypatch.setattr(budget_module, "available_bytes", lambda: next(readings))
    seconds = iter([10.0, 10.9, 11.0])
    monkeypatch.setattr(budget_module, "time", SimpleNamespace(monotonic=lambda: next(seconds)))

    limits = [parse_prefetch_memory("auto") for _ in range(3)]

    assert limits == [1000, 1000, 2000]


# --- CPUs ----------------------------------------------------------------------------------------------


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
