"""Advisory locks on open files, which never wait for long.

flock(2) locks belong to the file description. An inherited or duplicated descriptor shares its lock, so open
a descriptor for this purpose only.
"""

from __future__ import annotations

import os

from fastload.system.posix import fcntl


def try_lock(fd: int, *, attempts: int = 1) -> bool:
    """Take the exclusive lock, or return False if another holder has it; yields the core between attempts."""
    for attempt in range(attempts):
        if attempt:
            os.sched_yield()
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        return True
    return False


def unlock(fd: int) -> None:
    """Release the lock, for every copy of the descriptor."""
    fcntl.flock(fd, fcntl.LOCK_UN)
