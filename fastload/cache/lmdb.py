"""LMDBCache: finished caches on disk, read through the page cache.

Made by `build.build_lmdb`, read in any process. The file is one LMDB environment (data format of LMDB 0.9):

* key: the index in 8 big-endian bytes; value: magic b"FLrd", crc32 of all that follows (4 little-endian
  bytes), the index again (8 little-endian bytes), the record (see `record`);
* key b"fastload cache", written last: crc32 (4 bytes) and JSON: format version, number of samples, the length
  of the longest value, and the fingerprint of sample 0, which is its spec and the crc32 of its record;
* behind LMDB's last page: as many zero bytes as the longest value has, and at least META_BYTES.

Rules:

1. Only finished files are opened, so nobody writes: no lock file, no reader table.
2. One environment a file and process, whoever opens it, as LMDB demands; opened again after a fork.
3. A value is copied out of the transaction before it is read; samples are views of that copy.
4. The checksum of a record is verified at its first read in each process.
5. No more than the longest value is ever read from wherever LMDB points, and so much is there behind every
   page: a damaged length gives a wrong checksum, not a read behind the end of the mapped file.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import threading
import weakref
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import lmdb

from fastload.cache.record import decode
from fastload.errors import CacheCorruptError, CacheError, CacheMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import numpy.typing as npt

    from fastload.cache.columns import Allocate

FORMAT_VERSION = 1
META_KEY = b"fastload cache"
META_BYTES = 1 << 20  # the most that the description takes

_KEY = struct.Struct(">Q")
_FRAME = struct.Struct("<4sIQ")  # magic, crc32 of index and record, index
_FRAME_MAGIC = b"FLrd"
_CRC = struct.Struct("<I")
_CHECKED_FROM = 8  # bytes of the value in front of what the checksum covers
_LEAST_FILE_BYTES = 2 * 4096  # LMDB's two meta pages


class Meta(NamedTuple):
    """What a finished cache says about itself."""

    num_samples: int
    longest_bytes: int  # of a value
    spec: str | None  # of sample 0; None in a cache of nothing
    crc32: int | None  # of the record of sample 0


# --- the format ----------------------------------------------------------------------------------------


def pack_key(index: int) -> bytes:
    """The key of a sample; keys sort as the indices do."""
    return _KEY.pack(index)


def pack_value(index: int, record: bytes) -> bytes:
    """The value of a sample."""
    crc = zlib.crc32(record, zlib.crc32(index.to_bytes(8, "little")))
    return _FRAME.pack(_FRAME_MAGIC, crc, index) + record


def padded_bytes(content_bytes: int, longest_bytes: int) -> int:
    """The length of a finished file with so many bytes of LMDB pages."""
    return content_bytes + max(longest_bytes, META_BYTES)


def pack_meta(meta: Meta) -> bytes:
    """The value under META_KEY."""
    text = json.dumps({"version": FORMAT_VERSION, **meta._asdict()}).encode("ascii")
    return _CRC.pack(zlib.crc32(text)) + text


def _unpack_meta(path: str, value: bytes) -> Meta:
    text = value[_CRC.size :]
    if len(value) < _CRC.size or _CRC.unpack_from(value)[0] != zlib.crc32(text):
        raise CacheCorruptError(f"{path}: its description is damaged: delete the file and build it again")
    fields = json.loads(text)
    version = fields.pop("version")
    if version != FORMAT_VERSION:
        raise CacheMismatchError(
            f"{path} is a cache of format {version}, this release reads format {FORMAT_VERSION}: "
            "delete it and build it again, or give another path"
        )
    return Meta(**fields)


# --- one environment a file and process ------------------------------------------------------------------


class _OpenFile:
    """An open environment, what it says of itself, and which records were verified; for one process."""

    def __init__(self, path: str, status: os.stat_result) -> None:
        self.pid = os.getpid()
        self.nbytes = status.st_size
        if self.nbytes < _LEAST_FILE_BYTES:
            raise CacheCorruptError(f"{path} is no LMDB file: it has {self.nbytes} bytes")
        with _lmdb_errors(path):
            self.environment = lmdb.open(
                path, subdir=False, readonly=True, create=False, lock=False, readahead=False, meminit=False
            )
        try:
            self.meta = self._read_meta(path)
        except BaseException:
            self.environment.close()
            raise
        self.verified = bytearray(self.meta.num_samples)

    def _read_meta(self, path: str) -> Meta:
        pages = self.environment.info()["last_pgno"] + 1
        page_bytes = self.environment.stat()["psize"]
        self._check_length(path, pages * page_bytes)
        value = self.read(path, META_KEY, META_BYTES)
        if value is None:
            raise CacheMismatchError(f"{path} is an LMDB file that fastload did not make, or did not finish")
        meta = _unpack_meta(path, value)
        self._check_length(path, padded_bytes(pages * page_bytes, meta.longest_bytes))
        return meta

    def _check_length(self, path: str, least_bytes: int) -> None:
        if self.nbytes < least_bytes:  # reading behind the end of a mapped file would end the process
            raise CacheCorruptError(
                f"{path} is cut short: {self.nbytes:,} bytes of {least_bytes:,} are there: "
                "delete it and build it again"
            )

    def read(self, path: str, key: bytes, most_bytes: int) -> bytes | None:
        """A copy of the value under a key, or None if there is none.

        Raises:
            CacheCorruptError: The value claims more bytes than it can have.
        """
        with _lmdb_errors(path), self.environment.begin(buffers=True) as transaction:
            value = transaction.get(key)
            if value is not None and len(value) > most_bytes:
                raise CacheCorruptError(f"{path}: a value claims {len(value):,} bytes, which cannot be")
            return None if value is None else bytes(value)


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
            file = _open_files[key] = _OpenFile(path, status)
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
        value = file.read(self.path, _KEY.pack(index), self.meta.longest_bytes)
        try:
            if value is None:
                raise CacheCorruptError("its record is missing")
            return decode(memoryview(value)[_verify(value, index, file.verified) :])
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


def _verify(value: bytes, index: int, verified: bytearray) -> int:
    """The offset of the record in a value, whose checksum is checked the first time."""
    if len(value) < _FRAME.size:
        raise CacheCorruptError(f"its record has {len(value)} bytes")
    magic, crc, owner = _FRAME.unpack_from(value)
    if magic != _FRAME_MAGIC or owner != index:
        raise CacheCorruptError("another record lies in its place")
    if not verified[index]:
        if zlib.crc32(memoryview(value)[_CHECKED_FROM:]) != crc:
            raise CacheCorruptError("its checksum is wrong")
        verified[index] = 1
    return _FRAME.size
