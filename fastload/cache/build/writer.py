"""Writes one LMDB file: keys in order, with regular commits.

Rules:

1. Commits bound the memory of a transaction. They are not synced: a file is synced to the disk at its end.
2. The functions import lmdb themselves: it has no wheels for free-threaded Python, where caches in RAM work
   without it. Reading a cache on disk never needs it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from fastload.cache.lmdb.format import pack_key, write_description
from fastload.errors import CacheError
from fastload.system.os_errors import why_unwritable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastload.cache.lmdb.description import Description

_MIN_MAP_BYTES, _MAP_BYTES = 1 << 26, 1 << 42  # only addresses: the file is as long as what is written
_COMMIT_BYTES = 8 << 20  # small enough that workers do not run out of tasks during a commit


class ShardWriter:
    """Writes values to a new file.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        with writing(path):
            self._environment = _new_environment(path)
        self._transaction: Any = None
        self._nbytes = 0  # of the uncommitted values

    def put(self, index: int, value: Any) -> None:
        """Append a value, any buffer; it is copied before this method returns."""
        with writing(self._path):
            if self._transaction is None:
                self._transaction = self._environment.begin(write=True)
            self._transaction.put(pack_key(index), value, append=True)
        self._nbytes += len(value)
        if self._nbytes >= _COMMIT_BYTES:
            self._commit()

    def _commit(self) -> None:
        transaction, self._transaction, self._nbytes = self._transaction, None, 0
        if transaction is not None:
            with writing(self._path):
                transaction.commit()

    def finish(self, description: Description) -> None:
        """Write the description of the file, sync it to the disk, and close it."""
        self._commit()
        with writing(self._path):
            num_pages = int(self._environment.info()["last_pgno"]) + 1
            page_bytes = int(self._environment.stat()["psize"])
            self._environment.close()
            write_description(self._path, description, num_pages, page_bytes)

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


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Raise write errors as a CacheError that names the file."""
    lmdb = lmdb_package()
    try:
        yield
    except (lmdb.Error, OSError) as error:
        if isinstance(error, CacheError):
            raise
        raise CacheError(f"cannot write the cache {path}: {why_unwritable(error, path)}") from error
