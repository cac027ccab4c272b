"""Local copies of caches in object stores: downloaded once per host, checked, limited in size.

A copy is the directory `copies/DIGEST-BUILD_ID` below `FASTLOAD_CACHE_DIR`: the digest of the URL, and the id
of the build. It holds the shards and the manifest, and is a cache on disk as any other. Rules:

1. A copy gets its name when all its shards are complete, checked and on the disk. Until then its files are in
   a directory with `.partial` at its end. A shard in it has its lasting name once it was checked, so a
   download that was interrupted continues with the next shard.
2. One process downloads a copy: it holds the lock on `NAME.lock`, which is the lock of builds and removals
   too. Other processes wait.
3. The manifest is read at each opening, so a cache that was built again at the URL gets another copy. If
   the store cannot be reached and a complete copy of the URL is there, it is opened with a warning. A store
   that answers that there is no cache, or that refuses access, is always an error.
4. Each open file of a copy holds a shared lock (see `files`). Copies are removed only under the exclusive
   locks of all their files, the least recently opened first.
5. Decisions about room are made under one lock. A copy counts with its whole size as soon as its download
   begins.
6. `FASTLOAD_CACHE_DIR` may be a directory of several users. What another user can have written is neither
   read nor continued: what is not this user's or root's, what others may write, and links. Open files are
   looked at once more, because who may write in that directory may exchange the directories in it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastload.cache.lmdb.files import MANIFEST_NAME, open_cache
from fastload.cache.lmdb.manifest import Manifest, manifest_text, new_digest, parse_manifest, read_manifest
from fastload.cache.locks import held, try_lock
from fastload.cache.progress import BuildProgress
from fastload.errors import CacheCorruptError, CacheError, RemoteFolderError
from fastload.files.attempts import OtherLengthError
from fastload.files.transfers import RemoteFiles, may_pass
from fastload.system.budget import parse_budget
from fastload.system.disk import (
    check_private_directory,
    foreign_path,
    make_private_directory,
    sync_directory,
)
from fastload.system.logs import log
from fastload.system.refusals import writing_refused
from fastload.system.sizes import readable_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from fastload.cache.lmdb.manifest import ShardFile
    from fastload.cache.lmdb.open_file import OpenFile

DIRECTORY_VARIABLE = "FASTLOAD_CACHE_DIR"
BYTES_VARIABLE = "FASTLOAD_CACHE_BYTES"

_AT_ONCE = 8  # shards
_ATTEMPTS = 2  # to get a shard with the right digest
_PARTIAL = ".partial"
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{1,32}")
_POLL_S = 0.2
_LOG_S = 10.0


def cache_directory() -> str:
    """The directory of copies, and of builds whose cache goes to a URL; `~/.cache/fastload` by default."""
    return os.path.abspath(os.path.expanduser(os.environ.get(DIRECTORY_VARIABLE) or "~/.cache/fastload"))


def copies_directory() -> str:
    """The directory of copies."""
    return own_directory("copies")


def own_directory(name: str) -> str:
    """A directory below `cache_directory`, in which nobody but this user (or root) has written; or none yet.

    Where several users share the directory, the first of them has the plain name.
    """
    path = os.path.join(cache_directory(), name)
    try:
        check_private_directory(path)
    except (FileNotFoundError, NotADirectoryError):
        pass  # it is made when it is needed
    except PermissionError as error:
        own = f"{path}-{os.getuid()}"
        _warn_once(
            f"{error}. {own} is used instead: name a directory of this user with {DIRECTORY_VARIABLE}, or "
            "remove what is there"
        )
        return own
    return path


@functools.cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def digest_of_url(url: str) -> str:
    """A short name for a URL."""
    return hashlib.blake2b(url.rstrip("/").encode(errors="surrogateescape"), digest_size=8).hexdigest()


def open_copy(
    url: str, storage_options: Mapping[str, Any] | None = None, *, progress: bool = True
) -> tuple[str, tuple[OpenFile, ...]]:
    """The path and the open files of the local copy of a cache, which is downloaded unless it is there.

    Args:
        url: The URL of the cache.
        storage_options: Arguments for fsspec's file system, such as credentials.
        progress: Show a bar if standard error is a terminal; progress is logged otherwise.

    Raises:
        FileNotFoundError: There is no finished cache at the URL.
        CacheCorruptError: The manifest or a shard is damaged, or a shard is missing.
        CacheMismatchError: The cache has another format.
        CacheError: The store cannot be read, the copy cannot be written, or it exceeds the limit of all
            copies.
        ImportError: A package for the URL is missing.
        ValueError: The URL has an unknown protocol, or `FASTLOAD_CACHE_BYTES` is not a size.
    """
    files = RemoteFiles(url, storage_options)
    _check_directory()
    try:
        manifest = read_manifest(files)
    except CacheError as error:
        cause = error.__cause__
        found = _newest_copy(files.url)
        if found is None or not isinstance(cause, RemoteFolderError) or not may_pass(cause):
            raise
        manifest = found
        log.warning(
            "%s. The local copy of the cache is used, whose build began on %s: if the cache was built again "
            "since it was downloaded, this process does not notice",
            str(error),  # not the error: a handler that keeps records would keep its frames
            time.strftime("%Y-%m-%d %H:%M", time.localtime(manifest.plan.created_s)),
        )
    path = _path_of(manifest)
    while True:
        _make(files, manifest, path, progress)
        try:
            opened = open_cache(path)
        except FileNotFoundError:
            continue  # another process removed it just now
        # Else it was removed before its files were locked.
        if _is_complete(path, manifest) and all(file.is_own() for file in opened):
            with contextlib.suppress(OSError):
                os.utime(path)  # its last use
            return path, opened


def _check_directory() -> None:
    """Check that no other user can have placed a copy.

    Raises:
        CacheError: Another user could.
    """
    try:
        check_private_directory(copies_directory())
    except FileNotFoundError:
        pass  # it is made for the first copy
    except PermissionError as error:
        raise CacheError(
            f"{error}. Name a directory of this user with {DIRECTORY_VARIABLE}, or remove what is there"
        ) from None


def _path_of(manifest: Manifest) -> str:
    return os.path.join(copies_directory(), f"{digest_of_url(manifest.url)}-{manifest.plan.build_id}")


def _newest_copy(url: str) -> Manifest | None:
    """The manifest of the complete copy of a URL whose build is the newest."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(copies_directory()):
            if name.startswith(f"{digest_of_url(url)}-") and _NAME.fullmatch(name):
                path = os.path.join(copies_directory(), name)
                manifest = manifest_of_copy(path)
                if manifest is not None and _is_complete(path, manifest):
                    found.append(manifest)
    return max(found, key=lambda manifest: manifest.plan.created_s, default=None)


