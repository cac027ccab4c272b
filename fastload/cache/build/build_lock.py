"""The lock that allows one builder per destination.

Builds of caches, and removals, take it in the parent. It ends with the process that holds it, and forked
workers do not hold it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from fastload.cache.build.writer import writing
from fastload.errors import CacheBusyError
from fastload.system.locks import is_lock_file_held, lock_file
from fastload.system.logs import log

if TYPE_CHECKING:
    from collections.abc import Iterator

# Destinations that this process builds, with its id, and an object per builder: the lock belongs to the
# process, and does not exclude its threads.
_building: dict[tuple[int, str], object] = {}
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


def lock_name(path: str) -> str:
    """The path of the lock file of a destination; no other program uses this name."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.fastload-lock")


@contextlib.contextmanager
def only_builder(path: str, title: str | None = None) -> Iterator[None]:
    """Hold the lock on a destination; never waits.

    On a file system without locks nothing is locked, and a log line says so: the files of a build are safe
    without a lock (see `unfinished`).

    Args:
        path: The path of the cache.
        title: Its name in messages; None for its path.

    Raises:
        CacheBusyError: A different builder holds it.
        CacheError: The lock file cannot be made.
    """
    name, key, own = lock_name(path), _key(path), object()
    title = title or path
    with contextlib.ExitStack() as stack:
        if _building.setdefault(key, own) is not own:
            raise CacheBusyError(f"{title} is being built by another thread: wait until it has finished")
        stack.callback(_building.pop, key)
        with writing(path):
            try:
                is_ours = stack.enter_context(lock_file(name, by_process=True))
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)
                log.info("%s: not locked, because this file system does not have locks", path)
                is_ours = True
        if not is_ours:
            raise CacheBusyError(f"{title} is being built by {_holder(name)}: wait until it has finished")
        yield


def is_being_built(path: str) -> bool:
    """Whether a builder holds the lock on a destination now."""
    return _key(path) in _building or is_lock_file_held(lock_name(path))


def _key(path: str) -> tuple[int, str]:
    return os.getpid(), os.path.realpath(path)


def _holder(name: str) -> str:
    try:
        return f"process {int(Path(name).read_text())}"
    except (OSError, ValueError):  # it has just ended, or has not written its id yet
        return "another process"
