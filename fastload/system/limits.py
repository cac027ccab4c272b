"""What limits this process: its cgroups, v1 and v2, as the kernel counts them, and its resource limits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

try:
    import resource as resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Iterator


# --- the kernel's counters and cgroups --------------------------------------------------------------------


def read_text(path: Path) -> str:
    """The text of a file; empty if it does not exist on this system, or this user cannot read it."""
    try:
        return path.read_text("utf-8", "surrogateescape")  # names of groups, processes and files are bytes
    except OSError:
        return ""


def read_counter(text: str, name: str) -> int | None:
    """The number in a line such as ``inactive_file 64`` or ``MemAvailable:  64 kB``; None without it."""
    match = re.search(rf"^{name}:?[ \t]+(\d+)( kB)?$", text, re.MULTILINE)
    return int(match[1]) * (1024 if match[2] else 1) if match else None


def cgroup_directories(controller: str, root: str | Path = "/") -> Iterator[tuple[Path, bool]]:
    """The directory of each group that limits this process, and whether it is a group of v2.

    A group comes before its parents. In a container the path can be the host's path, while the mount shows
    the container's own group as its root. Some of these directories then do not exist, and count as groups
    without a limit.

    Args:
        controller: `"memory"` or `"cpu"`.
        root: The directory that holds `proc` and `sys`; only tests pass anything but `/`.
    """
    root = Path(root)
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        is_v2 = controllers == ""
        if not is_v2 and controller not in controllers.split(","):
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for mount in ("", "unified") if is_v2 else (controller,):
            for depth in range(len(parts), -1, -1):
                yield root.joinpath("sys/fs/cgroup", mount, *parts[:depth]), is_v2


# --- resource limits --------------------------------------------------------------------------------------


def too_many_files() -> str:
    """Why a descriptor was not received, with the limit and the remedy."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    maximum = "without limit" if hard == resource.RLIM_INFINITY else f"to {hard:,}"
    return (
        f"because this process has reached its limit on open files: RLIMIT_NOFILE is {soft:,} and can be "
        f"raised {maximum} (ulimit -n). Raise the limit, or close files"
    )
