"""The budget: what is free by meminfo and every cgroup, and what a user's budget means."""

from __future__ import annotations

import os
import resource
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from fastload.system import budget as budget_module
from fastload.system.budget import available_bytes, cgroup_limit_bytes, parse_budget, parse_ring_bytes
from fastload.system.cgroups import oom_kills
from tests.kit.faults import limited

if TYPE_CHECKING:
    from pathlib import Path
from types import SimpleNamespace

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


def test_no_cgroup_means_meminfo(tmp_path: Path) -> None:
    """Without cgroups MemAvailable is what is free."""
    assert available_bytes(write(tmp_path, {})) == 16_000_000 * 1024


def test_own_group_limits(tmp_path: Path) -> None:
    """The process's own cgroup v2 limits, less what is used, plus what could be given back."""
    files = {"proc/self/cgroup": "0::/job\n", **v2("job", 4 * GB, 3 * GB, GB // 2)}

    assert available_bytes(write(tmp_path, files)) == 3 * GB // 2


def test_every_ancestor_limits(tmp_path: Path) -> None:
    """The tightest group on the way up counts, whatever the group itself says."""
    files = {"proc/self/cgroup": "0::/a/b\n", **v2("a/b", "max", GB), **v2("a", 2 * GB, GB)}

    assert available_bytes(write(tmp_path, files)) == GB


def test_memory_high_limits(tmp_path: Path) -> None:
    """memory.high, above which the kernel throttles, limits too."""
    files = {"proc/self/cgroup": "0::/a\n", **v2("a", "max", GB), "sys/fs/cgroup/a/memory.high": 3 * GB}

    assert available_bytes(write(tmp_path, files)) == 2 * GB


def test_container_root(tmp_path: Path) -> None:
    """In a container that shows its own group as the root, a path of the host leads there."""
    files = {"proc/self/cgroup": "0::/docker/abc\n", **v2("", 4 * GB, GB)}

    assert available_bytes(write(tmp_path, files)) == 3 * GB


def test_version_one(tmp_path: Path) -> None:
    """Groups of cgroup v1 limit; its number for no limit does not."""
    lines = "5:cpu:/x\n3:memory,hugetlb:/a/b\n"
    files = {"proc/self/cgroup": lines, **v1("a/b", 9223372036854771712, GB), **v1("a", 2 * GB, GB, GB // 4)}

    assert available_bytes(write(tmp_path, files)) == GB * 5 // 4


def test_never_below_zero(tmp_path: Path) -> None:
    """A group above its limit leaves nothing, not less."""
    files = {"proc/self/cgroup": "0::/a\n", **v2("a", GB, 2 * GB)}

    assert available_bytes(write(tmp_path, files)) == 0


def test_the_limit_is_that_of_the_tightest_group(tmp_path: Path) -> None:
    """The least limit on the way up, however much of it is used."""
    files = {"proc/self/cgroup": "0::/a/b\n", **v2("a/b", 4 * GB, GB), **v2("a", 2 * GB, GB)}

    assert cgroup_limit_bytes(write(tmp_path, files)) == 2 * GB


def test_no_group_with_a_limit_is_none(tmp_path: Path) -> None:
    """Without cgroups, and where all of them say "max", there is no limit."""
    assert cgroup_limit_bytes(write(tmp_path, {})) is None
    assert cgroup_limit_bytes(write(tmp_path, {"proc/self/cgroup": "0::/a\n", **v2("a", "max", GB)})) is None


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


def test_this_system() -> None:
    """On this system something is free."""
    assert available_bytes() > 0


@pytest.mark.parametrize(
    ("budget", "expected"),
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
def test_budgets(budget: Any, expected: int) -> None:
    """Every documented way to say a budget means the bytes that it should."""
    assert parse_budget(budget, available=10 * GB) == expected


@pytest.mark.parametrize(
    "budget",
    ["", "40", "GB", "40 parsecs", "-1GB", "0GB", 0, -5, 0.0, 1.5, float("nan"), True, None, "1e3MB"],
)
def test_nonsense_is_refused(budget: Any) -> None:
    """What is no budget raises, showing it under the name of its argument, and the ways to say one."""
    with pytest.raises(ValueError, match=r'^budget=.*"40GB"'):
        parse_budget(budget, available=GB)
    with pytest.raises(ValueError, match=r'^ring_bytes=.*"40GB"'):
        parse_budget(budget, name="ring_bytes", available=GB)


def test_the_automatic_limit_of_batches_is_a_quarter_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other settings are read as the budget of a cache is."""
    monkeypatch.setattr(budget_module, "available_bytes", lambda: 4000)

    assert parse_ring_bytes("auto") == 1000
    assert parse_ring_bytes("3kB") == 3000
    assert parse_ring_bytes(77) == 77


def test_many_loaders_read_the_free_memory_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the kernel's figures takes longer than a small epoch."""
    readings = iter([4000, 8000])
    monkeypatch.setattr(budget_module, "available_bytes", lambda: next(readings))
    seconds = iter([10.0, 10.9, 11.0])
    monkeypatch.setattr(budget_module, "time", SimpleNamespace(monotonic=lambda: next(seconds)))

    limits = [parse_ring_bytes("auto") for _ in range(3)]

    assert limits == [1000, 1000, 2000]
