"""Advisory locks on an open file, never waited for.

flock(2) locks belong to the file description: a descriptor that was inherited or duplicated shares its lock,
so open one for the purpose.
"""

from __future__ import annotations

import os


def try_lock(fd: int, *, attempts: int = 1) -> bool:
    """Take the exclusive lock, or say that another holds it; yields the core between attempts."""
    import fcntl  # not on Windows, where nothing gets here

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
    """Give the lock back, for every copy of the descriptor."""
    import fcntl

    fcntl.flock(fd, fcntl.LOCK_UN)
