"""What a file of records is, before a process uses it: made, recovered after a power failure, checked.

LMDB trusts what it reads. So a file is looked at first, while no other process commits: whether the power
failed since its commits were synced, and whether it was cut off. The key b"meta" has a JSON object:
`version`, `uuid`, `created_s`, `finished`, and what its maker adds.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import stat
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lmdb
import lmdb.verify
import xxhash

from fastload.cache.records import is_intact
from fastload.errors import CacheCorruptError, CacheError, CacheMismatchError
from fastload.system.disk import sync_directory
from fastload.system.limits import read_text
from fastload.system.locks import flock_fd
from fastload.system.logs import log
from fastload.system.os_errors import why_unwritable

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT_VERSION = 7
META_KEY = b"meta"
BESIDE = LOCK, BOOT = "-lock", "-boot"  # suffixes of the files beside one that is being filled
WAIT_S = 600.0  # for other processes, by whoever may wait
_QUIET_S = 2.0  # without saying so
CURE = "remove it, and build the cache again"
OTHER_SPACE = "processes of another PID namespace, such as another container, use it"

_CHUNK_KEYS = 1024
_SMALL_BYTES, _FEW_RECORDS = 1 << 20, 4096  # up to which walking the tree takes about 20 ms
_ROOM_BYTES = 64 << 20  # of a map, beyond the file, for discarding records
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def descriptor_of(path: str, flags: int) -> int:
    """Read and write, if that is allowed, for making the file and for locks of all kinds."""
    always = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        return os.open(path, os.O_RDWR | flags | always, 0o644)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return os.open(path, os.O_RDONLY | always)


class RefusedError(CacheError):
    """This process does not use a file that may be right; `reason` says why."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"cannot read the cache {path}: {reason}")
        self.reason = reason


def examined(path: str, fd: int, create: dict[str, Any] | None) -> dict[str, Any]:
    """`meta`; no other process commits meanwhile."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise CacheMismatchError(f"{path} is not a file, but a cache on disk is one: use a different path")
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)  # whose lock is its own
    try:
        _wait_for_turn(path, again)
        if os.path.exists(path + BOOT) and Path(path + BOOT).read_bytes() != boot_id():
            _discard_damaged(path, fd, is_replaced=create is not None)
        if (
            create is not None and os.fstat(fd).st_size <= 2 * mmap.PAGESIZE
        ):  # its maker might have been killed
            _make(path, fd, create)
        return _read_meta(path, fd)
    except (OSError, lmdb.DiskError) as error:
        if isinstance(error, CacheError):
            raise
        why = why_unwritable(error, path).removeprefix(f"/proc/self/fd/{fd}: ")
        raise CacheError(f"cannot open the cache {path}: {why}") from error
    except lmdb.Error as error:
        is_small = isinstance(error, lmdb.MemoryError) and os.fstat(fd).st_size <= _SMALL_BYTES
        if is_small and (problems := problems_of(fd)):  # it claims more pages than memory has room for
            raise CacheCorruptError(f"{path} is damaged ({problems[0]}): {CURE}") from error
        if (reason := why_unopened(error)) is not None:
            raise RefusedError(path, reason) from error
        reason = str(error).removeprefix(f"/proc/self/fd/{fd}: ")
        raise CacheMismatchError(
            f"{path} is not a cache, or it is damaged ({reason}): use a different path, or {CURE}"
        ) from error
    finally:
        os.close(again)


def _wait_for_turn(path: str, fd: int) -> None:
    """Lock a file, unless nothing can be locked there: then nothing is committed, either.

    Raises:
        RefusedError: Another process keeps the lock.
    """
    with contextlib.suppress(OSError):
        if flock_fd(fd, wait_s=_QUIET_S):
            return
        log.warning(
            "cache: waiting for another process, which commits to %s or checks it. If it was stopped, as by "
            "Ctrl-Z, continue it or end it",
            path,
        )
        if not flock_fd(fd, wait_s=WAIT_S):
            raise RefusedError(path, "another process keeps its lock, and may have been stopped")


def why_unopened(error: Exception) -> str | None:
    """Why a file that may be right is not opened here."""
    if "already open" in str(error):
        return "it is open in this process through py-lmdb, so close it there"
    if isinstance(error, lmdb.LockError):
        return OTHER_SPACE
    if isinstance(error, lmdb.MemoryError):
        return "the address space of this process is too small for it: raise `ulimit -v`"
    return None


def boot_id() -> bytes:
    """What tells this run of the system from others."""
    return read_text(_BOOT_ID).strip().encode()


def quiet(fd: int, **options: Any) -> Any:
    """An environment of a file that nobody else writes to meanwhile; LMDB uses no lock file."""
    return lmdb.open(f"/proc/self/fd/{fd}", subdir=False, lock=False, readahead=False, **options)


def problems_of(fd: int) -> list[str]:
    """What is wrong with the tree in a file that nobody writes to now, found without LMDB's engine."""
    try:
        return list(lmdb.verify.verify(f"/proc/self/fd/{fd}"))  # type: ignore[no-untyped-call]
    except lmdb.verify.VerifyError as error:
        return [str(error)]


