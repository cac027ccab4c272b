"""DiskFileStore: decoded files in a directory, which any number of processes read and fill.

Rules:

1. On disk, a file is known by the SHA-256 of its content, and by nothing of this machine: no device, no
   inode. Bytes in memory are known so anyway.
2. So that a file is not read each time to be known, its hash is stored once for its path, size, mtime and
   ctime together; the path is relative to the folder of the directory if the file is below it. A file of
   which one of these is another one, such as a copy, is read and hashed, and its pixels are found again.
3. A hash is stored only if the file was the same, and unchanged for a while, before and after reading it
   (see `readers.identity`).
4. A directory that cannot be written is read, and a full disk ends storing and not the training.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import mmap
import os
import platform
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any

from fastload.cache.disk.index import Index
from fastload.cache.disk.records import decode, encode
from fastload.cache.disk.rows import FILE, FORMAT_VERSION, PIXELS, content_of, file_row
from fastload.cache.disk.segments import NAME, SegmentWriter
from fastload.errors import CacheError, CacheMismatchError
from fastload.readers.decode_cache import NO_SPACE
from fastload.readers.identity import (
    AS_FILE,
    MAX_FILE_BYTES,
    Identity,
    Unknown,
    digest,
    file_system_of,
    hash_of,
    identify_descriptor,
    is_local,
)
from fastload.system.disk import write_new
from fastload.system.logs import log, say_once
from fastload.system.os_errors import why_unreadable, why_unwritable

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from fastload.cache.disk.rows import Row
    from fastload.cache.disk.segments import Segment
    from fastload.readers.decode_cache import Stored

DESCRIPTION = "files.json"
_KIND = "decoded files"
_DAMAGED, _READ_ONLY, _FULL = range(3)  # what is told once
_MACHINE = platform.machine()  # floats differ between processors of different kinds
_RETRY_S = 60.0  # after the disk was full
_LOOK_REMOTE_EVERY_S = 1.0
_POLL_EVERY_S = 5.0
_MAX_HASHED = 1 << 17  # contents that a process keeps in mind


def is_file_store(path: str) -> bool:
    """Whether a directory is one of decoded files, of any version."""
    try:
        with open(os.path.join(path, DESCRIPTION), "rb") as file:
            return bool(json.loads(file.read(1 << 16))["kind"] == _KIND)
    except (OSError, ValueError, TypeError, KeyError):
        return False


class DiskFileStore:
    """The store, as a loader and its workers use it; pickled, it is its path.

    Args:
        path: The directory, which is made if it does not exist; its parent must exist.

    Attributes:
        path: Absolute.
        max_bytes: None: the disk is the limit.
        is_owner: True: each process looks for what others stored.
        full_reason: Why something was not stored.

    Raises:
        CacheMismatchError: Something else is at the path.
        CacheError: It cannot be made or read.
    """

    max_bytes = None
    is_owner = True
    full_reason = NO_SPACE

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(os.path.expanduser(path))
        _make(self.path)
        # As the kernel names files.
        self._root = os.path.join(os.path.dirname(os.path.realpath(self.path)), "")
        self._index = Index(self.path)
        self._damaged: set[tuple[str, int]] = set()  # rows whose records are
        self._told = mmap.mmap(-1, mmap.PAGESIZE)  # shared with forks
        self._hashed: dict[bytes, bytes] = {}  # contents of files whose rows could not be stored
        self._is_local = is_local(file_system_of(self.path))
        self._look_at_s = self._poll_at_s = self._write_at_s = 0.0
        self._writers: dict[int, SegmentWriter] = {}  # by process
        self._locks: dict[int, threading.Lock] = {}
        self.poll()

    def __reduce__(self) -> tuple[Any, ...]:
        return DiskFileStore, (self.path,)

    @property
    def num_files(self) -> int:
        """How many results of decoding are stored."""
        self._look()
        return self._index.num_pixels

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        self._look()
        return sum(segment.nbytes for segment in self._index.segments)

    @property
    def segments(self) -> list[Segment]:
        """Those that are there now."""
        self._look()
        return self._index.segments

    def poll(self) -> None:
        """Look for what workers stored, once in a while, for those that are started later."""
        if time.monotonic() >= self._poll_at_s:
            self._look()
            self._poll_at_s = time.monotonic() + _POLL_EVERY_S

    def forget(self) -> None:
        """Does nothing: on disk, nothing makes room for others."""

    def close(self) -> None:
        """Does nothing: the files are closed with the last reference."""

    # --- pixels ------------------------------------------------------------------------------------------

    def get(self, key: bytes) -> Stored | None:
        """What is stored under a key of 16 bytes, if anything; its array is a read-only private copy."""
        for segment, number, row in self._rows(key, PIXELS):
            offset, nbytes, head_bytes, checksum = row.values
            try:
                stored = decode(segment.record(offset, nbytes), head_bytes, checksum)
            except OSError:
                stored = None
            if stored is not None:
                return stored
            self._damaged.add((segment.path, number))
            self._tell(
                *(_DAMAGED, logging.WARNING),
                f"{segment.path}.pixels is damaged: what is stored there is decoded and stored again",
            )
        return None

    def put(self, key: bytes, array: npt.NDArray[Any], note: Any) -> bool:
        """Store an array and a note of plain values; False if there is no space, or they are not plain."""
        if next(self._stored_rows(key, PIXELS), None) is not None:
            return True
        record = encode(array, note)
        writer = None if record is None else self._writer()
        if writer is None or record is None:
            return False
        try:
            writer.add(key, record)
        except OSError as error:
            self._stop_writing(error)
            return False
        return True

    def has_room(self, nbytes: int) -> bool:
        """Whether this process could store something when it last tried, or that is a while ago."""
        return time.monotonic() >= self._write_at_s

    def _rows(self, key: bytes, kind: int) -> Iterator[tuple[Segment, int, Row]]:
        """The rows of a key; other processes are asked for theirs if this one knows none."""
        found = False
        for each in self._stored_rows(key, kind):
            found = True
            yield each
        if not found and self._look():
            yield from self._stored_rows(key, kind)

    def _stored_rows(self, key: bytes, kind: int) -> Iterator[tuple[Segment, int, Row]]:
        with contextlib.suppress(OSError):
            for segment, number, row in self._index.find(key, kind):
                if (segment.path, number) not in self._damaged:
                    yield segment, number, row

    def _look(self) -> bool:
        now_s = time.monotonic()
        if not self._is_local:
            if now_s < self._look_at_s:
                return False
            self._look_at_s = now_s + _LOOK_REMOTE_EVERY_S
        try:
            return self._index.refresh()
        except OSError as error:
            say_once(f"cache: {self.path} cannot be read: {why_unreadable(error)}")
            return False

    # --- writing -----------------------------------------------------------------------------------------

    def _writer(self) -> SegmentWriter | None:
        """What this process appends to; None if it cannot write now."""
        pid = os.getpid()
        writer = self._writers.get(pid)
        if writer is None and time.monotonic() >= self._write_at_s:
            with self._locks.setdefault(pid, threading.Lock()):
                writer = self._writers.get(pid)
                try:
                    writer = writer or SegmentWriter(self.path)
                    self._writers[pid] = writer
                except OSError as error:
                    self._stop_writing(error)
        return None if time.monotonic() < self._write_at_s else writer

    def _stop_writing(self, error: OSError) -> None:
        self._write_at_s = time.monotonic() + _RETRY_S
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            self._write_at_s = float("inf")
            self._tell(_READ_ONLY, logging.INFO, f"{self.path} cannot be written, so it is only read")
            return
        reason = why_unwritable(error, os.path.join(self.path, DESCRIPTION))
        self._tell(
            *(_FULL, logging.WARNING),
            f"no more files are stored at {self.path} until there is space: {reason}. The other files are "
            "decoded on every access",
        )

    def _tell(self, what: int, level: int, text: str) -> None:
        """Log a line, unless this process or one that it was forked from, or with, has done so."""
        if not self._told[what]:
            self._told[what] = 1
            log.log(level, "cache: %s", text)

    # --- how a file is known on disk ---------------------------------------------------------------------

    def known_as(self, identity: Identity, source: Any) -> Identity | Unknown:
        """The identity by content of what has an identity on this machine.

        Args:
            identity: Of `source` now.
            source: A path, or a file object that reads a file; not used if the identity is one of content.
        """
        if identity.is_of_content:
            return Identity((*identity.parts, _MACHINE))
        try:
            if hasattr(source, "fileno"):
                return self._known_as(identity, source.fileno())
            fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                same = identify_descriptor(fd) == identity
                return self._known_as(identity, fd) if same else Unknown.TOO_NEW
            finally:
                os.close(fd)
        except (OSError, ValueError, TypeError):  # it was deleted or closed just now
            return Unknown.UNREADABLE

    def _known_as(self, identity: Identity, fd: int) -> Identity | Unknown:
        size = identity.parts[2]
        if int(size) > MAX_FILE_BYTES:
            return Unknown.TOO_LARGE
        path = os.readlink(f"/proc/self/fd/{fd}").removeprefix(self._root)  # as the kernel names it
        key = digest("file", path, *identity.parts[2:5]) or b""  # of plain values, so there is one
        for _, _, row in self._rows(key, FILE):
            return Identity((content_of(row), size, AS_FILE, _MACHINE))
        memo = digest(*identity.parts) or b""
        content = self._hashed.get(memo)
        if content is None:
            content = hash_of(fd)
            if identify_descriptor(fd) != identity:
                return Unknown.TOO_NEW
            if not self.add_file(key, content):
                if len(self._hashed) >= _MAX_HASHED:
                    self._hashed.clear()
                self._hashed[memo] = content
        return Identity((content, size, AS_FILE, _MACHINE))

    def add_file(self, key: bytes, content: bytes) -> bool:
        """Store the SHA-256 of a file under its key; False if it cannot be."""
        if any(content_of(row) == content for _, _, row in self._stored_rows(key, FILE)):
            return True
        writer = self._writer()
        if writer is None:
            return False
        try:
            writer.add_row(file_row(key, content))
        except OSError as error:
            self._stop_writing(error)
            return False
        return True


def _make(path: str) -> None:
    """Make the directory and its description, if missing."""
    description = os.path.join(path, DESCRIPTION)
    try:
        if not os.path.isdir(path):
            with contextlib.suppress(FileExistsError):  # another process was faster, or it is a file
                os.mkdir(path)  # not its parents: the disk might not be mounted
        names = os.listdir(path)
    except OSError as error:
        if os.path.lexists(path) and not os.path.isdir(path):
            raise CacheMismatchError(
                f"{path} is a file, but decoded files are in a directory: use a different path. If it is a "
                'cache of samples, read it with fastload.CachedDataset(dataset, cache="lmdb:...")'
            ) from None
        reason = why_unwritable(error, path)
        raise CacheError(f"cannot make the cache of decoded files {path}: {reason}") from error
    if DESCRIPTION not in names:
        if not all(NAME.fullmatch(name) or name.startswith(DESCRIPTION) for name in names):
            raise CacheMismatchError(
                f"{path} is not a cache of decoded files, and has other files in it: use a different path. "
                'If it is a cache of samples, read it with fastload.CachedDataset(dataset, cache="lmdb:...")'
            )
        fields = {"kind": _KIND, "version": FORMAT_VERSION, "created_s": time.time()}
        try:
            name = f"{description}.{secrets.token_hex(4)}"
            write_new(name, json.dumps(fields).encode("ascii"))
            os.rename(name, description)
        except OSError as error:
            reason = why_unwritable(error, description)
            raise CacheError(f"cannot make the cache of decoded files {path}: {reason}") from error
    version = read_description(path)["version"]
    if version != FORMAT_VERSION:
        raise CacheMismatchError(
            f"{path} has decoded files of format {version}, but this release reads {FORMAT_VERSION}: use a "
            "different path, or remove it"
        )
    kind = file_system_of(path)
    if kind and not is_local(kind):
        say_once(
            f"cache: {path} is on a file system of kind {kind}, perhaps on a network: decoded files are many "
            "times as large as encoded ones, so reading them can take longer than decoding. A disk of this "
            "machine is faster"
        )


def read_description(path: str) -> dict[str, Any]:
    """What a directory of decoded files says about itself: `version`, and `created_s`.

    Raises:
        CacheMismatchError: It is not one.
        CacheError: It cannot be read.
    """
    try:
        with open(os.path.join(path, DESCRIPTION), "rb") as file:
            fields: Any = json.loads(file.read(1 << 16))
        created_s = float(fields["created_s"])
        if fields["kind"] != _KIND or type(fields["version"]) is not int or not 0 <= created_s < 1e11:
            raise ValueError
    except OSError as error:
        raise CacheError(f"cannot read the cache {path}: {why_unreadable(error)}") from error
    except (ValueError, TypeError, KeyError):
        raise CacheMismatchError(
            f"{path} is not a cache of decoded files: its {DESCRIPTION} is damaged. Remove the directory, or "
            "use a different path"
        ) from None
    return {"version": fields["version"], "created_s": created_s}