def manifest_of_copy(path: str) -> Manifest | None:
    """The manifest of a copy, complete or not; None if there is no valid one."""
    try:
        return parse_manifest(Path(path, MANIFEST_NAME).read_bytes())
    except (OSError, ValueError):  # CacheMismatchError is a ValueError
        return None


def _is_complete(path: str, manifest: Manifest) -> bool:
    """Whether all files of a copy are there, with their lengths and the digests of this manifest."""
    try:
        if foreign_path(path) is not None:
            return False
        found = manifest_of_copy(path)
        return (
            found is not None
            and found.shards == manifest.shards
            and all(os.path.getsize(os.path.join(path, shard.name)) == shard.nbytes for shard in found.shards)
        )
    except OSError:
        return False


# --- downloading -----------------------------------------------------------------------------------------


def _make(files: RemoteFiles, manifest: Manifest, path: str, shown: bool) -> None:
    """Download a copy, or wait while another process downloads it; returns when it is complete."""
    said_at_s = float("-inf")
    while not _is_complete(path, manifest):
        with _writing(path):
            make_private_directory(os.path.dirname(path))
        with contextlib.ExitStack() as stack:
            with _writing(path):
                is_ours = stack.enter_context(held(f"{path}.lock"))
            if is_ours and not _is_complete(path, manifest):
                _download(files, manifest, path, shown)
        if not is_ours:
            if time.monotonic() - said_at_s >= _LOG_S:
                said_at_s = time.monotonic()
                log.info("cache: waiting: another process downloads %s to %s", manifest.url, path)
            time.sleep(_POLL_S)


def _download(files: RemoteFiles, manifest: Manifest, path: str, shown: bool) -> None:
    """Download the shards that are missing; the caller holds the lock of the copy."""
    partial = path + _PARTIAL
    with _writing(path):
        if os.path.lexists(path):
            shutil.rmtree(partial, ignore_errors=True)
            os.rename(path, partial)
        found = manifest_of_copy(partial)
        if os.path.lexists(partial) and (foreign := foreign_path(partial)) is not None:
            log.warning(
                "%s can be another user's (it belongs to one, others may write it, or it is a link): "
                "the copy is downloaded again",
                path + foreign.removeprefix(partial),
            )
            _remove_tree(partial)
        elif found is not None and found.shards != manifest.shards:
            shutil.rmtree(partial)  # else files of a complete copy were removed by hand
    _reserve(manifest, path)
    missing = [shard for shard in manifest.shards if not _is_there(partial, shard)]
    numbers = {shard.name: number for number, shard in enumerate(manifest.shards)}
    lengths = {name: len(manifest.plan.indices_of(number)) for name, number in numbers.items()}
    done = manifest.plan.num_samples - sum(lengths[shard.name] for shard in missing)
    title = f"downloading {manifest.url}"
    is_stopped, lock = threading.Event(), threading.Lock()
    with (
        BuildProgress(title, manifest.plan.num_samples, shown=shown, done=done) as progress,
        ThreadPoolExecutor(_AT_ONCE, "fastload-download") as threads,
    ):

        def count(nbytes: int) -> None:
            with lock:
                progress.advance(nbytes, 0)

        try:
            tasks = {
                threads.submit(_fetch, files, shard, partial, is_stopped, count): shard for shard in missing
            }
            for task in as_completed(tasks):
                task.result()
                with lock:
                    progress.advance(0, lengths[tasks[task].name])
        finally:
            is_stopped.set()
            threads.shutdown(wait=False, cancel_futures=True)
    with _writing(path):
        sync_directory(partial)
        os.rename(partial, path)
        sync_directory(os.path.dirname(path))


