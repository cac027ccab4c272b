"""The files of caches on disk: which there are, whose they are, who builds one, and how they are removed.

Rules:

1. A cache at PATH owns PATH, PATH.partial (while it is built) and what LMDB needs beside these, the report
   PATH.errors.jsonl, and a lock file.
2. A file is a cache if it says so. No other file is changed or removed, and no link.
3. One build of a path at a time holds its lock, as the removal of a cache does. The lock ends with the
   process that holds it, and forked workers do not hold it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fastload.cache import lmdb_file
from fastload.cache.lmdb_file import RefusedError
from fastload.cache.lmdb_store import LmdbStore, open_store
from fastload.errors import CacheBusyError, CacheCorruptError, CacheError, CacheMismatchError
from fastload.system.linux import check_disk_caches
from fastload.system.locks import is_lock_file_held, is_lock_file_held_here, lock_file
from fastload.system.logs import say_once
from fastload.system.os_errors import write_errors_as
from fastload.system.progress import Progress
from fastload.system.ranks import are_several_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTIAL = ".partial"  # the end of the name of an unfinished cache
REPORT = ".errors.jsonl"  # of a cache's report
BESIDE = ("", *lmdb_file.BESIDE)  # LMDB's file, and what lies beside it while it is filled
NEW_BYTES = 2 * mmap.PAGESIZE  # of a file of LMDB that is empty, or whose first write was cut short
_LMDB_MAGIC = struct.pack("=I", 0xBEEFC0DE)
_MAGIC_AT = 16  # behind the header of the first page
_POLL_S = 0.2
_sleep = time.sleep


@dataclass(frozen=True)
class CacheOnDisk:
    """A cache, or an unfinished build of one.

    Attributes:
        path: The cache's own path, even if only PATH.partial exists.
        files: All its files.
        nbytes: Their size.
        state: `"finished"`, `"damaged"`, `"unreadable"` here and now, `"filling"` of decoded files,
            `"unfinished"` of a build, or `"building"` while one is at work.
        store: What is in it; None if it cannot be read.
        problem: Why not, or what an unfinished one lacks.
    """

    path: str
    files: list[str]
    nbytes: int
    state: str
    store: LmdbStore | None = None
    problem: str | None = None


def list_caches(path: str) -> list[CacheOnDisk]:
    """The cache at a path, or those in a directory, but not in its subdirectories, sorted by path.

    What is not a cache, or this user cannot read, is skipped.

    Raises:
        FileNotFoundError: There is neither.
        PermissionError: The directory cannot be read.
    """
    with contextlib.suppress(FileNotFoundError):
        return [look(path)]
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"there is neither a cache nor a directory at {path}") from None
    found = []
    for own in sorted({os.path.join(path, name.removesuffix(PARTIAL)) for name in names}):
        with contextlib.suppress(PermissionError, FileNotFoundError):  # it might have just been removed
            found.append(look(own))
    return found


def look(path: str, *, strict: bool = False) -> CacheOnDisk:
    """The cache at a path.

    Args:
        path: Of the cache.
        strict: Whether something else at its paths is an error.

    Raises:
        FileNotFoundError: There is neither a cache nor an unfinished build.
        CacheMismatchError: Something else is at the path.
        PermissionError: It cannot be read.
    """
    found = []
    for own in (path, path + PARTIAL):
        with contextlib.suppress(*[] if strict else [CacheMismatchError]):
            found += [own] * is_ours(own)
    if not found:
        raise FileNotFoundError(f"there is neither a cache nor an unfinished build at {path}")
    ends = [*(own + end for own in found for end in BESIDE), path + REPORT]
    files = list(filter(os.path.isfile, ends))
    known = path, files, sum(map(os.path.getsize, files))
    if found[0] != path:
        state = "building" if is_being_built(path) else "unfinished"
        return CacheOnDisk(*known, state, problem="it was interrupted: run the build again")
    try:
        store = open_store(path)
    except CacheError as error:
        state = "damaged" if isinstance(error, CacheCorruptError) else "unreadable"
        return CacheOnDisk(*known, state, problem=str(error))
    return CacheOnDisk(*known, "finished" if store.meta["finished"] else "filling", store)


def is_ours(path: str) -> bool:
    """Whether a cache is at a path, finished or not, damaged or not; an early kill leaves an empty one.

    Raises:
        CacheMismatchError: Something else is there.
        PermissionError: It cannot be read.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    if os.path.isfile(path) and not os.path.islink(path):
        with open(path, "rb") as file:
            start = file.read(_MAGIC_AT + len(_LMDB_MAGIC))
        is_new = path.endswith(PARTIAL) and os.path.getsize(path) <= NEW_BYTES
        if is_new and not start[:_MAGIC_AT].strip(b"\0\x08") and _LMDB_MAGIC.startswith(start[_MAGIC_AT:]):
            return True
        if start[_MAGIC_AT:] == _LMDB_MAGIC:
            with contextlib.suppress(CacheCorruptError, RefusedError):
                open_store(path)
            return True
    raise CacheMismatchError(
        f"{path} is not a cache of fastload, and was not changed: move it away, or use a different path for "
        "the cache. If it is a cache of an earlier version, delete it by hand"
    )


