"""Write one LMDB file: keys in order, committed now and then, going on where a killed writer stopped.

Rules:

1. Room in the map is made before a transaction begins, for all that it can need: a transaction that meets a
   full map is lost, and the memory that its values came from may be in use for others by then.
2. Commits are not synced: what is committed outlives the process, not the machine (see `unfinished`). A finished
   file is brought to the disk once, at its end.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import lmdb

from fastload.cache.lmdb.format import pack_key, write_description
from fastload.errors import CacheError
from fastload.system.refusals import writing_refused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastload.cache.lmdb.description import Description

_PY_LMDB_MAJOR = int(lmdb.__version__.partition(".")[0])
_KEY_BYTES = 8
_FIRST_MAP_BYTES = 64 << 20  # doubled, at least, whenever it does not suffice
_COMMIT_BYTES = 8 << 20  # workers must not run dry while this is written
_COMMIT_RECORDS = 1024
_PAGES_A_RECORD = 2  # beside its own bytes, at most: a leaf page, and the rest of its last page
_PAGES_A_COMMIT = 128  # at most: new copies of the pages from the root down, and the list of free pages


class ShardWriter:
    """Appends values to a file, new or unfinished.

    Args:
        path: The file.

    Attributes:
        last_index: Of the last value that is in the file; None if there is none.
    """

    def __init__(self, path: str) -> None:
        options: dict[str, Any] = {}
        if _PY_LMDB_MAJOR >= 3:
            options["lib_version"] = 0  # LMDB 0.9's data format, which every release reads
        self._path = path
        self._map_bytes = max(_FIRST_MAP_BYTES, os.path.getsize(path) if os.path.exists(path) else 0)
        with writing(path):
            self._environment = lmdb.open(
                path, subdir=False, map_size=self._map_bytes, lock=False, sync=False, meminit=False, **options
            )
            self._page_bytes = int(self._environment.stat()["psize"])
            self.last_index = self._read_last_index()
        self._transaction: Any = None
        self._pages_left = 0  # that the map has room for in this transaction
        self._num_records = 0
        self._nbytes = 0

    def _read_last_index(self) -> int | None:
        with self._environment.begin() as transaction, transaction.cursor() as cursor:
            return int.from_bytes(cursor.key(), "big") if cursor.last() else None

    def put(self, index: int, value: Any) -> None:
        """Append a value, any buffer, which is copied before this returns."""
        nbytes = len(value)
        pages = nbytes // self._page_bytes + _PAGES_A_RECORD
        with writing(self._path):
            if self._transaction is None or pages > self._pages_left:
                self.commit()
                self._begin(pages)
            self._transaction.put(pack_key(index), value, append=True)
        self._pages_left -= pages
        self._nbytes += nbytes
        self._num_records += 1
        if self._nbytes >= _COMMIT_BYTES or self._num_records >= _COMMIT_RECORDS:
            self.commit()

    def _begin(self, pages: int) -> None:
        used = self._num_pages() + _PAGES_A_COMMIT
        wanted = max(pages, 2 * _COMMIT_BYTES // self._page_bytes)
        if (used + wanted) * self._page_bytes > self._map_bytes:
            self._map_bytes = 2 * (used + wanted) * self._page_bytes
            self._environment.set_mapsize(self._map_bytes)
        self._pages_left = self._map_bytes // self._page_bytes - used
        self._transaction = self._environment.begin(write=True)

    def _num_pages(self) -> int:
        return int(self._environment.info()["last_pgno"]) + 1

    def commit(self) -> None:
        """Let everything that was put outlive this process."""
        transaction, self._transaction = self._transaction, None
        self._nbytes = self._num_records = 0
        if transaction is not None:
            with writing(self._path):
                transaction.commit()

    def finish(self, description: Description) -> None:
        """Bring everything to the disk and describe it; the file is closed then."""
        self.commit()
        with writing(self._path):
            self._environment.sync(True)
            num_pages = self._num_pages()
            self._environment.close()
            write_description(self._path, description, num_pages, self._page_bytes)

    def close(self) -> None:
        """Give up the file; what was not committed is lost."""
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            transaction.abort()
        self._environment.close()


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Raise what goes wrong while writing as an error of ours that names the file."""
    try:
        yield
    except (lmdb.Error, OSError) as error:
        if isinstance(error, CacheError):
            raise
        raise CacheError(f"cannot write the cache {path}: {writing_refused(error, path)}") from error
