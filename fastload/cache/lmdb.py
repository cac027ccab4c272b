"""LMDBCache: finished caches on disk, read through the page cache.

Made by `build.build_lmdb`, read in any process. `lmdb_format`
says what a file looks like. Rules:

1. Only finished files are opened, so nobody writes: no lock file, no reader table.
2. One environment a file and process, whoever opens it, as LMDB demands; opened again after a fork.
3. LMDB sees a file only after its index was compared with its checksum; the checksum of a record is verified
   at its first read in each process. Damage is an error, never a wrong sample.
4. A value is copied out of the transaction before it is read; samples are views of that copy.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import lmdb
import numpy as np

from fastload.cache.lmdb_format import Meta, pack_key, read_description, unpack_value
from fastload.cache.record import decode
from fastload.errors import CacheCorruptError, CacheError, CacheMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from fastload.cache.columns import Allocate


class _OpenFile:
    """An open environment, what it says of itself, and which records were verified; for one process."""

    def __init__(self, path: str) -> None:
        self.pid = os.getpid()
        self.meta = read_description(path)
        self.verified = bytearray(self.meta.num_samples)
        with _lmdb_errors(path):
            self.environment = lmdb.open(
                path, subdir=False, readonly=True, create=False, lock=False, readahead=False, meminit=False
            )

    def read(self, path: str, key: bytes) -> bytes | None:
        """A copy of the value under a key, or None if there is none."""
        with _lmdb_errors(path), self.environment.begin() as transaction:
            value: bytes | None = transaction.get(key)
            return value


# By process, device and inode. A forked child finds nothing of its own here and opens the file again.
_open_files: weakref.WeakValueDictionary[tuple[int, int, int], _OpenFile] = weakref.WeakValueDictionary()
# By process: a lock that was held at the time of a fork is never released in the child.
_locks: dict[int, threading.Lock] = {}


def _open_file(path: str) -> _OpenFile:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        partial = f"{path}.partial"
        hint = f"; an unfinished build lies at {partial}" if os.path.exists(partial) else ""
        raise FileNotFoundError(f"there is no cache at {path}{hint}") from None
    if not os.path.isfile(path):
        raise CacheMismatchError(f"{path} is no file: an LMDB cache is a single file")
    key = (os.getpid(), status.st_dev, status.st_ino)
    with _locks.setdefault(key[0], threading.Lock()):
        file = _open_files.get(key)
        if file is None:
            for other, inherited in list(_open_files.items()):
                if other[1:] == key[1:]:  # our copy of what our parent opened: LMDB wants it closed first
                    inherited.environment.close()
            file = _open_files[key] = _OpenFile(path)
        return file


# These say nothing about the file's content: it is open by other means, not allowed, or the system failed.
_SYSTEM_ERRORS = (lmdb.Error, lmdb.ReadonlyError, lmdb.DiskError, lmdb.MemoryError, lmdb.LockError)


@contextlib.contextmanager
def _lmdb_errors(path: str) -> Iterator[None]:
    try:
        yield
    except lmdb.Error as error:
        if type(error) in _SYSTEM_ERRORS:
            raise CacheError(f"cannot read the cache {path}: {error}") from error
        raise CacheCorruptError(f"{path} is no LMDB file, or it is damaged: {error}") from error


class LMDBCache:
    """A finished cache in one LMDB file, read-only.

    Args:
        path: The file.

    Attributes:
        path: Absolute.
        meta: What the file says about itself.

    Raises:
        FileNotFoundError: There is no such file.
        CacheMismatchError: The file is no cache of this format.
        CacheCorruptError: The file is damaged.
    """

    layout = "lmdb"
    is_shared = True
    budget_bytes: int | None = None  # the file is complete; memory is the page cache's affair

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self._file: _OpenFile | None = _open_file(self.path)
        self._is_closed = False
        self.meta = self._file.meta

    def __reduce__(self) -> tuple[Any, ...]:
        return _unopened, (self.path, self.meta)

    def __copy__(self) -> LMDBCache:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> LMDBCache:
        return self

    @property
    def num_samples(self) -> int:
        """Number of samples, all of them stored."""
        return self.meta.num_samples

    @property
    def num_cached(self) -> int:
        """The same: only finished caches are opened."""
        return self.meta.num_samples

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return os.stat(self.path).st_size

    def explain(self) -> str:
        """Why this cache is the one in use."""
        return f"the file {self.path}, {self.num_samples:,} samples, {self.nbytes / 1e9:.2f} GB"

    def missing(self) -> npt.NDArray[np.intp]:
        """Nothing: a finished cache takes nothing."""
        return np.empty(0, np.intp)

    def __contains__(self, index: object) -> bool:
        return not self._is_closed and isinstance(index, int) and 0 <= index < self.num_samples

    def _opened(self) -> _OpenFile:
        file = self._file
        if file is None or file.pid != os.getpid():
            file = _open_file(self.path)
            if file.meta != self.meta:
                raise CacheMismatchError(f"{self.path} was replaced by another cache while it was in use")
            self._file = file
        return file

    def get(self, index: int) -> Any | None:
        """The sample at `0 <= index < num_samples`; None only after close().

        Arrays are read-only views of a private copy of the record; tensors are private copies.

        Raises:
            CacheCorruptError: The record is damaged or missing.
        """
        if self._is_closed:
            return None
        file = self._opened()
        value = file.read(self.path, pack_key(index))
        try:
            if value is None:
                raise CacheCorruptError("its record is missing")
            record = unpack_value(value, index, verify=not file.verified[index])
            file.verified[index] = 1
            return decode(record)
        except CacheCorruptError as error:
            raise CacheCorruptError(
                f"{self.path}: sample {index}: {error}. The file is damaged: delete it and build it again"
            ) from error

    def put(self, index: int, sample: Any) -> bool:
        """False: a finished cache takes nothing."""
        return False

    def gather(self, indices: npt.NDArray[np.intp], allocate: Allocate) -> None:
        """Nothing: records are read one by one."""
        return

    def close(self) -> None:
        """Give up this object's hold on the environment; samples that were handed out stay valid."""
        self._file = None
        self._is_closed = True


def _unopened(path: str, meta: Meta) -> LMDBCache:
    cache = LMDBCache.__new__(LMDBCache)
    cache.path, cache.meta = path, meta
    cache._file, cache._is_closed = None, False
    return cache
