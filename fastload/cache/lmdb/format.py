"""Defines the format of a finished LMDB file, byte by byte, and checks whether a file has it.

`build` writes it, `files` reads it. The file is one LMDB environment in the data format of LMDB 0.9, followed
by what LMDB does not see:

* key: the index in 8 big-endian bytes; value: 48 zero bytes, and the record (see `record`);
* the table of the records: where each is in the file, and its crc32 (see `Table`);
* the description, in JSON: format version, `Plan`, crc32 of the table;
* at the end of the file: crc32 and length of the description (4 and 8 little-endian bytes), the 7 letters
  "FLlmdb1" and a zero byte.

The description holds the table's crc32, and the table those of the records: so each part is compared before
anything that it says is used. LMDB crashes if its tree is damaged. So the builder asks LMDB once for the
positions of all records and writes them down, and readers never use the tree.
"""

from __future__ import annotations

import os
import struct
import zlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fastload.cache.lmdb.description import MAX_TEXT_BYTES, Plan, description_text, parse_description
from fastload.errors import CacheCorruptError, CacheError, CacheMismatchError

if TYPE_CHECKING:
    import numpy.typing as npt

_KEY = struct.Struct(">Q")
_TRAILER = struct.Struct("<IQ8s")
TRAILER_MAGIC = b"FLlmdb1\0"
# LMDB puts a large value 16 bytes after the start of a page, so the arrays of its record lie at multiples of
# 64 bytes. At odd multiples of 16, copying them takes 5% longer.
PADDING = bytes(48)
_TABLE_COLUMNS = ("<i8", "<u4", "<u4")
_ROW_BYTES = sum(np.dtype(column).itemsize for column in _TABLE_COLUMNS)
CURE = "delete the file, and build it again"


def pack_key(index: int) -> bytes:
    """The key of a sample; keys sort in the order of the indices."""
    return _KEY.pack(index)


def unpack_key(key: bytes) -> int:
    """The index of a sample."""
    return int.from_bytes(key, "big")


class Table(NamedTuple):
    """Where the records of a file are; row i is the sample of index i.

    Attributes:
        starts: Offsets of the records in the file, `(n,)`.
        sizes: Their lengths in bytes, `(n,)`; 0 for a left-out sample.
        crcs: Their checksums (crc32), `(n,)`.
    """

    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.uint32]
    crcs: npt.NDArray[np.uint32]

    @classmethod
    def empty(cls, num_rows: int) -> Table:
        """A table of left-out samples."""
        return cls(*(np.zeros(num_rows, column) for column in _TABLE_COLUMNS))

    def to_bytes(self) -> bytes:
        """The columns one after another, little-endian."""
        return b"".join(column.tobytes() for column in self)

    @classmethod
    def parse(cls, data: bytes, environment_bytes: int) -> Table:
        """Read a table, which can come from an untrusted source: a right checksum proves nothing.

        Args:
            data: The result of `to_bytes`, or any other whole number of rows.
            environment_bytes: Number of bytes of the file before the table, which hold the records.

        Raises:
            ValueError: A record is outside of these bytes, or records overlap.
        """
        num_rows, at, columns = len(data) // _ROW_BYTES, 0, []
        for column in _TABLE_COLUMNS:
            columns.append(np.frombuffer(data, column, num_rows, at))
            at += columns[-1].nbytes
        table = cls(*columns)
        if ((table.starts < 0) | (table.starts > environment_bytes - table.sizes.astype(np.int64))).any():
            raise ValueError("a record is outside the file")
        if int(table.sizes.sum(dtype=np.int64)) > environment_bytes:
            raise ValueError("the records are longer together than the file, so they overlap")
        return table


def write_end(path: str, environment_bytes: int, table: Table, plan: Plan) -> None:
    """Append the table and the description to a complete environment, and sync the file to the disk.

    Args:
        path: Path of the file.
        environment_bytes: Length of the environment; whatever LMDB left after it is cut off.
        table: Where the records are.
        plan: The plan of the cache.
    """
    rows = table.to_bytes()
    text = description_text(plan, zlib.crc32(rows))
    if len(text) > MAX_TEXT_BYTES:
        raise CacheError(
            f"the description of {path} would take {len(text):,} bytes, but at most {MAX_TEXT_BYTES:,} can "
            "be read back: give the dataset fewer or shorter names of classes"
        )
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.ftruncate(fd, environment_bytes)
        os.lseek(fd, environment_bytes, os.SEEK_SET)
        with open(fd, "wb", closefd=False) as file:
            file.write(rows + text + _TRAILER.pack(zlib.crc32(text), len(text), TRAILER_MAGIC))
        os.fsync(fd)
    finally:
        os.close(fd)


def read_end(fd: int, path: str, nbytes: int) -> tuple[bytes, Plan, Table]:
    """Read and check what lies after the environment: text of the description, plan, and table.

    Args:
        fd: Of the file.
        path: For errors.
        nbytes: The length of the file.

    Raises:
        CacheCorruptError: The file is damaged, cut short, or not a cache.
        CacheMismatchError: It has a different format version.
    """
    text = read_text(fd, path, nbytes)
    text_at = nbytes - _TRAILER.size - len(text)
    try:
        plan, table_crc32 = parse_description(text)
        environment_bytes = text_at - _ROW_BYTES * plan.num_samples
        if environment_bytes < 0:
            raise ValueError(f"it states {plan.num_samples:,} samples, but the file is too short")
    except CacheMismatchError as error:
        raise CacheMismatchError(
            f"{path} {error}. Delete it to build it again, or use a different path"
        ) from None
    except ValueError as error:
        raise CacheCorruptError(f"{path}: its description is not valid: {error}: {CURE}") from None
    rows = read_at(fd, environment_bytes, text_at - environment_bytes)
    if zlib.crc32(rows) != table_crc32:
        raise CacheCorruptError(f"{path}: its index is damaged: {CURE}")
    try:
        return text, plan, Table.parse(rows, environment_bytes)
    except ValueError as error:
        raise CacheCorruptError(f"{path}: its index is not valid: {error}: {CURE}") from None


def read_text(fd: int, path: str, nbytes: int) -> bytes:
    """The text of the description of a file of this length.

    Raises:
        CacheCorruptError: The file is damaged, cut short, or not a cache.
    """
    trailer = os.pread(fd, _TRAILER.size, max(0, nbytes - _TRAILER.size))
    if len(trailer) < _TRAILER.size or not trailer.endswith(TRAILER_MAGIC):
        raise CacheCorruptError(
            f"{path} is cut short, or not a cache: it does not end as fastload's caches do. Use a different "
            f"path; or, if it is a cache, {CURE}"
        )
    crc, length, _ = _TRAILER.unpack(trailer)
    is_possible = 0 < length <= min(MAX_TEXT_BYTES, nbytes - _TRAILER.size)
    text = read_at(fd, nbytes - _TRAILER.size - length, length) if is_possible else b""
    if not text or zlib.crc32(text) != crc:
        raise CacheCorruptError(f"{path}: its description is damaged: {CURE}")
    return text


def read_at(fd: int, at: int, nbytes: int) -> bytes:
    """Bytes of a file; fewer if it ends before.

    They are read in one piece, because the system then fetches them from disk at once, not page by page.
    """
    parts = []
    while nbytes > 0 and (part := os.pread(fd, nbytes, at)):  # reads at most 2 GB
        parts.append(part)
        at, nbytes = at + len(part), nbytes - len(part)
    return b"".join(parts)
