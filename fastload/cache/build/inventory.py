"""Lists the caches and unfinished builds on disk, and finds the files that belong to each.

Rules:

1. A cache at DEST owns DEST, DEST.partial, DEST.errors.jsonl and a lock file (see `staging`).
2. A file is a cache if it ends as fastload's caches do, or if it is an LMDB file of decoded files. Other
   files are never removed.
3. Nothing is removed while a builder of this machine is at work. A builder on another machine fails, and
   says why.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from fastload.cache import lmdb_file
from fastload.cache.build.staging import REPORT, is_being_built, is_partial, only_builder
from fastload.cache.decoded_files import details_of, is_of_files, open_files
from fastload.cache.lmdb.files import PARTIAL_SUFFIX
from fastload.cache.lmdb.format import TRAILER_MAGIC
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.errors import CacheCorruptError, CacheError, CacheMismatchError


@dataclass(frozen=True)
class CacheOnDisk:
    """A cache, or an unfinished build of one.

    Attributes:
        path: The cache's own path, even if only DEST.partial exists.
        state: `"finished"`, `"damaged"`, `"unfinished"`, `"building"` while a builder is at work, or
            `"files"` of decoded files.
        nbytes: Size of all its files.
        cache: The opened cache; None unless it is finished.
        problem: Why a damaged cache is damaged, or what an unfinished one lacks.
        num_files: How many results of decoding files are in it.
    """

    path: str
    state: str
    nbytes: int
    cache: LMDBCache | None = None
    problem: str | None = None
    num_files: int | None = None


def list_caches(directory: str) -> list[CacheOnDisk]:
    """The caches and unfinished builds in a directory, but not in its subdirectories, sorted by path.

    Files and directories that this user cannot read are skipped.

    Raises:
        FileNotFoundError: There is no such directory.
        PermissionError: It cannot be read.
    """
    directory = os.path.abspath(os.path.expanduser(directory))
    if is_of_files(directory) or _is_finished(directory):
        return [_look(directory)]
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"there is no directory at {directory}") from None
    caches = []
    names = [name.removesuffix(PARTIAL_SUFFIX) for name in names if not name.endswith(lmdb_file.BESIDE)]
    for path in sorted({os.path.join(directory, name) for name in names}):
        with contextlib.suppress(PermissionError, FileNotFoundError):  # it might have just been removed
            if is_of_files(path) or _is_finished(path) or is_partial(path + PARTIAL_SUFFIX):
                caches.append(_look(path))
    return caches


def files_of(path: str) -> list[str]:
    """Every file and directory of the cache at `path`, each directory after its content.

    Raises:
        FileNotFoundError: There is neither a cache nor an unfinished build.
        CacheMismatchError: Something else is at the path.
        PermissionError: A directory cannot be entered.
    """
    if is_of_files(path):
        return lmdb_file.files_of(path)
    files = []
    for root, is_own in ((path, _is_finished), (path + PARTIAL_SUFFIX, is_partial)):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(root)  # raises if the directory cannot be entered
        if not os.path.lexists(root):
            continue
        if not is_own(root):
            raise CacheMismatchError(
                f"{root} is not a cache of fastload: nothing was removed. If it is a truncated cache, or one "
                "of an earlier format, delete it by hand"
            )
        files.append(root)
    if not files:
        raise FileNotFoundError(f"there is neither a cache nor an unfinished build at {path}")
    return files + [path + REPORT] * os.path.isfile(path + REPORT)


def remove(path: str) -> tuple[list[str], int]:
    """Remove the cache at `path` with all its files; processes that have it open can still use it.

    Returns:
        The removed paths, and their size in bytes.

    Raises:
        FileNotFoundError: There is neither a cache nor an unfinished build.
        CacheMismatchError: Something else is at the path.
        CacheBusyError: It is being built.
    """
    path = os.path.abspath(path)
    files_of(path)  # raises before anything is touched, including the lock, if no file is ours
    # Decoded files can be removed while they are used: processes go on with the files that they have open.
    with contextlib.nullcontext() if is_of_files(path) else only_builder(path):
        files = files_of(path)
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
        with contextlib.suppress(FileNotFoundError):  # a process that builds has removed its own file
            nbytes += 0 if os.path.isdir(file) else os.lstat(file).st_size
    return nbytes


def _look(path: str) -> CacheOnDisk:
    if is_of_files(path):
        try:
            nbytes, store = size_of(files_of(path)), open_files(path)
        except (CacheError, OSError) as error:
            return CacheOnDisk(path, "damaged", 0, problem=str(error))
        return CacheOnDisk(path, "files", nbytes, num_files=details_of(store)["num_pixels"])
    is_finished = _is_finished(path)
    try:
        nbytes = size_of(files_of(path))
    except CacheMismatchError:  # another program's file beside it ends in .partial
        nbytes = size_of([path])
    if not is_finished:
        state = "building" if is_being_built(path) else "unfinished"
        return CacheOnDisk(path, state, nbytes, problem="it was interrupted: run the build again")
    try:
        return CacheOnDisk(path, "finished", nbytes, LMDBCache(path))
    except (CacheCorruptError, CacheMismatchError) as error:
        return CacheOnDisk(path, "damaged", nbytes, problem=str(error))


def _is_finished(path: str) -> bool:
    if os.path.islink(path) or not os.path.isfile(path):
        return False  # removing a link would not remove the cache itself
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - len(TRAILER_MAGIC)))
        return file.read() == TRAILER_MAGIC