def _make(path: str, fd: int, fields: dict[str, Any]) -> None:
    meta = {"version": FORMAT_VERSION, "uuid": uuid.uuid4().hex, "created_s": time.time(), "finished": False}
    with quiet(fd, lib_version=0) as env, env.begin(write=True) as txn:  # which all tools read
        if not txn.stat()["entries"]:
            txn.put(META_KEY, meta_value({**meta, **fields}))
    sync_directory(os.path.dirname(path))


def _read_meta(path: str, fd: int) -> dict[str, Any]:
    with quiet(fd, readonly=True) as env:
        nbytes, needed = os.fstat(fd).st_size, (env.info()["last_pgno"] + 1) * env.stat()["psize"]
        # LMDB follows damaged pointers out of the file, which ends the process; walking a large tree takes
        # too long for each opening, so there `fastload cache verify` alone finds them.
        is_walked = nbytes < max(needed, _SMALL_BYTES) or env.stat()["entries"] <= _FEW_RECORDS
        if is_walked and (problems := problems_of(fd)):
            how = (
                f"was cut off: it has {nbytes:,} bytes instead of {needed:,}"
                if nbytes < needed
                else "is damaged"
            )
            raise CacheCorruptError(f"{path} {how} ({problems[0]}): {CURE}")
        with env.begin() as txn:
            value = txn.get(META_KEY)
    try:
        meta = parse_meta(value)
        version, _, _, _ = meta["version"], meta["uuid"], salt_of(meta), meta["finished"]
        time.localtime(float(meta["created_s"]))
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError, OSError):
        raise CacheMismatchError(
            f"{path} is an LMDB file, but no cache that this version made: use a different path, or {CURE}"
        ) from None
    if version == FORMAT_VERSION and value != meta_value(meta):
        raise CacheCorruptError(f"{path}: its description is damaged: {CURE}")
    if version != FORMAT_VERSION:
        raise CacheMismatchError(
            f"{path} is a cache of format {version}, but this version reads {FORMAT_VERSION}: use a "
            f"different path, or {CURE}"
        )
    return meta


def meta_value(meta: dict[str, Any]) -> bytes:
    """What is stored: a line of JSON, and the XXH3-64 of it in hexadecimal digits."""
    text = json.dumps(meta).encode("ascii")
    return text + b"\n" + xxhash.xxh3_64_hexdigest(text).encode("ascii")


def parse_meta(value: bytes | None) -> dict[str, Any]:
    """What a file says of itself, if it is undamaged.

    Raises:
        ValueError, TypeError, RecursionError: It is none of ours.
    """
    return dict(json.loads((value or b"null").partition(b"\n")[0]))


def salt_of(meta: dict[str, Any]) -> bytes:
    """What the checksums of the records cover before their keys.

    A key by sample is an index alone: in another file, another sample has it.
    """
    return bytes.fromhex(meta["uuid"]) if meta.get("kind") == "samples" else b""


def _discard_damaged(path: str, fd: int, *, is_replaced: bool) -> None:
    """Discard what a power failure damaged: the records whose checks fail, or everything if the tree is."""
    log.warning("cache: %s was not synced before the system went down: checking it", path)
    problems = problems_of(fd)
    if problems and not is_replaced:
        raise CacheCorruptError(f"{path} was damaged when the system went down ({problems[0]}): {CURE}")
    if problems:
        os.ftruncate(fd, 0)
        log.warning("cache: %s was damaged (%s), and is built anew", path, problems[0])
    else:
        with quiet(fd, map_size=os.fstat(fd).st_size + _ROOM_BYTES) as env:
            damaged = [key for key, _, is_right in checked_records(env) if not is_right]
            with env.begin(write=True) as txn:
                for key in damaged:
                    txn.delete(key)
        log.warning("cache: %s: %d damaged records were discarded", path, len(damaged))
    os.fsync(fd)
    os.unlink(path + BOOT)


def checked_records(env: Any) -> Iterator[tuple[bytes, int, bool]]:
    """All keys, the sizes of their records, and whether these are intact."""
    with env.begin() as txn:
        salt = salt_of(parse_meta(txn.get(META_KEY)))
    at: bytes | None = b""
    while at is not None:  # no transaction lasts long: writers could reuse no page meanwhile
        with env.begin(buffers=True) as txn, txn.cursor() as cursor:
            found = cursor.set_range(at) if at else cursor.first()
            at = None
            checked: list[tuple[bytes, int, bool]] = []
            while found:
                key = bytes(cursor.key())
                if len(checked) == _CHUNK_KEYS:
                    at = key
                    break
                value = cursor.value()
                if key != META_KEY:
                    checked.append((key, len(value), is_intact(value, salt + key)))
                found = cursor.next()
        yield from checked
