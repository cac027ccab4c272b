"""What every test shares: the leak guard, quiet workers, and faults' own time-outs."""

from __future__ import annotations

import gc
import os
import select
import threading
import time
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

GRACE_S = 5.0  # how long a process, thread or descriptor may take to go after its owner is gone


def pytest_collection_finish() -> None:
    """What was imported by now stays: keep it out of the guard's collections, which then take no time."""
    gc.collect()
    gc.freeze()


def _children() -> set[int]:
    """Living processes below this one, less the fork server and the resource tracker themselves.

    Those two are started once and serve until the interpreter exits; workers that a fork server started
    are its children, and count.
    """
    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            command = child.cmdline()
            is_service = child.ppid() == os.getpid() and any(
                "resource_tracker" in word or "forkserver" in word for word in command
            )
            if not is_service and child.status() != psutil.STATUS_ZOMBIE:
                found.add(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def _names_in_shm() -> set[str]:
    # Semaphores of multiprocessing are named for a moment by any process of this machine, ours or not.
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


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
    shared = [target for target in _descriptors().values() if "memfd:" in target]
    return {
        "child processes": _children(),
        "threads": {t.name for t in threading.enumerate() if not t.name.startswith("pydevd")},
        "files in /dev/shm": _names_in_shm(),
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
def leak_guard() -> Iterator[None]:
    """No test leaves a process, a thread, a shared segment, a socket or a file in /dev/shm behind."""
    before = _snapshot()
    yield
    deadline = time.monotonic() + GRACE_S
    while grown := _grown(before, _snapshot()):
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {grown}")
        select.select([], [], [], 0.02)