def remove(path: str) -> CacheOnDisk:
    """Remove the cache at `path` with all its files; processes that have it open can still use it.

    Returns:
        What there was, with the size that it had.

    Raises:
        FileNotFoundError: There is neither a cache nor an unfinished build.
        CacheMismatchError: Something else is at the path.
        CacheBusyError: It is being built.
    """
    look(path, strict=True)  # raises before anything is touched, including the lock, if no file is ours
    with only_builder(path):
        cache = look(path, strict=True)
        for file in cache.files:
            with contextlib.suppress(FileNotFoundError):  # of a process on another machine, which failed
                os.unlink(file)
    return cache


def damaged_keys(store: LmdbStore, *, shown: bool = False) -> list[bytes]:
    """The keys of the records whose checksums are wrong; draws a bar, if standard error is a terminal.

    Raises:
        CacheCorruptError: The file is damaged outside of its records.
    """
    damaged = []
    with Progress(f"verifying {store.path}", store.num_records, shown=shown, unit="records") as progress:
        for key, nbytes, is_intact in store.checked():
            progress.advance(nbytes)
            if not is_intact:
                damaged.append(key)
    return damaged


# --- the lock ---------------------------------------------------------------------------------------------


def lock_name(path: str) -> str:
    """The path of the lock file of a destination; no other program uses this name."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.fastload-lock")


@contextlib.contextmanager
def only_builder(path: str, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock on a destination.

    Args:
        path: The path of the cache.
        wait: Wait for a builder in another process. A thread of this process is never waited for, because it
            can be this one.

    Raises:
        CacheBusyError: Another builder holds it.
        CacheError: The lock file cannot be made.
    """
    check_disk_caches(path)
    name = lock_name(path)
    while True:
        with contextlib.ExitStack() as stack:
            with write_errors_as(CacheError, "the cache", path):
                has_lock = stack.enter_context(lock_file(name))
            if has_lock:
                yield
                return
        is_own = is_lock_file_held_here(name)
        busy = f"{path} is being built by {'another thread' if is_own else _holder(name)}"
        if is_own or not wait:
            raise CacheBusyError(f"{busy}: wait until it has finished")
        level = logging.INFO if are_several_ranks() else logging.WARNING
        say_once(f"this process waits until it has finished: {busy}", level)
        _sleep(_POLL_S)


def is_being_built(path: str) -> bool:
    """Whether a builder holds the lock on a destination now."""
    return is_lock_file_held(lock_name(path))


def _holder(name: str) -> str:
    try:
        return f"process {int(Path(name).read_text())}"
    except (OSError, ValueError):  # it has just ended, or has not written its id yet
        return "another process"
