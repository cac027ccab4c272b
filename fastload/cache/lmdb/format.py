"""Defines the format of a finished LMDB file, byte by byte, and checks whether a file has it.

`build` writes it, `files` reads it. A cache is one such file, or a directory of them (its shards), which hold
consecutive ranges of indices. The file is one LMDB environment in the data format of LMDB 0.9, followed by
what LMDB does not see:

* key: the index in 8 big-endian bytes; value: 48 zero bytes, and the record (see `record`);
* the places of the records in the file, and their crc32 (see `table`);
* the description, in JSON: format version, the fields of `Plan` and `Description`;
* at the end of the file: crc32 and length of the description (4 and 8 little-endian bytes), the 7 letters
  "FLlmdb1" and a zero byte.

The description holds the table's crc32, and the table those of the records: so each part is compared before
anything that it says is used.
"""

from __future__ import annotations

import os
import struct
import zlib
from typing import NamedTuple

from fastload.cache.lmdb.description import (
    MAX_TEXT_BYTES,
    Description,
    Plan,
    description_text,
    parse_description,
)
from fastload.cache.lmdb.table import ROW_BYTES, Table
from fastload.errors import CacheCorruptError, CacheError, CacheMismatchError

_KEY = struct.Struct(">Q")
_TRAILER = struct.Struct("<IQ8s")
TRAILER_MAGIC = b"FLlmdb1\0"
# LMDB puts a large value 16 bytes behind the start of a page, so the arrays of its record lie at multiples of
# 64 bytes. At odd multiples of 16, copying them takes 5% longer.
PADDING = bytes(48)
CURE = "delete the file, and build or download it again"  # it can be the copy of a cache at a URL


def pack_key(index: int) -> bytes:
    """The key of a sample; keys sort in the order of the indices."""
    return _KEY.pack(index)


def unpack_key(key: bytes) -> int:
    """The index of a sample."""
    return int.from_bytes(key, "big")


def write_end(path: str, environment_bytes: int, table: Table, plan: Plan, shard: int) -> None:
    """Append the table and the description to a complete environment, and sync the file to the disk.

    Args:
        path: Path of the file.
        environment_bytes: Length of the environment; whatever LMDB left behind it is cut off.
        table: The places of the records.
        plan: The plan of the cache.
        shard: Number of the file.
    """
    rows = table.to_bytes()
    text = description_text(Description(plan, shard, zlib.crc32(rows)))
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


class End(NamedTuple):
    """What a finished file holds behind LMDB's environment.

    Attributes:
        text: The text of the description.
        description: The parsed description.
        table: The places of the records.
    """

    text: bytes
    description: Description
    table: Table


def read_end(fd: int, path: str, nbytes: int) -> End:
    """Read and check what lies behind the environment.

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
        description = parse_description(text)
        environment_bytes = text_at - ROW_BYTES * len(description.indices)
        if environment_bytes < 0:
            raise ValueError(f"it states {len(description.indices):,} samples, but the file is too short")
    except CacheMismatchError as error:
        raise CacheMismatchError(
            f"{path} {error}. Delete it to build it again, or use a different path"
        ) from None
    except ValueError as error:
        raise CacheCorruptError(f"{path}: its description is not valid: {error}: {CURE}") from None
    rows = read_at(fd, environment_bytes, text_at - environment_bytes)
    if zlib.crc32(rows) != description.table_crc32:
        raise CacheCorruptError(f"{path}: its index is damaged: {CURE}")
    try:
        return End(text, description, Table.parse(rows, environment_bytes))
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
            f"{path} is cut short, or not a cache: it does not end as fastload's caches do"
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
