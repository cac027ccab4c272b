"""Defines the format of a finished LMDB file, byte by byte, and checks whether a file has it.

`build` writes it, `files` reads it. A cache is one such file, or a directory of them (its shards), which hold
consecutive ranges of indices. The file is one LMDB environment in the data format of LMDB 0.9, followed by a
description that LMDB does not see:

* key: the index in 8 big-endian bytes; value: magic b"FLrd", crc32 of all following bytes (4 little-endian
  bytes), the index again (8 little-endian bytes), the record (see `record`);
* the description, in JSON: format version, the fields of `Plan` and `Description`, and the place of LMDB's
  tree, with its crc32;
* at the end of the file: crc32 and length of the description (4 and 8 little-endian bytes), the 7 letters
  "FLlmdb1" and a zero byte.

LMDB trusts its tree: a flipped bit in it kills a process that reads through LMDB. So fastload first compares
the tree with its checksum, and then reads it itself (see `tree`). The tree is all pages except the overflow
pages, which hold the records longer than half a page; these records have their own checksums.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastload.cache.lmdb.description import (
    MAX_TEXT_BYTES,
    Description,
    TreePlace,
    description_text,
    parse_description,
)
from fastload.cache.lmdb.tree import OVERFLOW, PAGE_HEADER
from fastload.errors import CacheCorruptError, CacheError, CacheMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_KEY = struct.Struct(">Q")
_FRAME = struct.Struct("<4sIQ")  # magic, crc32 of index and record, index
VALUE_HEADER_BYTES = _FRAME.size
_FRAME_MAGIC = b"FLrd"
_CHECKED_FROM = 8  # number of bytes of the value that the checksum does not cover
_TRAILER = struct.Struct("<IQ8s")
TRAILER_MAGIC = b"FLlmdb1\0"
_CHUNK_BYTES = 1 << 20
CURE = "delete the file, and build or download it again"  # it can be the copy of a cache at a URL


# --- keys and values -------------------------------------------------------------------------------------


def pack_key(index: int) -> bytes:
    """The key of a sample; keys sort in the order of the indices."""
    return _KEY.pack(index)


def value_parts(index: int, record: Sequence[Any]) -> list[Any]:
    """The value of a sample as buffers, made of the buffers of its record."""
    crc = zlib.crc32(index.to_bytes(8, "little"))
    for part in record:
        crc = zlib.crc32(part, crc)
    return [_FRAME.pack(_FRAME_MAGIC, crc, index), *record]


def unpack_value(value: bytes, index: int) -> memoryview:
    """The record in the value of a sample, after comparison with its checksum.

    Raises:
        CacheCorruptError: The value does not belong to this sample, or is damaged.
    """
    if len(value) < VALUE_HEADER_BYTES:
        raise CacheCorruptError(f"its record has {len(value)} bytes")
    magic, crc, owner = _FRAME.unpack_from(value)
    if magic != _FRAME_MAGIC or owner != index:
        raise CacheCorruptError("a different record is in its place")
    if zlib.crc32(memoryview(value)[_CHECKED_FROM:]) != crc:
        raise CacheCorruptError("its checksum is wrong")
    return memoryview(value)[VALUE_HEADER_BYTES:]


# --- the description -------------------------------------------------------------------------------------


def write_description(path: str, description: Description, num_pages: int, page_bytes: int) -> None:
    """Append the description to a complete environment, and sync the file to the disk.

    Args:
        path: Path of the file.
        description: Its description.
        num_pages: Pages of the environment; whatever a killed builder left behind them is cut off.
        page_bytes: Size of a page.
    """
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        content_bytes = num_pages * page_bytes
        os.ftruncate(fd, content_bytes)
        runs = list(_tree_runs(fd, num_pages, page_bytes))
        place = TreePlace(page_bytes, num_pages, runs, _crc_of_runs(fd, runs, page_bytes))
        text = description_text(description, place)
        if len(text) > MAX_TEXT_BYTES:
            raise CacheError(
                f"the description of {path} would take {len(text):,} bytes, but at most {MAX_TEXT_BYTES:,} "
                "can be read back: build the cache with more shards"
            )
        os.lseek(fd, content_bytes, os.SEEK_SET)
        with open(fd, "wb", closefd=False) as file:
            file.write(text + _TRAILER.pack(zlib.crc32(text), len(text), TRAILER_MAGIC))
        os.fsync(fd)
    finally:
        os.close(fd)


@dataclass(frozen=True)
class Stored:
    """The data at the end of a finished file.

    Attributes:
        text: The text of the description.
        description: The parsed description.
        place: The place of the tree, according to the description; the tree is not compared yet.
    """

    text: bytes
    description: Description
    place: TreePlace


def read_stored(fd: int, path: str) -> Stored:
    """Read a file's description; compare its tree with `check_tree` before use.

    Raises:
        CacheCorruptError: The file is damaged, cut short, or not a cache.
        CacheMismatchError: It has a different format version.
    """
    text, content_bytes = _read_text(fd, path)
    try:
        description, place = parse_description(text, content_bytes)
    except CacheMismatchError as error:
        raise CacheMismatchError(
            f"{path} {error}. Delete it to build it again, or use a different path"
        ) from None
    except ValueError as error:
        raise CacheCorruptError(f"{path}: its description is not valid: {error}: {CURE}") from None
    return Stored(text, description, place)


def _read_text(fd: int, path: str) -> tuple[bytes, int]:
    """The description's text, and the number of bytes before it."""
    nbytes = os.fstat(fd).st_size
    trailer = os.pread(fd, _TRAILER.size, max(0, nbytes - _TRAILER.size))
    if len(trailer) < _TRAILER.size or not trailer.endswith(TRAILER_MAGIC):
        raise CacheCorruptError(
            f"{path} is cut short, or not a cache: it does not end as fastload's caches do"
        )
    crc, length, _ = _TRAILER.unpack(trailer)
    content_bytes = nbytes - _TRAILER.size - length
    is_possible = length <= MAX_TEXT_BYTES and content_bytes >= 0
    text = os.pread(fd, length, content_bytes) if is_possible else b""
    if not text or zlib.crc32(text) != crc:
        raise CacheCorruptError(f"{path}: its description is damaged: {CURE}")
    return text, content_bytes


def check_tree(fd: int, path: str, place: TreePlace) -> None:
    """Compare the tree with its checksum.

    Raises:
        CacheCorruptError: It differs.
    """
    if _crc_of_runs(fd, place.runs, place.page_bytes) != place.crc32:
        raise CacheCorruptError(f"{path}: its index is damaged: {CURE}")


def _tree_runs(fd: int, num_pages: int, page_bytes: int) -> Iterator[tuple[int, int]]:
    """Runs of pages that are not overflow pages: first page and number of pages."""
    page = start = 0
    while page < num_pages:
        _, _, flags, run = PAGE_HEADER.unpack(os.pread(fd, PAGE_HEADER.size, page * page_bytes))
        if not flags & OVERFLOW:
            page += 1
            continue
        if page > start:
            yield start, page - start
        page += max(1, run)
        start = page
    if num_pages > start:
        yield start, num_pages - start


def _crc_of_runs(fd: int, runs: list[tuple[int, int]], page_bytes: int) -> int:
    crc = 0
    for first, count in runs:
        offset, end = first * page_bytes, (first + count) * page_bytes
        while offset < end:
            chunk = os.pread(fd, min(_CHUNK_BYTES, end - offset), offset)
            if not chunk:
                break  # the file is cut short: the checksum will differ
            crc = zlib.crc32(chunk, crc)
            offset += len(chunk)
    return crc
