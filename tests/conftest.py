"""What every test shares: the leak guard, quiet workers, and faults' own time-outs."""

from __future__ import annotations

import gc
import os
import re
import select
import signal
import threading
import time
from multiprocessing import forkserver, resource_tracker
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

GRACE_S = 5.0  # how long a process, thread or descriptor may take to go after its owner is gone

# What libraries open at their first use and keep until the interpreter exits.
KEPT_OPEN = re.compile(
    r"/dev/nvidia"  # CUDA's driver
    r"|.*/pym-\d+-\w+ \(deleted\)"  # the heap of multiprocessing's Value and Array; it keeps free space
)


def pytest_configure() -> None:
    """Take Ctrl-C, which the background job of a shell ignores: tests send it, and would wait for ever."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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


def _descriptors() -> dict[int, str]:
    """What each open descriptor points to, less those that are opened once and kept on purpose."""
    services = {
        forkserver._forkserver._forkserver_alive_fd,  # type: ignore[attr-defined]
        resource_tracker._resource_tracker._fd,  # type: ignore[attr-defined]
    }
    found = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue  # the listing's own descriptor
        if fd not in services and not KEPT_OPEN.match(target):
            found[fd] = target
    return found


def _snapshot() -> dict[str, set[Any]]:
    gc.collect()
    return {
        "child processes": _children(),
        "threads": {t.name for t in threading.enumerate() if not t.name.startswith("pydevd")},
        "files in /dev/shm": _names_in_shm(),
        "descriptors": set(_descriptors().items()),  # a number that points elsewhere now is a new one
    }


def _grown(before: dict[str, set[Any]], after: dict[str, set[Any]]) -> dict[str, set[Any]]:
    return {name: now - before[name] for name, now in after.items() if now - before[name]}


@pytest.fixture(autouse=True)
def leak_guard() -> Iterator[None]:
    """No test leaves a process, a thread, a descriptor or a file in /dev/shm behind."""
    before = _snapshot()
    yield
    deadline = time.monotonic() + GRACE_S
    while grown := _grown(before, _snapshot()):
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {grown}")
        select.select([], [], [], 0.02)
