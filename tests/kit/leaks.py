"""What a test leaves behind: child processes, threads, descriptors, files in /dev/shm."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import threading
import time
from multiprocessing import forkserver, resource_tracker
from typing import Any

import psutil
import torch

GRACE_S = 5.0  # how long a process, thread or descriptor may take to go after its owner is gone

# Whether the kernel was built with a list of each thread's children (CONFIG_PROC_CHILDREN).
LISTS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")

# What libraries open at their first use and keep until the interpreter exits.
KEPT_OPEN = re.compile(
    r"/dev/nvidia"  # CUDA's driver
    r"|.*/mpl-data/fonts/"  # matplotlib's fonts
    r"|.*/pym-\d+-\w+ \(deleted\)"  # the heap of multiprocessing's Value and Array; it keeps free space
)


def children() -> set[int]:
    """Living processes below this one, less the fork server and the resource tracker, which stay for good."""
    found = set()
    for pid in descendants(os.getpid()):
        try:
            child = psutil.Process(pid)
            words = " ".join(child.cmdline()) if child.ppid() == os.getpid() else ""
            is_service = "resource_tracker" in words or "forkserver" in words
            if not is_service and child.status() != psutil.STATUS_ZOMBIE:
                found.add(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def descendants(pid: int) -> list[int]:
    """All processes below one; psutil finds them by reading the parent of every process of the machine."""
    if not LISTS_CHILDREN:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process or its thread has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found + [one for child in found for one in descendants(child)]


def names_in_shm() -> set[str]:
    """Names in /dev/shm, less those that other programs of this machine use meanwhile."""
    # Semaphores of multiprocessing have names for a moment, and only joblib's say in which process.
    names = (name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-"))
    return {name for name in names if not _is_foreign(name)}


def _is_foreign(name: str) -> bool:
    """Whether a file in /dev/shm belongs to a living process that does not descend from this one."""
    owner = re.match(r"(?:torch_|sem\.loky-)(\d+)[_-]", name)
    if owner is None or int(owner[1]) == os.getpid():
        return False
    with contextlib.suppress(psutil.Error, OSError):  # it ended, or this process cannot see /proc
        return os.getpid() not in {parent.pid for parent in psutil.Process(int(owner[1])).parents()}
    return False


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


def snapshot() -> dict[str, set[Any]]:
    """What this process holds now, by kind. Collect garbage before it if garbage must not count."""
    if torch.__version__ < "2.13":  # whose loader joins no worker that outlived its patience, after an error
        multiprocessing.active_children()
    return {
        "child processes": children(),
        "threads": {t.name for t in threading.enumerate() if not t.name.startswith("pydevd")},
        "files in /dev/shm": names_in_shm(),
        "descriptors": set(_descriptors().items()),  # a number that points elsewhere now is a new one
    }


def held() -> tuple[set[int], set[Any], set[Any]]:
    """The processes below this one, zombies and services too, its threads and its descriptors."""
    now = snapshot()
    return set(descendants(os.getpid())), now["threads"], now["descriptors"]


def held_soon(expected: tuple[set[int], set[Any], set[Any]]) -> tuple[set[int], set[Any], set[Any]]:
    """What is held now, or in some moments: threads and a fork server's processes end on their own."""
    deadline = time.monotonic() + GRACE_S
    while (now := held()) != expected and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    return now


def grown(before: dict[str, set[Any]], after: dict[str, set[Any]]) -> dict[str, set[Any]]:
    """What the second snapshot has and the first had not, by kind."""
    return {name: now - before[name] for name, now in after.items() if now - before[name]}