def _remove_tree(path: str) -> None:
    if os.path.islink(path):
        os.unlink(path)
    else:
        shutil.rmtree(path)


def _is_there(directory: str, shard: ShardFile) -> bool:
    try:
        return os.path.getsize(os.path.join(directory, shard.name)) == shard.nbytes
    except OSError:
        return False


class _StoppedError(Exception):
    """Another shard has failed, or the download was interrupted."""


def _fetch(
    files: RemoteFiles,
    shard: ShardFile,
    directory: str,
    is_stopped: threading.Event,
    count: Callable[[int], None],
) -> None:
    """Download a shard, check it, and give it its lasting name."""
    path = os.path.join(directory, shard.name)
    part = f"{path}.part"
    found = ""
    for _ in range(_ATTEMPTS):
        digest = new_digest()
        with contextlib.ExitStack() as stack:
            with _writing(part):
                file = stack.enter_context(open(part, "wb", buffering=0, opener=_open_own))
            try:
                for data in files.parts(shard.name, shard.nbytes):
                    if is_stopped.is_set():
                        raise _StoppedError
                    with _writing(part):
                        _write_all(file.fileno(), data)
                    digest.update(data)
                    count(len(data))
            except FileNotFoundError:
                raise CacheCorruptError(
                    f"{files.url} is incomplete: its manifest lists {shard.name}, which is not there. Remove "
                    "all files at that URL, and build the cache again"
                ) from None
            except RemoteFolderError as error:
                _check_length(files, shard, error)
                raise CacheError(
                    f"{error}. The shards that were downloaded are kept in {directory}: open the cache again "
                    "to continue"
                ) from error
            with _writing(part):
                os.fsync(file.fileno())
        found = digest.hexdigest()
        if found == shard.blake2b:
            with _writing(path):
                os.rename(part, path)
            return
        log.info("%s/%s arrived with another digest than the manifest says", files.url, shard.name)
    with _writing(part):
        os.unlink(part)
    raise CacheCorruptError(
        f"{files.url}/{shard.name} is damaged: its digest is {found[:16]}..., and the manifest says "
        f"{shard.blake2b[:16]}.... Remove all files at that URL, and build the cache again"
    )


def _check_length(files: RemoteFiles, shard: ShardFile, error: RemoteFolderError) -> None:
    """Raise CacheCorruptError if a shard cannot be read because the file at the URL has another length."""
    if not isinstance(error.__cause__, OtherLengthError):
        return
    try:
        nbytes = files.nbytes(shard.name)
    except (RemoteFolderError, OSError):
        return  # the caller raises the first error
    if nbytes not in (None, shard.nbytes):
        raise CacheCorruptError(
            f"{files.url}/{shard.name} is damaged: it has {nbytes:,} bytes, and the manifest says "
            f"{shard.nbytes:,}. Remove all files at that URL, and build the cache again"
        ) from error


def _open_own(path: str, flags: int) -> int:
    """Make a file that only this user can write; what was there is not written."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, flags | os.O_EXCL, 0o644)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


@contextlib.contextmanager
def _writing(path: str) -> Iterator[None]:
    """Raise errors of this machine's disk as a CacheError that says what to change."""
    try:
        yield
    except OSError as error:
        raise CacheError(
            f"cannot write the copy {path}: {writing_refused(error, path)}. The environment variable "
            f"{DIRECTORY_VARIABLE} names another directory for copies"
        ) from error


# --- room ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Copy:
    """A copy, or an unfinished download.

    Attributes:
        path: Its directory, without the suffix of an unfinished download.
        nbytes: The bytes that count: of an unfinished download, all that it will take.
        on_disk: The bytes of its files.
        used_s: When it was opened last, in seconds since 1970.
        is_finished: Whether it is complete.
    """

    path: str
    nbytes: int
    on_disk: int
    used_s: float
    is_finished: bool

    @property
    def directory(self) -> str:
        """The directory of its files."""
        return self.path if self.is_finished else self.path + _PARTIAL


