"""What identifies the bytes that a decoder reads: a file as fstat knows it, or the content of a buffer.

Rules:

1. A path alone identifies nothing. A file is known by the device, inode, size, mtime and ctime of what was
   opened. Device and inode last on some file systems only; on all others, the path that the kernel knows and
   the mount belong to the identity.
2. A descriptor identifies an object only if the object reads that very file: exactly one of `FILES`, or an
   `io.BufferedReader` over one. The `fileno()` of a member of an archive, of a gzip file or of a spooled file
   is that of a different file.
3. A file that changed a moment ago, or has a time in the future, has no identity, because its times could
   stay equal at the next change.
4. Times that were chosen by whoever made a disk image prove nothing: those in whole seconds, on a read-only
   mount or on a file system with finer times. Such a file is known by its content, which a process hashes
   once for each mount (proc(5) numbers them).
5. What a file object gives is its file only if it has buffered nothing older (`is_fresh`).
6. Asking never raises and changes nothing: what cannot be identified gives the reason, one of `reasons`.
"""

from __future__ import annotations

import hashlib
import io
import operator
import os
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastload.readers.reasons import NOT_A_FILE, TOO_LARGE, TOO_NEW
from fastload.system.limits import read_text

if TYPE_CHECKING:
    from collections.abc import Callable

# Changes that are closer together than the resolution of a file system's clock leave equal times; the clocks
# of servers differ. Only tests change these.
SETTLED_S = 2.0
SETTLED_REMOTE_S = 60.0
# The classes of objects that read the file of their descriptor, and nothing else.
FILES: set[type] = {io.FileIO}

# Here, an inode goes to another file after a deletion alone, which shows in ctime.
_LASTING_INODES = frozenset({"ext4", "xfs", "btrfs", "zfs", "tmpfs"})
_LOCAL = _LASTING_INODES | {"erofs", "ext2", "ext3", "f2fs", "iso9660", "overlay", "ramfs", "squashfs"}
_SECOND_NS = 1_000_000_000
_MOUNTS_LAST_S = 10.0  # so long, a device number is taken for the file system that it was


MAX_FILE_BYTES = 1 << 30  # a larger one, of many images perhaps, would be read in whole to be known
AS_FILE = "file"  # libraries leave an object that reads a file in another state than one that reads memory
_READ_BYTES = 1 << 20


class Identity(NamedTuple):
    """What identifies some bytes: plain values that are equal for equal bytes alone."""

    parts: tuple[int | str | bytes, ...]

    @property
    def is_of_content(self) -> bool:
        """Whether it is a hash of the bytes, instead of what the system says of a file."""
        return type(self.parts[0]) is bytes


Facts = tuple[int, int, int, int, int, int]
_facts: Callable[[os.stat_result], Facts] = operator.attrgetter(
    "st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns", "st_mode"
)


class _FileSystem(NamedTuple):
    has_lasting_inodes: bool
    settled_s: float  # how long a file must have been unchanged
    mount: str
    read_s: float  # when this was read, of time.monotonic()


_file_systems: dict[int, _FileSystem] = {}  # by device
_DESCRIPTORS, _MOUNTS = Path("/proc/self/fdinfo"), Path("/proc/self/mountinfo")
_PLAIN = frozenset({int, float, str, bytes, bool, type(None)})
_MAX_DEPTH = 32  # of containers, which can contain themselves


