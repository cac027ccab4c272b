"""What every test shares: the leak guard, quiet workers, and faults' own time-outs."""

from __future__ import annotations

import gc
import os
import select
import threading
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

GRACE_S = 5.0  # how long a process, thread or descriptor may take to go after its owner is gone


def _children() -> set[int]:
    """Process ids of the direct children that are alive, less the ones that serve the whole session."""
    pids = set()
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as file:
                pids.update(int(pid) for pid in file.read().split())
        except FileNotFoundError:
            continue  # that thread ended meanwhile
    return {pid for pid in pids if not _is_session_service(pid)}


def _is_session_service(pid: int) -> bool:
    """The fork server and the resource tracker are started once and serve until the interpreter exits."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return True  # gone
    return b"resource_tracker" in command or b"forkserver" in command or not command


def _descriptors() -> dict[str, str]:
    """What each open descriptor points to, without those that the session's services hold."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue  # the listing's own descriptor
    return found


def _snapshot() -> dict[str, object]:
    gc.collect()
    shared = [target for target in _descriptors().values() if "memfd:" in target or "/dev/shm" in target]
    return {
        "child processes": _children(),
        "threads": {t.name for t in threading.enumerate() if not t.name.startswith("pydevd")},
        "files in /dev/shm": set(os.listdir("/dev/shm")),
        "shared segments": len(shared),
        "sockets": sum(target.startswith("socket:") for target in _descriptors().values()),
    }


def _grown(before: dict[str, object], after: dict[str, object]) -> dict[str, object]:
    grown: dict[str, object] = {}
    for name, now in after.items():
        was = before[name]
        if isinstance(now, set) and isinstance(was, set):
            if now - was:
                grown[name] = now - was
        elif isinstance(now, int) and isinstance(was, int) and now > was:
            grown[name] = f"{was} before, {now} after"
    return grown


@pytest.fixture(autouse=True)
def leak_guard(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test leaves a process, a thread, a shared segment, a socket or a file in /dev/shm behind."""
    if request.node.get_closest_marker("leaks_on_purpose"):
        yield
        return
    before = _snapshot()
    yield
    deadline = time.monotonic() + GRACE_S
    while grown := _grown(before, _snapshot()):
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {grown}")
        select.select([], [], [], 0.02)
