"""Lists the caches and unfinished builds on disk, and finds the files that belong to each.

Rules:

1. A cache at DEST owns DEST, DEST.partial, DEST.errors.jsonl and a lock file (see `build`, `unfinished` and
   `build_lock`).
2. A file is ours if it ends as fastload's caches do. A directory is ours if all names in it are names that a
   build gives. Other files are never removed, and nothing is removed if a foreign file is among ours.
3. Removing files requires the builder's lock. Processes that build single shards have no lock: files are not
   removed while such a process works on this machine. A process on another machine then fails, and says why.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from dataclasses import dataclass

from fastload.cache.build.build_lock import is_being_built, only_builder
from fastload.cache.build.names import NAMES, foreign_part, is_written_here
from fastload.cache.build.unfinished import Unfinished
from fastload.cache.lmdb.copies import manifest_of_copy
from fastload.cache.lmdb.format import TRAILER_MAGIC
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.errors import CacheBusyError, CacheCorruptError, CacheError, CacheMismatchError
from fastload.system.logs import log

PARTIAL, REPORT = ".partial", ".errors.jsonl"


@dataclass(frozen=True)
class Found:
    """A cache, or an unfinished build of one.

    Attributes:
        path: The cache's own path, even if only DEST.partial exists.
        state: `"finished"`, `"damaged"`, `"unfinished"`, or `"building"` while a builder is at work.
        nbytes: Size of all its files.
        cache: The opened cache; None unless it is finished.
        problem: The reason why a damaged cache is damaged, or what a build of shards lacks.
        url: The URL of which the cache is a local copy; None if it is not a copy.
    """

    path: str
    state: str
    nbytes: int
    cache: LMDBCache | None = None
    problem: str | None = None
    url: str | None = None


def list_caches(directory: str) -> list[Found]:
    """The caches and unfinished builds in a directory, but not in its subdirectories, sorted by path.

    A directory of shards is listed as one cache. Files and directories that this user may not read are
    skipped, and a log line gives their number.

    Raises:
        FileNotFoundError: There is no such directory.
        NotADirectoryError: The path is not a directory.
        PermissionError: It may not be read.
    """
    directory = os.path.abspath(directory)
    if _is_finished(directory):
        return [_look(directory)]
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no directory at {directory}") from None
    except NotADirectoryError:
        raise NotADirectoryError(
            f"{directory} is not a directory: give the directory in which to look for caches"
        ) from None
    paths = {os.path.join(directory, name.removesuffix(PARTIAL)) for name in names}
    found, closed = [], []
    for path in sorted(paths):
        try:
            if _is_finished(path) or _is_partial(path + PARTIAL):
                found.append(_look(path))
        except PermissionError:
            closed.append(path)
        except FileNotFoundError:
            continue  # it was removed after the directory was listed
    if closed:
        log.warning(
            "%s: %d files or directories may not be read by this user and are not listed, such as %s",
            directory,
            len(closed),
            closed[0],
        )
    return found


def files_of(path: str) -> list[str]:
    """Every file and directory of the cache at `path`, each directory after its content.

    Raises:
        FileNotFoundError: There is neither a cache nor an unfinished build.
        CacheMismatchError: There is something else at the path.
        PermissionError: A directory may not be entered.
    """
    found = []
    for place, is_ours in ((path, _is_finished), (path + PARTIAL, _is_partial)):
        try:
            os.lstat(place)
        except (FileNotFoundError, NotADirectoryError):
            continue
        if not is_ours(place):
            raise CacheMismatchError(
                f"{place} is not a cache of fastload, or holds other files too: nothing was removed. "
                "If it is a truncated cache, delete it by hand"
            )
        found += _files_at(place)
    if not found:
        raise FileNotFoundError(f"there is neither a cache nor an unfinished build at {path}")
    return found + [path + suffix for suffix in (REPORT,) if os.path.isfile(path + suffix)]


def _files_at(place: str) -> list[str]:
    inside = sorted(os.listdir(place)) if os.path.isdir(place) else []
    return [*(os.path.join(place, name) for name in inside), place]


def removable_bytes(path: str) -> int:
    """The size of all files that `remove` would remove.

    Raises:
        FileNotFoundError: There is neither a cache nor an unfinished build.
        CacheMismatchError: There is something else at the path.
        CacheError: This user may not change the directory.
    """
    files, directory = files_of(path), os.path.dirname(path)
    if not os.access(directory, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise CacheError(f"{path} was not removed: files in {directory} may not be removed by this user")
    return size_of(files)


def remove(path: str) -> tuple[list[str], int]:
    """Remove the cache at `path` with all its files; processes that have it open can still use it.

    Returns:
        The removed paths, and their size in bytes.

    Raises:
        FileNotFoundError: There is neither a cache nor an unfinished build.
        CacheMismatchError: There is something else at the path.
        CacheBusyError: It is being built.
    """
    path = os.path.abspath(path)
    files_of(path)  # raises before anything is touched, including the lock, if no file of ours is there
    with only_builder(path):
        files = files_of(path)
        if _builds_shards_here(path):
            raise CacheBusyError(
                f"shards of {path} are being built on this machine: wait until they are finished"
            )
        nbytes = size_of(files)
        for file in files:
            if os.path.isdir(file):
                os.rmdir(file)
            else:
                with contextlib.suppress(FileNotFoundError):  # of a process on another machine, which failed
                    os.unlink(file)
    return files, nbytes


def size_of(files: list[str]) -> int:
    """The size of these files in bytes; directories count as 0."""
    nbytes = 0
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # a process that builds a shard removed its own file
            if not os.path.isdir(file):
                nbytes += os.lstat(file).st_size
    return nbytes


def _builds_shards_here(path: str) -> bool:
    """Whether a process of this machine builds a shard of the cache at `path`."""
    try:
        return any(map(is_written_here, os.listdir(path + PARTIAL)))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _look(path: str) -> Found:
    try:
        nbytes = size_of(files_of(path))
    except CacheMismatchError:  # another program's file beside it ends in .partial
        nbytes = size_of(_files_at(path))
    if not _is_finished(path):
        state = "building" if is_being_built(path) or _builds_shards_here(path) else "unfinished"
        return Found(path, state, nbytes, problem=_what_shards_lack(path))
    try:
        return Found(path, "finished", nbytes, LMDBCache(path), url=url_of_copy(path))
    except (CacheCorruptError, CacheMismatchError) as error:
        return Found(path, "damaged", nbytes, problem=str(error))


def _what_shards_lack(path: str) -> str | None:
    """What is left to do in a build of shards, or in a download; None if it is a build by one process."""
    url = url_of_copy(path + PARTIAL)
    if url is not None:
        return f"an unfinished copy of {url}: open that cache again to continue"
    with contextlib.closing(Unfinished(path)) as files:
        try:
            if not files.open() or not files.is_shared:
                return None
            missing = len(files.missing())
        except CacheError as error:
            return str(error)
        if not missing:
            return (
                f"all {files.plan.num_shards} shards are built: run 'fastload cache join {shlex.quote(path)}'"
            )
        build = "build them with 'fastload cache build-shard', then join"
        return f"{missing} of {files.plan.num_shards} shards are missing: {build}"


def url_of_copy(directory: str) -> str | None:
    """The URL of which a directory is a copy; None if it is not a copy."""
    manifest = manifest_of_copy(directory)
    return None if manifest is None else manifest.url


def _is_finished(path: str) -> bool:
    if os.path.islink(path):
        return False  # removing a link would not remove the cache itself
    if not os.path.isdir(path):
        return _ends_as_ours(path)
    names = os.listdir(path)
    return all(map(NAMES.fullmatch, names)) and any(_ends_as_ours(os.path.join(path, name)) for name in names)


def _is_partial(path: str) -> bool:
    """Whether a build left this; an early kill leaves an empty directory."""
    return os.path.lexists(path) and foreign_part(path) is None


def _ends_as_ours(path: str) -> bool:
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - len(TRAILER_MAGIC)))
        return file.read() == TRAILER_MAGIC