def identify_path(path: Any) -> Identity | str:
    """The identity of the file at a path now; ask again after reading, because the path can be switched."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        return NOT_A_FILE
    try:
        facts = _facts(os.stat(path))
        if not stat.S_ISREG(facts[-1]):
            return NOT_A_FILE
        file_system = _file_systems.get(facts[0])
        is_quick = file_system is not None and file_system.has_lasting_inodes and facts[4] % _SECOND_NS
        if file_system is None or not is_quick or _is_old(file_system):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                return identify_descriptor(descriptor)
            finally:
                os.close(descriptor)
        return _identity_of(facts, file_system, "")
    except (OSError, ValueError):  # deleted, forbidden, or not a path
        return NOT_A_FILE


def identify_stream(stream: Any) -> Identity | str:
    """The identity of the file that a Python file object reads, wherever its position is."""
    facts = facts_of_stream(stream)
    return facts if isinstance(facts, str) else identify_facts(facts, stream.fileno())


def identify_descriptor(descriptor: int) -> Identity | str:
    """The identity of an open file."""
    try:
        return identify_facts(facts_of(descriptor), descriptor)
    except OSError:
        return NOT_A_FILE


def facts_of(descriptor: int) -> Facts:
    """What the system says of an open file."""
    return _facts(os.fstat(descriptor))


def facts_of_stream(stream: Any) -> Facts | str:
    """What the system says of the file that a Python file object reads: quick, to see whether it changes."""
    raw = stream.raw if type(stream) is io.BufferedReader else stream
    if type(raw) not in FILES:
        return NOT_A_FILE
    try:
        return facts_of(raw.fileno())
    except (OSError, ValueError):  # it is closed
        return NOT_A_FILE


def is_fresh(stream: Any) -> bool:
    """Whether what a file object, one with facts, will give from its beginning is what its file has now."""
    try:
        ahead = os.lseek(stream.fileno(), 0, os.SEEK_CUR)
        if stream.tell():
            return False
        return not ahead or bool(stream.peek()[:ahead] == os.pread(stream.fileno(), ahead, 0))
    except (OSError, ValueError, AttributeError):
        return False


def identify_facts(facts: Facts, descriptor: int) -> Identity | str:
    """The identity of an open file, of which the system says these facts."""
    device, *_, mode = facts
    if not stat.S_ISREG(mode):
        return NOT_A_FILE
    try:
        file_system = _file_systems.get(device)
        if file_system is None or _is_old(file_system):
            file_system = _file_systems[device] = _file_system_of(descriptor)
        path = "" if file_system.has_lasting_inodes else os.readlink(f"/proc/self/fd/{descriptor}")
        identity = _identity_of(facts, file_system, path)
        if isinstance(identity, str) or _has_own_times(facts[4], file_system):
            return identity
        return _by_content(identity, file_system.mount, descriptor)
    except OSError:
        return NOT_A_FILE


def _has_own_times(ctime_ns: int, file_system: _FileSystem) -> bool:
    """Whether the kernel set the ctime of a file, as far as is known; see rule 4."""
    mount = "" if file_system.has_lasting_inodes else file_system.mount
    return ctime_ns % _SECOND_NS > 0 or (bool(mount) and "ro" not in mount.split()[-1].split(","))


def _by_content(identity: Identity, mount: str, descriptor: int) -> Identity | str:
    if int(identity.parts[2]) > MAX_FILE_BYTES:
        return TOO_LARGE
    memo = digest(*identity.parts, mount) or b""  # of plain values, so there is one
    if memo not in _contents:
        if len(_contents) >= _MAX_CONTENTS:
            _contents.clear()
        _contents[memo] = hash_of(descriptor)
    return Identity((_contents[memo], identity.parts[2], AS_FILE))


_contents: dict[bytes, bytes] = {}  # hashes of files, by a digest of identity and mount
_MAX_CONTENTS = 1 << 20  # 200 MB


def hash_of(descriptor: int) -> bytes:
    """The SHA-256 of the content of an open file, whose position stays.

    Raises:
        OSError: It cannot be read.
    """
    sha256, at = hashlib.sha256(), 0
    while data := os.pread(descriptor, _READ_BYTES, at):
        sha256.update(data)
        at += len(data)
    return sha256.digest()


def identify_content(buffer: Any) -> Identity | str:
    """The identity of the bytes in a contiguous buffer: their SHA-256, on every processor."""
    try:
        with memoryview(buffer) as view, view.cast("B") as content:
            if "O" in view.format:  # addresses of objects
                return NOT_A_FILE
            return Identity((hashlib.sha256(content).digest(), content.nbytes))
    except (TypeError, ValueError, BufferError):
        return NOT_A_FILE


def file_system_of(path: str) -> str:
    """The kind of the file system of a file or directory, such as "ext4"; empty if it is unknown.

    Raises:
        OSError: It cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _kind_of(_file_system_of(descriptor).mount)
    finally:
        os.close(descriptor)


def is_local(kind: str) -> bool:
    """Whether a kind of file systems is known to be of this machine alone."""
    return kind in _LOCAL


def digest(*parts: Any) -> bytes | None:
    """A key of 16 bytes for plain values (see `is_plain`); None for others."""
    if not is_plain(parts):
        return None
    try:
        text = repr(parts)
    except ValueError:  # an int of thousands of digits
        return None
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether a value is all in its repr, so that it can be a key, and is marshalled without a loss.

    It is an int, float, str, bytes, bool or None, or a tuple, list or dict of such values; no subclasses.
    """
    kind = type(value)
    if kind is dict:
        value = (*value, *value.values())
    elif kind is not tuple and kind is not list:
        return kind in _PLAIN
    if _PLAIN.issuperset(map(type, value)):
        return True
    return depth < _MAX_DEPTH and all(is_plain(part, depth + 1) for part in value)


def _identity_of(facts: Facts, file_system: _FileSystem, path: str) -> Identity | str:
    *parts, mtime_ns, ctime_ns, _ = facts
    if time.time_ns() - max(mtime_ns, ctime_ns) < file_system.settled_s * 1e9:
        return TOO_NEW
    parts += mtime_ns, ctime_ns
    return Identity((*parts,) if file_system.has_lasting_inodes else (*parts, path, file_system.mount))


def _is_old(file_system: _FileSystem) -> bool:
    return time.monotonic() - file_system.read_s > _MOUNTS_LAST_S


def _file_system_of(descriptor: int) -> _FileSystem:
    """The file system of an open file (proc(5)): fdinfo has the number of its mount, mountinfo the rest."""
    numbers = [
        line.split()[1]
        for line in read_text(_DESCRIPTORS / str(descriptor)).splitlines()
        if "mnt_id:" in line
    ]
    for line in read_text(_MOUNTS).splitlines():
        if line.split()[0] in numbers:
            kind = _kind_of(line)
            settled_s = SETTLED_S if kind in _LOCAL else SETTLED_REMOTE_S
            return _FileSystem(kind in _LASTING_INODES, settled_s, line, time.monotonic())
    return _FileSystem(False, SETTLED_REMOTE_S, "", time.monotonic())


def _kind_of(mount: str) -> str:
    """The kind of the file system in a line of mountinfo."""
    return mount.partition(" - ")[2].partition(" ")[0]
