"""Writes one LMDB file: keys in order, with regular commits; at its end the table of the records.

Rules:

1. Commits bound the memory of a transaction. They are not synced: a file is synced to the disk at its end.
2. The functions import lmdb themselves: it has no wheels for free-threaded Python, where caches in RAM work
   without it. Reading a cache on disk never needs it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.cache.lmdb.format import PADDING, Table, pack_key, unpack_key, write_end
from fastload.errors import CacheError
from fastload.system.os_errors import write_errors_as

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from fastload.cache.lmdb.description import Plan

_MIN_MAP_BYTES, _MAP_BYTES = 1 << 26, 1 << 42  # only addresses: the file is as long as what is written
_COMMIT_BYTES = 8 << 20  # small enough that workers do not run out of tasks during a commit


class FileWriter:
    """Writes the values of a cache to a new file."""

    def __init__(self, path: str, plan: Plan) -> None:
        self._path, self._plan = path, plan
        self._table = Table.empty(plan.num_samples)
        with writing(path):
            self._environment = _new_environment(path)
            self._inode = os.stat(path).st_ino
        self._transaction: Any = None
        self._nbytes = 0  # of the uncommitted values

    def put(self, index: int, value: bytes, crc32: int) -> None:
        """Append a value, with the checksum of its record; it is copied before this method returns."""
        with writing(self._path):
            if self._transaction is None:
                self._transaction = self._environment.begin(write=True)
            self._transaction.put(pack_key(index), value, append=True)
        self._table.crcs[index] = crc32
        self._nbytes += len(value)
        if self._nbytes >= _COMMIT_BYTES:
            self._commit()

    def _commit(self) -> None:
        transaction, self._transaction, self._nbytes = self._transaction, None, 0
        if transaction is not None:
            with writing(self._path):
                transaction.commit()

    def finish(self) -> None:
        """Write the table of the records and the description, sync the file to the disk, and close it."""
        self._commit()
        with writing(self._path):
            page_bytes = int(self._environment.stat()["psize"])
            with self._environment.begin(buffers=True) as transaction:
                self._find_records(transaction, page_bytes)
            environment_bytes = page_bytes * (int(self._environment.info()["last_pgno"]) + 1)
            self._environment.close()
            if os.stat(self._path).st_ino != self._inode:  # the file system has no locks
                raise CacheError(f"another process has replaced {self._path}: run one build")
            write_end(self._path, environment_bytes, self._table, self._plan)

    def _find_records(self, transaction: Any, page_bytes: int) -> None:
        """Note where the records are: at their addresses in LMDB's mapping, less the address of the file."""
        starts, sizes = self._table.starts, self._table.sizes
        file_at = None
        for key, value in transaction.cursor():
            row = unpack_key(key)
            at = np.frombuffer(value, np.uint8).__array_interface__["data"][0]
            if file_at is None:
                page_at = at - at % page_bytes  # mappings begin at whole pages
                number = int.from_bytes(ctypes.string_at(page_at, 8), sys.byteorder)  # a page begins with it
                file_at = page_at - number * page_bytes
            starts[row], sizes[row] = at - file_at + len(PADDING), len(value) - len(PADDING)

    def close(self) -> None:
        """Close the file; uncommitted values are lost."""
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            transaction.abort()
        self._environment.close()


def lmdb_package() -> Any:
    """The package lmdb, which writes cache files; fastload reads them without it.

    Raises:
        CacheError: It is not installed.
    """
    try:
        import lmdb
    except ModuleNotFoundError as error:
        raise CacheError(
            "cache files are written with the package lmdb, which is not installed (pip install lmdb). "
            'If it has no wheels for this Python, as for free-threaded ones, use cache="ram", or build the '
            "file with a different Python: reading it does not need the package"
        ) from error
    return lmdb


def _new_environment(path: str) -> Any:
    lmdb = lmdb_package()
    # The data format of LMDB 0.9, which every release reads.
    options: dict[str, Any] = {"lib_version": 0} if int(lmdb.__version__.partition(".")[0]) >= 3 else {}
    map_bytes = _MAP_BYTES
    while True:
        try:
            # Unused bytes of pages are zeros (meminit, lmdb's default): a file never holds old content of
            # this process's memory, and equal plans give equal files.
            return lmdb.open(path, subdir=False, map_size=map_bytes, lock=False, sync=False, **options)
        except lmdb.MemoryError:  # the process can use fewer addresses
            if map_bytes <= _MIN_MAP_BYTES:
                raise
            map_bytes //= 2


def writing(path: str) -> AbstractContextManager[None]:
    """Raise write errors as a CacheError that names the file."""
    return write_errors_as(CacheError, "the cache", path, also=(lmdb_package().Error,))
