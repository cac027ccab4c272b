"""Finds and opens the files of a cache.

The open files of a local copy (see `copies`) hold a shared lock, so the copy is not removed while in use. A
forked child uses the open files of its parent.
"""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from fastload.cache.lmdb.open_file import OpenFile
from fastload.errors import CacheError, CacheMismatchError
from fastload.system.limits import allows_files, limit_on_files
from fastload.system.locks import flock_fd

if TYPE_CHECKING:
    from fastload.cache.lmdb.description import Plan

SHARD_SUFFIX = ".lmdb"
MANIFEST_NAME = "cache.json"  # in an object store and in a local copy, see `manifest` and `mirror`
_FILES_A_SHARD = 2  # its descriptor, and that of its mapping


def shard_name(plan: Plan, shard: int) -> str:
    """The name of the file of a shard."""
    return f"{shard:05d}-of-{plan.num_shards:05d}{SHARD_SUFFIX}"


def open_cache(path: str) -> tuple[OpenFile, ...]:
    """The file at `path`, or the shards in the directory at `path`, in the order of their indices.

    Raises:
        FileNotFoundError: There is no such file.
        CacheMismatchError: It is not a cache of this format, or its shards do not belong together.
        CacheCorruptError: A file is damaged.
    """
    if os.path.isdir(path):
        names = sorted(name for name in os.listdir(path) if name.endswith(SHARD_SUFFIX))
        paths = [os.path.join(path, name) for name in names]
        if not paths:
            raise CacheMismatchError(
                f"{path} is not a cache: neither a file nor a directory of {SHARD_SUFFIX} files{_hint(path)}"
            )
    else:
        paths = [path]
    is_copy = os.path.exists(os.path.join(path, MANIFEST_NAME))
    try:
        files = sorted(
            (open_file(one, is_copy=is_copy) for one in paths), key=lambda file: file.indices.start
        )
    except (OSError, CacheError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, OSError) and cause.errno == errno.EMFILE:
            raise CacheError(f"{path} cannot be opened: {_too_many(len(paths))}") from cause
        raise
    plan = files[0].description.plan
    # The names of the classes are left out: a resumed build writes them again.
    expected = replace(plan, classes=None)
    for number, file in enumerate(files):
        if replace(file.description.plan, classes=None) != expected:
            raise CacheMismatchError(
                f"{file.path} and {files[0].path} are shards of two caches: remove the shards that do not "
                "belong here"
            )
        if file.description.shard != number:
            break
    else:
        if len(files) == plan.num_shards:
            return tuple(files)
        number = len(files)
    raise CacheMismatchError(
        f"{path} has {len(files):,} of the {plan.num_shards:,} shards of a cache, and shard {number + 1:,} "
        "is missing, or a different one is there twice. Open the directory of all shards, put back what is "
        "missing, or delete the directory and build it again"
    )


def check_openable(num_shards: int) -> None:
    """Check that this process can open a cache of this many shards.

    Raises:
        CacheError: It cannot.
    """
    if not allows_files(_FILES_A_SHARD * num_shards):
        raise CacheError(f"nothing was built: {_too_many(num_shards)}")


def _too_many(num_shards: int) -> str:
    return (
        f"a cache of {num_shards:,} shards needs {_FILES_A_SHARD * num_shards:,} open files in each process "
        f"that reads it, but {limit_on_files()}: raise the limit, or build the cache with fewer shards"
    )


def _hint(path: str) -> str:
    partial = f"{path}.partial"
    if not os.path.exists(partial):
        return ""
    return f"; an unfinished build lies at {partial}: run the build again to resume it"


def open_file(path: str, *, is_copy: bool = False) -> OpenFile:
    """Open one file of a cache; of a local copy with its lock.

    Raises:
        FileNotFoundError: There is no such file, or the copy is being removed.
        CacheMismatchError: It is not a cache of this format.
        CacheCorruptError: It is damaged.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise CacheMismatchError(f"{path} is not a file: a cache is a file or a directory of files")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"there is no cache at {path}{_hint(path)}") from None
    try:
        if is_copy and not flock_fd(fd, shared=True):
            raise FileNotFoundError(f"the copy at {path} is being removed")
        return OpenFile(fd, path)
    except BaseException:
        os.close(fd)
        raise
