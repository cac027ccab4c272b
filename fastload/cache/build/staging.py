"""The file of an unfinished cache, DEST.partial, the report beside a cache, and the lock of a destination.

One build at a time writes DEST.partial, and holds the lock of the destination, as the removal of a cache
does. Rules:

1. DEST appears when the cache is complete and on the disk; its report is there before it. A process that dies
   leaves DEST.partial, which the next build replaces.
2. Nothing that another program has put at these paths is changed or removed.
3. The lock ends with the process that holds it, and forked workers do not hold it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fastload.cache.build.writer import writing
from fastload.cache.lmdb.files import PARTIAL_SUFFIX
from fastload.errors import CacheBusyError, CacheError
from fastload.system.disk import sync_directory, write_new
from fastload.system.humanize import readable_size
from fastload.system.locks import is_lock_file_held, is_lock_file_held_here, lock_file
from fastload.system.logs import log
from fastload.system.ranks import are_several_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fastload.batch.failures import FailedSample

REPORT = ".errors.jsonl"  # the end of the name of a cache's report, beside the cache
_REPORTED = ("index", "path", "type", "reason", "worker")
_LMDB_MAGIC = struct.pack("=I", 0xBEEFC0DE)
_MAGIC_AT = 16  # behind the header of the first page
_POLL_S = 0.2
_LOG_POLLS = 50
_sleep = time.sleep
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


def begin(destination: str) -> str:
    """The path of the file that a build writes; what a killed build left there is removed.

    Raises:
        CacheError: Something else is there, or it cannot be removed.
    """
    path = destination + PARTIAL_SUFFIX
    with writing(path):
        if os.path.lexists(path):
            if not is_partial(path):
                raise CacheError(
                    f"{path} is not from a build of fastload, which writes an unfinished cache there, and "
                    "was not changed: move it away, or use a different path for the cache"
                )
            os.unlink(path)
    return path


def is_partial(path: str) -> bool:
    """Whether a build has written a file at this path; an early kill leaves an empty one."""
    if os.path.islink(path) or not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        start = file.read(_MAGIC_AT + len(_LMDB_MAGIC))
    return not start or start[_MAGIC_AT:] == _LMDB_MAGIC


def publish(partial: str, destination: str, left_out: list[FailedSample]) -> None:
    """Move the finished cache to its destination, after placing its report beside it.

    Args:
        partial: The path of the finished file.
        destination: Its new path.
        left_out: All left-out samples, by ascending index.

    Raises:
        CacheError: Another program has put something at the destination, which stays.
    """
    taken = CacheError(
        f"another program created {destination} while the cache was built; it was not changed. The finished "
        f"cache is {partial}: move it to a path of its own"
    )
    if os.path.lexists(destination):
        raise taken
    with writing(destination):
        if left_out:
            write_report(destination, left_out)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(destination + REPORT)  # the report of an older cache
        try:
            os.link(partial, destination)  # unlike a rename, it replaces no file that came meanwhile
        except FileExistsError:
            raise taken from None
        except OSError:  # a file system without hard links
            os.rename(partial, destination)
        else:
            os.unlink(partial)
        sync_directory(os.path.dirname(destination))


def write_report(destination: str, left_out: Iterable[FailedSample]) -> None:
    """Write the report about the samples that a cache leaves out: one line of JSON each."""
    lines = [json.dumps({name: getattr(sample, name) for name in _REPORTED}) for sample in left_out]
    with writing(destination):
        own = f"{destination}{REPORT}.{os.urandom(8).hex()}"
        write_new(own, "".join(f"{line}\n" for line in lines).encode())
        os.replace(own, destination + REPORT)


# --- the lock ---------------------------------------------------------------------------------------------


def lock_name(path: str) -> str:
    """The path of the lock file of a destination; no other program uses this name."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.fastload-lock")


@contextlib.contextmanager
def only_builder(path: str, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock on a destination.

    On a file system without locks nothing is locked, and a log line says so.

    Args:
        path: The path of the cache.
        wait: Wait for a builder in another process. A thread of this process is never waited for, because it
            can be this one.

    Raises:
        CacheBusyError: Another builder holds it.
        CacheError: The lock file cannot be made.
    """
    name = lock_name(path)
    for attempt in itertools.count():
        with contextlib.ExitStack() as stack:
            with writing(path):
                try:
                    has_lock = stack.enter_context(lock_file(name))
                except OSError as error:
                    if error.errno not in _NO_LOCKS:
                        raise
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name)
                    log.info("%s: not locked, because this file system does not have locks", path)
                    has_lock = True
            if has_lock:
                yield
                return
        is_own = is_lock_file_held_here(name)
        busy = f"{path} is being built by {'another thread' if is_own else _holder(name)}"
        if is_own or not wait:
            raise CacheBusyError(f"{busy}: wait until it has finished")
        if attempt % _LOG_POLLS == 0:
            level = logging.INFO if attempt or are_several_ranks() else logging.WARNING
            nbytes = 0
            with contextlib.suppress(OSError):
                nbytes = os.stat(path + PARTIAL_SUFFIX).st_size
            log.log(
                level, "this process waits until it has finished: %s, %s so far", busy, readable_size(nbytes)
            )
        _sleep(_POLL_S)


def is_being_built(path: str) -> bool:
    """Whether a builder holds the lock on a destination now."""
    return is_lock_file_held(lock_name(path))


def _holder(name: str) -> str:
    try:
        return f"process {int(Path(name).read_text())}"
    except (OSError, ValueError):  # it has just ended, or has not written its id yet
        return "another process"
