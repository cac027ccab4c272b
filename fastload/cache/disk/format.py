"""What a finished LMDB file looks like, byte by byte, and whether a file is one.

Written by `build`, read by `files`. A cache is one such file, or a directory of them, its shards, which
hold ranges of indices one after another. The file is one LMDB environment in the data format of LMDB 0.9,
followed by a description that LMDB does not see:

* key: the index in 8 big-endian bytes; value: magic b"FLrd", crc32 of all that follows (4 little-endian
  bytes), the index again (8 little-endian bytes), the record (see `record`);
* the description, in JSON: format version, the fields of `Plan` and `Description`, and where LMDB's tree
  lies, with its crc32;
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
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fastload.errors import CacheCorruptError, CacheMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FORMAT_VERSION = 1

_KEY = struct.Struct(">Q")
_FRAME = struct.Struct("<4sIQ")  # magic, crc32 of index and record, index
VALUE_HEADER_BYTES = _FRAME.size
_FRAME_MAGIC = b"FLrd"
_CHECKED_FROM = 8  # bytes of the value in front of what the checksum covers
_TRAILER = struct.Struct("<IQ8s")
TRAILER_MAGIC = b"FLlmdb1\0"
_PAGE_HEADER = struct.Struct("=QHHI")  # mdb.c: page number, padding, flags, pages of an overflow run
_OVERFLOW = 0x04
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Plan:
    """What all files of a cache say about it; known before the first sample is written.

    Attributes:
        build_id: Made anew for each cache; tells its shards from another's.
        num_samples: Of the dataset.
        num_shards: Files that the cache consists of.
        spec: Of sample 0, as JSON; None in a cache of nothing, or if that sample could not be read.
        crc32: Of the record of sample 0 as it is before a codec changes it.
        codec: How images are written, one of `codecs.CODECS`.
        quality: Of a lossy codec, else None.
        parts: Of the fingerprint of the samples; None if nobody vouched for them.
        classes: Names of the dataset's classes, if it has such.
        libraries: Name to version: what wrote it.
        created_s: When the build began, in seconds since 1970.
    """

    build_id: str
    num_samples: int
    num_shards: int
    spec: str | None
    crc32: int | None
    codec: str
    quality: int | None
    parts: dict[str, str] | None
    classes: list[str] | None
    libraries: dict[str, str]
    created_s: float

    def indices_of(self, shard: int) -> range:
        """The indices of a shard; shards follow one another and differ by one sample at most."""
        first, stop = (n * self.num_samples // self.num_shards for n in (shard, shard + 1))
        return range(first, stop)


@dataclass(frozen=True)
class Description:
    """What one finished file says about itself.

    Attributes:
        plan: Of the whole cache.
        shard: Number of this file.
        missing: Runs of indices that are left out: first index and number of indices.
    """

    plan: Plan
    shard: int
    missing: list[tuple[int, int]]

    @property
    def indices(self) -> range:
        """The indices of this file."""
        return self.plan.indices_of(self.shard)


def runs_of(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as runs: first number and how many follow one another from there."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == sum(runs[-1]):
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((number, 1))
    return runs


# --- keys and values -------------------------------------------------------------------------------------


def pack_key(index: int) -> bytes:
    """The key of a sample; keys sort as the indices do."""
    return _KEY.pack(index)


def value_parts(index: int, record: Sequence[Any]) -> list[Any]:
    """The value of a sample as buffers, from those of its record."""
    crc = zlib.crc32(index.to_bytes(8, "little"))
    for part in record:
        crc = zlib.crc32(part, crc)
    return [_FRAME.pack(_FRAME_MAGIC, crc, index), *record]


def unpack_value(value: bytes | memoryview, index: int, *, verify: bool) -> memoryview:
    """The record in the value of a sample, whose checksum is compared if `verify`.

    Raises:
        CacheCorruptError: The value is not that of this sample, or is damaged.
    """
    if len(value) < VALUE_HEADER_BYTES:
        raise CacheCorruptError(f"its record has {len(value)} bytes")
    magic, crc, owner = _FRAME.unpack_from(value)
    if magic != _FRAME_MAGIC or owner != index:
        raise CacheCorruptError("another record lies in its place")
    if verify and zlib.crc32(memoryview(value)[_CHECKED_FROM:]) != crc:
        raise CacheCorruptError("its checksum is wrong")
    return memoryview(value)[VALUE_HEADER_BYTES:]


# --- the description -------------------------------------------------------------------------------------


def write_description(path: str, description: Description, num_pages: int, page_bytes: int) -> None:
    """Put the description behind a complete environment, and bring the file to the disk.

    Args:
        path: The file.
        description: Of it.
        num_pages: Pages of the environment; what a killed builder left behind them is cut off.
        page_bytes: Bytes of a page.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        content_bytes = num_pages * page_bytes
        os.ftruncate(fd, content_bytes)
        runs = list(_tree_runs(fd, num_pages, page_bytes))
        fields = {
            "version": FORMAT_VERSION,
            "plan": asdict(description.plan),
            "shard": description.shard,
            "missing": description.missing,
            "page_bytes": page_bytes,
            "tree_runs": runs,  # first page and number of pages
            "tree_crc32": _crc_of_runs(fd, runs, page_bytes),
        }
        text = json.dumps(fields).encode("ascii")
        os.lseek(fd, content_bytes, os.SEEK_SET)
        with open(fd, "wb", closefd=False) as file:
            file.write(text + _TRAILER.pack(zlib.crc32(text), len(text), TRAILER_MAGIC))
        os.fsync(fd)
    finally:
        os.close(fd)


def read_description(path: str) -> Description:
    """What a file says about itself, after its tree was compared with its checksum.

    Raises:
        CacheCorruptError: The file is damaged, cut short, or no cache.
        CacheMismatchError: It has another format version.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        nbytes = os.fstat(fd).st_size
        trailer = os.pread(fd, _TRAILER.size, max(0, nbytes - _TRAILER.size))
        if len(trailer) < _TRAILER.size or not trailer.endswith(TRAILER_MAGIC):
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
        missing = [(first, count) for first, count in fields["missing"]]
        return Description(Plan(**fields["plan"]), fields["shard"], missing)
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
