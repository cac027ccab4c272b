"""Open LMDB files: one environment a file and process, whoever opens it, and which records were verified.

Called by `lmdb_cache` in any process. Rules:

1. Only finished files are opened, so nobody writes: no lock file, no reader table.
2. One environment a file and process, as LMDB demands; opened again after a fork.
3. LMDB sees a file only after its index was compared with its checksum; the checksum of a record is verified
   at its first read in each process. Damage is an error, never a wrong sample.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import lmdb

from fastload.cache.disk.format import VALUE_HEADER_BYTES, pack_key, read_description, unpack_value
from fastload.errors import CacheCorruptError, CacheError, CacheMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SHARD_SUFFIX = ".lmdb"
_UNREAD, _VERIFIED, _MISSING = 0, 1, 2  # what a process knows of a record


class OpenFile:
    """An open environment and what it says of itself, for one process.

    Attributes:
        pid: Of the process.
        path: By which it was opened first.
        nbytes: Size of the file.
        description: As the file has it.
        indices: Of its samples, those that are left out too.
    """

    def __init__(self, path: str) -> None:
        self.pid = os.getpid()
        self.path = path
        self.nbytes = os.path.getsize(path)
        self.description = read_description(path)
        self.indices = self.description.indices
        self._states = bytearray(len(self.indices))
        for first, count in self.description.missing:
            start = first - self.indices.start
            self._states[start : start + count] = bytes([_MISSING]) * count
        try:
            self.environment = lmdb.open(
                path, subdir=False, readonly=True, create=False, lock=False, readahead=False, meminit=False
            )
        except lmdb.Error as error:
            raise lmdb_error(path, error) from error

    @contextlib.contextmanager
    def reading(self, *, buffers: bool) -> Iterator[Any]:
        """A read transaction.

        Args:
            buffers: Give values as views of the file's pages, valid in the transaction only.
        """
        begin: Any = self.environment.begin  # its types ask for a literal
        try:
            with begin(buffers=buffers) as transaction:
                yield transaction
        except lmdb.Error as error:
            raise lmdb_error(self.path, error) from error

    def is_stored(self, index: int) -> bool:
        """Whether the sample was not left out."""
        return self._states[index - self.indices.start] != _MISSING

    def record(self, transaction: Any, index: int, *, verify: bool = False) -> memoryview:
        """The record of a stored sample, verified if this process had not read it yet, or if `verify`.

        Raises:
            CacheCorruptError: The record is damaged or missing.
        """
        return self._checked(transaction.get(pack_key(index)), index, verify)

    def records(self, transaction: Any, indices: Sequence[int]) -> list[memoryview]:
        """The same for many samples, in a transaction with buffers: views of the file's pages.

        Raises:
            CacheCorruptError: A record is damaged or missing.
        """
        get, states, start = transaction.get, self._states, self.indices.start
        found = []
        for index in indices:
            value = get(pack_key(index))
            is_known = states[index - start] == _VERIFIED  # then it is there, and whole
            found.append(value[VALUE_HEADER_BYTES:] if is_known else self._checked(value, index, False))
        return found

    def _checked(self, value: Any, index: int, verify: bool) -> memoryview:
        place = index - self.indices.start
        try:
            if value is None:
                raise CacheCorruptError("its record is missing")
            record = unpack_value(value, index, verify=verify or self._states[place] == _UNREAD)
        except CacheCorruptError as error:
            raise damaged(self.path, index, error) from error
        self._states[place] = _VERIFIED
        return record


def damaged(path: str, index: int, error: Exception) -> CacheCorruptError:
    """The error that tells a user where the damage is and what to do."""
    return CacheCorruptError(
        f"{path}: sample {index}: {error}. The file is damaged: delete it and build it again"
    )


# By process, device and inode. A forked child finds nothing of its own here and opens the file again.
_open_files: weakref.WeakValueDictionary[tuple[int, int, int], OpenFile] = weakref.WeakValueDictionary()
# By process: a lock that was held at the time of a fork is never released in the child.
_locks: dict[int, threading.Lock] = {}


def open_cache(path: str) -> tuple[OpenFile, ...]:
    """The file at `path`, or the shards in the directory at `path`, in the order of their indices.

    Raises:
        FileNotFoundError: There is no such file.
        CacheMismatchError: It is no cache of this format, or its shards do not belong together.
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
            f"{path} is no cache: neither a file nor a directory of {SHARD_SUFFIX} files{_hint(path)}"
        )
    shards: dict[int, OpenFile] = {}
    for name in names:
        file = _open_file(os.path.join(path, name))
        number = file.description.shard
        first = next(iter(shards.values()), file)
        if file.description.plan.build_id != first.description.plan.build_id:
            raise CacheMismatchError(
                f"{file.path} and {first.path} are shards of two caches: take out what does not belong here"
            )
        if number in shards:
            raise CacheMismatchError(
                f"{file.path} and {shards[number].path} are the same shard: take one out"
            )
        shards[number] = file
    num_shards = first.description.plan.num_shards
    lost = sorted(set(range(num_shards)) - set(shards))
    if lost:
        raise CacheMismatchError(
            f"{path}: of {num_shards} shards, number {', '.join(map(str, lost))} (from 0) is not there: "
            "put it back, or delete the directory and build it again"
        )
    return tuple(shards[number] for number in range(num_shards))


def _name(file: OpenFile) -> str:
    plan = file.description.plan
    return f"{file.path} is shard {file.description.shard + 1} of {plan.num_shards}"


def _hint(path: str) -> str:
    partial = f"{path}.partial"
    if not os.path.exists(partial):
        return ""
    return f"; an unfinished build lies at {partial}: run the build again, and it goes on from there"


def _open_file(path: str) -> OpenFile:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no cache at {path}{_hint(path)}") from None
    if not os.path.isfile(path):
        raise CacheMismatchError(f"{path} is no file: a cache is a file or a directory of files")
    key = (os.getpid(), status.st_dev, status.st_ino)
    with _locks.setdefault(key[0], threading.Lock()):
        file = _open_files.get(key)
        if file is None:
            for other, inherited in list(_open_files.items()):
                if other[1:] == key[1:]:  # our copy of what our parent opened: LMDB wants it closed first
                    inherited.environment.close()
            file = _open_files[key] = OpenFile(path)
        return file


# These say nothing about the file's content: it is open by other means, not allowed, or the system failed.
_SYSTEM_ERRORS = (lmdb.Error, lmdb.ReadonlyError, lmdb.DiskError, lmdb.MemoryError, lmdb.LockError)


def lmdb_error(path: str, error: lmdb.Error) -> CacheError:
    """What LMDB says while reading, as an error of ours that names the file."""
    if type(error) in _SYSTEM_ERRORS:
        return CacheError(f"cannot read the cache {path}: {error}")
    return CacheCorruptError(f"{path} is no LMDB file, or it is damaged: {error}")
