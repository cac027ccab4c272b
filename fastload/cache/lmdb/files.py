"""Finds the files of a cache, and keeps the table of files that this process has open.

A process opens a file once, under all its names; a forked child uses the open files of its parent. The open
files of a local copy (see `copies`) hold a shared lock, so that the copy is not removed while it is used.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

from fastload.cache.lmdb.open_file import OpenFile
from fastload.cache.locks import share_lock
from fastload.errors import CacheCorruptError, CacheError, CacheMismatchError, add_note
from fastload.system.limits import allows_files, limit_on_files

if TYPE_CHECKING:
    from fastload.cache.lmdb.description import Plan

SHARD_SUFFIX = ".lmdb"
MANIFEST_NAME = "cache.json"  # in an object store and in a local copy, see `manifest` and `copies`
_FILES_A_SHARD = 2  # its descriptor, and that of its mapping
_MOST_NAMED = 10  # missing shards that an error lists

# By device and inode; a forked child inherits its parent's open files.
_open_files: weakref.WeakValueDictionary[tuple[int, int], OpenFile] = weakref.WeakValueDictionary()
# By process, because a lock that another thread held during a fork is never released in the child.
_locks: dict[int, threading.Lock] = {}


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
    if not os.path.isdir(path):
        file = _open_file(path)
        if file.description.plan.num_shards > 1:
            raise CacheMismatchError(f"{_name(file)}: open the directory that holds all of them")
        return (file,)
    names = sorted(name for name in os.listdir(path) if name.endswith(SHARD_SUFFIX))
    if not names:
        raise CacheMismatchError(
            f"{path} is not a cache: neither a file nor a directory of {SHARD_SUFFIX} files{_hint(path)}"
        )
    is_copy = os.path.exists(os.path.join(path, MANIFEST_NAME))
    shards: dict[int, OpenFile] = {}
    for name in names:
        try:
            file = _open_file(os.path.join(path, name), is_copy=is_copy)
        except (OSError, CacheError) as error:
            cause = error.__cause__ if isinstance(error, CacheError) else error
            if isinstance(cause, OSError) and cause.errno == errno.EMFILE:
                add_note(
                    error,
                    f"A process keeps two files open for each of the {len(names):,} shards of {path}, but "
                    f"{limit_on_files()}: raise the limit, or build the cache with fewer shards",
                )
            raise
        number = file.description.shard
        first = next(iter(shards.values()), file)
        _check_same_cache(file, first)
        if number in shards:
            raise CacheMismatchError(
                f"{file.path} and {shards[number].path} are the same shard: take one out"
            )
        shards[number] = file
    num_shards = first.description.plan.num_shards
    if len(shards) < num_shards:
        lost = (number for number in range(num_shards) if number not in shards)
        named = [str(number) for number, _ in zip(lost, range(_MOST_NAMED), strict=False)]
        if num_shards - len(shards) > len(named):
            named.append("...")
        raise CacheMismatchError(
            f"{path}: of {num_shards} shards, number {', '.join(named)} (from 0) is missing: put it back, "
            "or delete the directory and build it again"
        )
    return tuple(shards[number] for number in range(num_shards))


def check_openable(num_shards: int) -> None:
    """Check that this process may open a cache of so many shards.

    Raises:
        CacheError: It may not.
    """
    num_files = _FILES_A_SHARD * num_shards
    if not allows_files(num_files):
        raise CacheError(
            f"a cache of {num_shards:,} shards needs {num_files:,} open files in each process that reads it, "
            f"but {limit_on_files()}: raise the limit, or build the cache with fewer shards. Nothing was "
            "built yet"
        )


def _check_same_cache(file: OpenFile, first: OpenFile) -> None:
    plan, other = file.description.plan, first.description.plan
    if plan.build_id != other.build_id:
        raise CacheMismatchError(
            f"{file.path} and {first.path} are shards of two caches: take out the shards that do not "
            "belong here"
        )
    # The names of the classes are left out: a resumed build writes them again.
    if replace(plan, classes=None) != replace(other, classes=None):
        raise CacheCorruptError(
            f"{file.path} and {first.path} are shards of one cache, but their descriptions of it differ: "
            "delete the directory and build it again"
        )


def _name(file: OpenFile) -> str:
    plan = file.description.plan
    return f"{file.path} is shard {file.description.shard + 1} of {plan.num_shards}"


def _hint(path: str) -> str:
    partial = f"{path}.partial"
    if not os.path.exists(partial):
        return ""
    return f"; an unfinished build lies at {partial}: run the build again to resume it"


def _open_file(path: str, *, is_copy: bool = False) -> OpenFile:
    if os.path.exists(path) and not os.path.isfile(path):
        raise CacheMismatchError(f"{path} is not a file: a cache is a file or a directory of files")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"there is no cache at {path}{_hint(path)}") from None
    try:
        if is_copy and not share_lock(fd):
            raise FileNotFoundError(f"the copy at {path} is being removed")
        status = os.fstat(fd)
        key = status.st_dev, status.st_ino
        with _locks.setdefault(os.getpid(), threading.Lock()):
            known = _open_files.get(key)
            if known is None or not _is_unchanged(known):
                _open_files[key] = known = OpenFile(fd, path)
                fd = -1
            return known
    finally:
        if fd >= 0:
            os.close(fd)


def _is_unchanged(file: OpenFile) -> bool:
    try:
        file.check()
    except CacheMismatchError:
        return False
    return True