def copies() -> list[Copy]:
    """All copies and unfinished downloads of this user, the least recently opened first."""
    root = copies_directory()
    found = []
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(root):
            if not _NAME.fullmatch(name.removesuffix(_PARTIAL)):
                continue
            directory = os.path.join(root, name)
            try:
                with os.scandir(directory) as entries:
                    on_disk = sum(entry.stat().st_size for entry in entries)
                used_s = os.stat(directory).st_mtime
            except (FileNotFoundError, NotADirectoryError):
                continue  # another process removed or renamed it just now
            manifest = manifest_of_copy(directory)
            nbytes = on_disk if manifest is None else max(on_disk, manifest.nbytes)
            is_finished = not name.endswith(_PARTIAL)
            found.append(Copy(directory.removesuffix(_PARTIAL), nbytes, on_disk, used_s, is_finished))
    return sorted(found, key=lambda copy: copy.used_s)


def allowed_bytes(taken: int) -> int:
    """The most bytes that all copies may take.

    Args:
        taken: Bytes of the files of all copies.

    Raises:
        ValueError: `FASTLOAD_CACHE_BYTES` is not a size.
    """
    text = os.environ.get(BYTES_VARIABLE, "").strip() or "auto"
    available = shutil.disk_usage(copies_directory()).free + taken
    try:
        return parse_budget(int(text) if text.isdecimal() else text, available=available)
    except ValueError:
        raise ValueError(
            f"{BYTES_VARIABLE}={text!r} is not a size above zero: give bytes, or a size such as 200GB or "
            "500GiB"
        ) from None


def _reserve(manifest: Manifest, path: str) -> None:
    """Make room for a copy, and count its bytes from now on.

    Raises:
        CacheError: Copies that are in use leave too little room.
    """
    root = os.path.dirname(path)
    partial = path + _PARTIAL
    with contextlib.ExitStack() as stack:
        with _writing(path):
            stack.enter_context(held(os.path.join(root, "room.lock"), waits=True))
        with _writing(path):
            found = copies()
        allowed = allowed_bytes(sum(copy.on_disk for copy in found))
        others = [copy for copy in found if copy.path != path]
        _make_room(manifest, allowed, others)
        with _writing(path):
            make_private_directory(partial)
            new = os.path.join(partial, f"{MANIFEST_NAME}.new")
            with open(new, "wb", opener=_open_own) as file:
                file.write(manifest_text(manifest))
            os.replace(new, os.path.join(partial, MANIFEST_NAME))


def _make_room(manifest: Manifest, allowed: int, others: list[Copy]) -> None:
    """Remove copies that are not in use until the new copy fits; removes nothing if it cannot fit."""
    excess = sum(copy.nbytes for copy in others) + manifest.nbytes - allowed
    if excess <= 0:
        return
    with contextlib.ExitStack() as locks:
        chosen: list[Copy] = []
        for copy in others if manifest.nbytes <= allowed else []:
            if excess > 0 and _locked(copy, locks):
                chosen.append(copy)
                excess -= copy.nbytes
        if excess > 0:
            in_use = sum(copy.nbytes for copy in others) - sum(copy.nbytes for copy in chosen)
            raise CacheError(
                f"a copy of {manifest.url} takes {readable_size(manifest.nbytes)}, and all copies in "
                f"{copies_directory()} may take {readable_size(allowed)}, of which copies that are in use "
                f"take {readable_size(in_use)}: allow more with the environment variable {BYTES_VARIABLE}, "
                f"free space on that disk, or name a directory on another disk with {DIRECTORY_VARIABLE}"
            )
        for copy in chosen:
            log.info("cache: removes the copy %s of %s", copy.path, readable_size(copy.nbytes))
            with _writing(copy.path):
                _remove(copy)


def _locked(copy: Copy, locks: contextlib.ExitStack) -> bool:
    """Take all locks of a copy, unless a process has it open, downloads it or removes it."""
    with contextlib.ExitStack() as taken:
        try:
            if not taken.enter_context(held(f"{copy.path}.lock")):
                return False
            for name in os.listdir(copy.directory):
                fd = os.open(os.path.join(copy.directory, name), os.O_RDONLY | os.O_CLOEXEC)
                taken.callback(os.close, fd)
                if not try_lock(fd):
                    return False
        except OSError:  # it was removed just now, or belongs to another user
            return False
        locks.push(taken.pop_all())
    return True


def _remove(copy: Copy) -> None:
    """Remove the files of a copy, the manifest first: without it the copy is not complete."""
    for name in sorted(os.listdir(copy.directory), key=lambda name: name != MANIFEST_NAME):
        os.unlink(os.path.join(copy.directory, name))
    os.rmdir(copy.directory)
