"""What lies on disk: finished caches and unfinished builds, and which files belong to each.

Rules:

1. A cache at DEST owns DEST, DEST.partial, DEST.errors.jsonl and DEST.lock (see `build` and `unfinished`).
2. A file is ours if it ends as fastload's caches do, a directory if all that lies in it has the names that
   a build gives. Nothing else is removed, and nothing at all where a foreign file lies between ours.
3. Whoever removes holds the builder's lock.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from fastload.cache.build.build_lock import is_being_built, only_builder
from fastload.cache.build.unfinished import NAMES, foreign_part
from fastload.cache.lmdb.format import TRAILER_MAGIC
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.errors import CacheCorruptError, CacheMismatchError

log = logging.getLogger("fastload")

PARTIAL, REPORT = ".partial", ".errors.jsonl"


@dataclass(frozen=True)
class Found:
    """A cache, or what is there of one.

    Attributes:
        path: The cache's own path, also where only DEST.partial is there.
        state: `"finished"`, `"damaged"`, `"unfinished"`, or `"building"` while a builder is at work.
        nbytes: Size of all its files.
        cache: Opened; None unless it is finished.
        problem: What is wrong with a damaged one.
    """

    path: str
    state: str
    nbytes: int
    cache: LMDBCache | None = None
    problem: str | None = None


def list_caches(directory: str) -> list[Found]:
    """The caches and unfinished builds that lie in a directory, not below it, sorted by path.

    A directory of shards is one cache, and is listed as that alone. What this user may not read is passed
    over, and a log line tells how many files and directories these were.

    Raises:
        FileNotFoundError: There is no such directory.
        NotADirectoryError: It is something else.
        PermissionError: It may not be read.
    """
    directory = os.path.abspath(directory)
    if _is_finished(directory):
        return [_look(directory)]
    paths = {os.path.join(directory, name.removesuffix(PARTIAL)) for name in os.listdir(directory)}
    found, closed = [], []
    for path in sorted(paths):
        try:
            if _is_finished(path) or _is_partial(path + PARTIAL):
                found.append(_look(path))
        except PermissionError:
            closed.append(path)
        except FileNotFoundError:
            continue  # removed since the directory was listed
    if closed:
        log.warning(
            "%s: %d files or directories may not be read by this user and are not listed, such as %s",
            directory,
            len(closed),
            closed[0],
        )
    return found


def files_of(path: str) -> list[str]:
    """Every file and directory of the cache at `path`, each directory after what lies in it.

    Raises:
        FileNotFoundError: There is neither a cache nor an unfinished build.
        CacheMismatchError: What lies there is something else.
    """
    found = []
    for place, is_ours in ((path, _is_finished), (path + PARTIAL, _is_partial)):
        if not os.path.lexists(place):
            continue
        if not is_ours(place):
            raise CacheMismatchError(
                f"{place} is no cache of fastload, or holds other files too: nothing was removed. "
                "If it was a cache and is cut short, delete it by hand"
            )
        if os.path.isdir(place):
            found += [os.path.join(place, name) for name in sorted(os.listdir(place))]
        found.append(place)
    if not found:
        raise FileNotFoundError(f"there is neither a cache nor an unfinished build at {path}")
    return found + [path + suffix for suffix in (REPORT,) if os.path.isfile(path + suffix)]


def remove(path: str) -> tuple[list[str], int]:
    """Remove the cache at `path` with all that belongs to it; processes that have it open can go on.

    Returns:
        What was removed, and how many bytes that were.

    Raises:
        FileNotFoundError: There is neither a cache nor an unfinished build.
        CacheMismatchError: What lies there is something else.
        CacheBusyError: It is being built.
    """
    path = os.path.abspath(path)
    files_of(path)  # nothing is touched, not even the lock, where nothing of ours is
    with only_builder(path):
        files = files_of(path)
        nbytes = size_of(files)
        for file in files:
            if os.path.isdir(file):
                os.rmdir(file)
            else:
                os.unlink(file)
    return files, nbytes


def size_of(files: list[str]) -> int:
    """Bytes of these files; directories count for nothing."""
    return sum(os.lstat(file).st_size for file in files if not os.path.isdir(file))


def _look(path: str) -> Found:
    nbytes = size_of(files_of(path))
    if not _is_finished(path):
        return Found(path, "building" if is_being_built(path) else "unfinished", nbytes)
    try:
        return Found(path, "finished", nbytes, LMDBCache(path))
    except (CacheCorruptError, CacheMismatchError) as error:
        return Found(path, "damaged", nbytes, problem=str(error))


def _is_finished(path: str) -> bool:
    if os.path.islink(path):
        return False  # it would be removed where it points to, or not at all
    if not os.path.isdir(path):
        return _ends_as_ours(path)
    names = os.listdir(path)
    return all(map(NAMES.fullmatch, names)) and any(_ends_as_ours(os.path.join(path, name)) for name in names)


def _is_partial(path: str) -> bool:
    """Whether a build left this; one that was killed early leaves an empty directory."""
    return os.path.lexists(path) and foreign_part(path) is None


def _ends_as_ours(path: str) -> bool:
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - len(TRAILER_MAGIC)))
        return file.read() == TRAILER_MAGIC
