"""Writes one LMDB file: keys in order, with regular commits, continuing the file of a killed writer.

Rules:

1. Space in the map is reserved before a transaction begins, for all that it can need: a transaction that
   meets a full map is lost, and the memory of its values may already be reused for other values.
2. Commits are not synced: committed values survive the process, but not the machine (see `unfinished`). A
   finished file is synced to the disk once, at its end.
3. The functions import lmdb themselves: it has no wheels for free-threaded builds of Python, where caches in
   RAM work without it. Reading a cache on disk never needs it.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from fastload.cache.lmdb.format import pack_key, write_description
from fastload.errors import CacheError
from fastload.system.refusals import writing_refused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastload.cache.lmdb.description import Description

_KEY_BYTES = 8
_FIRST_MAP_BYTES = 64 << 20  # at least doubled whenever it is too small
_COMMIT_BYTES = 8 << 20  # small enough that workers do not run out of tasks during a commit
_COMMIT_RECORDS = 1024
_PAGES_A_RECORD = 2  # at most, beside its own bytes: a leaf page, and the rest of its last page
_PAGES_A_COMMIT = 128  # at most: new copies of the pages from the root down, and the list of free pages


class ShardWriter:
    """Appends values to a file, new or unfinished.

    Args:
        path: The file.

    Attributes:
        last_index: Index of the last value in the file; None if the file was empty.
        num_records: Number of values in the file that are committed.
    """

    def __init__(self, path: str) -> None:
        import lmdb

        options: dict[str, Any] = {}
        if int(lmdb.__version__.partition(".")[0]) >= 3:
            options["lib_version"] = 0  # the data format of LMDB 0.9, which every release reads
        self._path = path
        self._map_bytes = max(_FIRST_MAP_BYTES, os.path.getsize(path) if os.path.exists(path) else 0)
        with writing(path):
            # Unused bytes of pages are zeros (meminit, lmdb's default): a file never holds old content of
            # this process's memory, and equal plans give equal files.
            self._environment = lmdb.open(
                path, subdir=False, map_size=self._map_bytes, lock=False, sync=False, **options
            )
            self._page_bytes = int(self._environment.stat()["psize"])
            self.last_index = self._read_last_index()
            self.num_records = int(self._environment.stat()["entries"])
        self._transaction: Any = None
        self._pages_left = 0  # pages that are still reserved for this transaction
        self._num_records = 0
        self._nbytes = 0

    def _read_last_index(self) -> int | None:
        with self._environment.begin() as transaction, transaction.cursor() as cursor:
            return int.from_bytes(cursor.key(), "big") if cursor.last() else None

    def put(self, index: int, value: Any) -> None:
        """Append a value, which may be any buffer; it is copied before this method returns."""
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
        """Commit all values so far, so that they survive this process."""
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            with writing(self._path):
                transaction.commit()
            self.num_records += self._num_records
        self._nbytes = self._num_records = 0

    def finish(self, description: Description) -> None:
        """Sync the file to the disk, write its description, and close it."""
        self.commit()
        with writing(self._path):
            self._environment.sync(True)
            num_pages = self._num_pages()
            self._environment.close()
            write_description(self._path, description, num_pages, self._page_bytes)

    def close(self) -> None:
        """Close the file; values that were not committed are lost."""
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            transaction.abort()
        self._environment.close()


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Raise errors of writing as a CacheError that names the file."""
    import lmdb

    try:
        yield
    except (lmdb.Error, OSError) as error:
        if isinstance(error, CacheError):
            raise
        raise CacheError(f"cannot write the cache {path}: {writing_refused(error, path)}") from error
