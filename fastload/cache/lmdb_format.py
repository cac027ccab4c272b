"""What a finished LMDB cache looks like, byte by byte, and whether a file is one.

Written by `build`, read by `lmdb`. The file is one LMDB environment in the data format of LMDB 0.9, followed
by a description that LMDB does not see:

* key: the index in 8 big-endian bytes; value: magic b"FLrd", crc32 of all that follows (4 little-endian
  bytes), the index again (8 little-endian bytes), the record (see `record`);
* the description, in JSON: format version, number of samples, the fingerprint of sample 0 (its spec and the
  crc32 of its record), and where LMDB's tree lies, with its crc32;
* at the end of the file: crc32 and length of the description (4 and 8 little-endian bytes), the 7 letters
  "FLlmdb1" and a zero byte.

LMDB trusts its tree: a flipped bit in it ends the process. So the tree is read and compared first. It is what
remains without the overflow pages, which hold the records that are longer than half a page; these have
checksums of their own.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from typing import TYPE_CHECKING, NamedTuple

from fastload.errors import CacheCorruptError, CacheMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT_VERSION = 1

_KEY = struct.Struct(">Q")
_FRAME = struct.Struct("<4sIQ")  # magic, crc32 of index and record, index
_FRAME_MAGIC = b"FLrd"
_CHECKED_FROM = 8  # bytes of the value in front of what the checksum covers
_TRAILER = struct.Struct("<IQ8s")
_TRAILER_MAGIC = b"FLlmdb1\0"
_PAGE_HEADER = struct.Struct("=QHHI")  # mdb.c: page number, padding, flags, pages of an overflow run
_OVERFLOW = 0x04
_CHUNK_BYTES = 1 << 20


class Meta(NamedTuple):
    """What a finished cache says about itself."""

    num_samples: int
    spec: str | None  # of sample 0; None in a cache of nothing
    crc32: int | None  # of the record of sample 0


# --- keys and values -------------------------------------------------------------------------------------


def pack_key(index: int) -> bytes:
    """The key of a sample; keys sort as the indices do."""
    return _KEY.pack(index)


def pack_value(index: int, record: bytes) -> bytes:
    """The value of a sample."""
    crc = zlib.crc32(record, zlib.crc32(index.to_bytes(8, "little")))
    return _FRAME.pack(_FRAME_MAGIC, crc, index) + record


def unpack_value(value: bytes, index: int, *, verify: bool) -> memoryview:
    """The record in the value of a sample, whose checksum is compared if `verify`.

    Raises:
        CacheCorruptError: The value is not that of this sample, or is damaged.
    """
    if len(value) < _FRAME.size:
        raise CacheCorruptError(f"its record has {len(value)} bytes")
    magic, crc, owner = _FRAME.unpack_from(value)
    if magic != _FRAME_MAGIC or owner != index:
        raise CacheCorruptError("another record lies in its place")
    if verify and zlib.crc32(memoryview(value)[_CHECKED_FROM:]) != crc:
        raise CacheCorruptError("its checksum is wrong")
    return memoryview(value)[_FRAME.size :]


# --- the description -------------------------------------------------------------------------------------


def write_description(path: str, meta: Meta, page_bytes: int) -> None:
    """Append the description to a complete environment, and bring the file to the disk."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        content_bytes = os.fstat(fd).st_size
        runs = list(_tree_runs(fd, content_bytes // page_bytes, page_bytes))
        fields = {
            "version": FORMAT_VERSION,
            **meta._asdict(),
            "page_bytes": page_bytes,
            "tree_runs": runs,  # first page and number of pages
            "tree_crc32": _crc_of_runs(fd, runs, page_bytes),
        }
        text = json.dumps(fields).encode("ascii")
        os.lseek(fd, content_bytes, os.SEEK_SET)
        with open(fd, "wb", closefd=False) as file:
            file.write(text + _TRAILER.pack(zlib.crc32(text), len(text), _TRAILER_MAGIC))
        os.fsync(fd)
    finally:
        os.close(fd)


def read_description(path: str) -> Meta:
    """What a file says about itself, after its tree was compared with its checksum.

    Raises:
        CacheCorruptError: The file is damaged, cut short, or no cache.
        CacheMismatchError: It has another format version.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        nbytes = os.fstat(fd).st_size
        trailer = os.pread(fd, _TRAILER.size, max(0, nbytes - _TRAILER.size))
        if len(trailer) < _TRAILER.size or not trailer.endswith(_TRAILER_MAGIC):
            raise CacheCorruptError(
                f"{path} is cut short, or no cache: it does not end as fastload's caches do"
            )
        crc, length, _ = _TRAILER.unpack(trailer)
        text = (
            os.pread(fd, length, nbytes - _TRAILER.size - length) if length <= nbytes - _TRAILER.size else b""
        )
        if zlib.crc32(text) != crc or not text:
            raise CacheCorruptError(f"{path}: its description is damaged: delete the file and build it again")
        fields = json.loads(text)
        if fields["version"] != FORMAT_VERSION:
            raise CacheMismatchError(
                f"{path} is a cache of format {fields['version']}, this release reads {FORMAT_VERSION}. "
                "Delete it to build it again, or give another path"
            )
        if _crc_of_runs(fd, fields["tree_runs"], fields["page_bytes"]) != fields["tree_crc32"]:
            raise CacheCorruptError(f"{path}: its index is damaged: delete the file and build it again")
        return Meta(*(fields[name] for name in Meta._fields))
    finally:
        os.close(fd)


def _tree_runs(fd: int, num_pages: int, page_bytes: int) -> Iterator[tuple[int, int]]:
    """Runs of pages that are no overflow pages: first page and number of pages."""
    page = start = 0
    while page < num_pages:
        _, _, flags, run = _PAGE_HEADER.unpack(os.pread(fd, _PAGE_HEADER.size, page * page_bytes))
        if not flags & _OVERFLOW:
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
                break  # cut short: the checksum will differ
            crc = zlib.crc32(chunk, crc)
            offset += len(chunk)
    return crc
