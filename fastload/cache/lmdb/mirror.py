"""Local copies of caches in object stores: downloaded once per host, checked, limited in size.

A copy is the directory `copies-UID/DIGEST-BUILD_ID` below `FASTLOAD_CACHE_DIR`: the digest of the URL, and
the id of the build. It holds the shards and the manifest, and is a cache on disk like any other. Rules:

1. A copy gets its name when all its shards are complete, checked and on the disk. Until then its files are in
   a directory whose name ends in `.partial`. A shard in it gets its final name once it was checked, so an
   interrupted download continues with the next shard.
2. One process downloads a copy: it holds the lock on `NAME.lock`, which is the lock of builds and removals
   too. Other processes wait.
3. The manifest is read on every opening, so a cache that was rebuilt at the URL gets a new copy. If the store
   cannot be reached and there is a complete copy of the URL, it is opened with a warning. A store that
   answers that there is no cache, or that denies access, is always an error.
4. Each open file of a copy holds a shared lock (see `files`). Copies are removed only under the exclusive
   lock of their first file, least recently used first. They lose their name at once.
5. One lock guards decisions about room. A copy counts with its full size as soon as its download begins.
6. Several users can share `FASTLOAD_CACHE_DIR`. What a different user can have written is neither read nor
   continued: files that are not this user's or root's, that others can write, and links. Open files are
   checked again, because whoever can write in that directory can exchange the directories in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastload.cache.format.progress import BuildProgress
from fastload.cache.lmdb.files import MANIFEST_NAME, open_cache
from fastload.cache.lmdb.manifest import (
    Manifest,
    manifest_text,
    new_digest,
    parse_manifest,
    read_manifest,
    remote_files,
)
from fastload.errors import CacheCorruptError, CacheError, RemoteFolderError
from fastload.files.retry import OtherLengthError, is_transient
from fastload.system.budget import parse_memory
from fastload.system.disk import make_private_directory, new_file, sync_directory, untrusted_path, write_new
from fastload.system.humanize import readable_size
from fastload.system.locks import flock_fd, lock_file
from fastload.system.logs import log
from fastload.system.os_errors import write_errors_as

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from fastload.cache.lmdb.manifest import ShardFile
    from fastload.cache.lmdb.open_file import OpenFile
    from fastload.files.remote import RemoteFolder

DIRECTORY_VARIABLE = "FASTLOAD_CACHE_DIR"
BYTES_VARIABLE = "FASTLOAD_CACHE_BYTES"

_AT_ONCE = 8  # shards
_PART_BYTES = 16 << 20  # of a shard, that one request reads
_PARTIAL = ".partial"
_NAME = re.compile(rf"[0-9a-f]{{16}}-[0-9a-f]{{1,32}}({re.escape(_PARTIAL)})?")


def own_directory(name: str) -> str:
    """This user's directory of this name below `FASTLOAD_CACHE_DIR`, which several users can share."""
    root = os.path.expanduser(os.environ.get(DIRECTORY_VARIABLE) or "~/.cache/fastload")
    user = f"-{os.getuid()}" if hasattr(os, "getuid") else ""
    return os.path.abspath(os.path.join(root, name + user))


def copies_directory() -> str:
    """The directory of copies."""
    return own_directory("copies")


def digest_of_url(url: str) -> str:
    """A short name for a URL."""
    return hashlib.blake2b(url.rstrip("/").encode(errors="surrogateescape"), digest_size=8).hexdigest()


def open_copy(
    url: str, storage_options: Mapping[str, Any] | None = None, *, progress: bool = True
) -> tuple[str, tuple[OpenFile, ...]]:
    """The path and the open files of the local copy of a cache, downloaded if missing.

    Args:
        url: The URL of the cache.
        storage_options: Arguments for fsspec's file system, such as credentials.
        progress: Show a bar if standard error is a terminal; progress is logged otherwise.

    Raises:
        FileNotFoundError: There is no finished cache at the URL.
        CacheCorruptError: The manifest or a shard is damaged, or a shard is missing.
        CacheMismatchError: The cache has a different format.
        CacheError: The store cannot be read, the copy cannot be written, or it exceeds the limit of all
            copies.
        ImportError: A package for the URL is missing.
        ValueError: The URL has an unknown protocol, or `FASTLOAD_CACHE_BYTES` is not a size.
    """
    files = remote_files(url, storage_options)
    root = copies_directory()
    with _writing(root):
        make_private_directory(root)
    try:
        manifest = read_manifest(files)
    except CacheError as error:
        cause = error.__cause__
        found = _newest_copy(files.url)
        if found is None or not isinstance(cause, RemoteFolderError) or not is_transient(cause):
            raise
        manifest = found
        log.warning(
            "%s. Using the local copy of the cache, whose build began on %s: if the cache was rebuilt "
            "since it was downloaded, this process does not notice",
            str(error),  # not the error: a handler that keeps records would keep its frames
            time.strftime("%Y-%m-%d %H:%M", time.localtime(manifest.plan.created_s)),
        )
    path = os.path.join(root, f"{digest_of_url(manifest.url)}-{manifest.plan.build_id}")
    while True:
        with _writing(path):
            _make(files, manifest, path, progress)
        try:
            opened = open_cache(path)
        except FileNotFoundError:
            continue  # another process has just removed it
        # Else it was removed before its files were locked.
        if _is_complete(path, manifest) and all(file.is_own() for file in opened):
            with contextlib.suppress(OSError):
                os.utime(path)  # its last use
            return path, opened


def _writing(path: str) -> AbstractContextManager[None]:
    """Raise errors of this machine's disk as a CacheError that says what to change."""
    advice = f". The environment variable {DIRECTORY_VARIABLE} names a different directory for copies"
    return write_errors_as(CacheError, "the copy", path, advice=advice)


def _newest_copy(url: str) -> Manifest | None:
    """The manifest of the complete copy of a URL whose build is the newest."""
    found = [
        copy.manifest
        for copy in copies()
        if copy.manifest is not None and copy.manifest.url == url and _is_complete(copy.path, copy.manifest)
    ]
    return max(found, key=lambda manifest: manifest.plan.created_s, default=None)


def manifest_of_copy(path: str) -> Manifest | None:
    """The manifest of a copy, complete or not; None if there is no valid one."""
    try:
        return parse_manifest(Path(path, MANIFEST_NAME).read_bytes())
    except (OSError, ValueError):  # CacheMismatchError is a ValueError
        return None


def _is_complete(path: str, manifest: Manifest) -> bool:
    """Whether all files of a copy exist, with the lengths and digests of this manifest."""
    try:
        if untrusted_path(path) is not None:
            return False
    except OSError:
        return False
    found = manifest_of_copy(path)
    return found is not None and found.shards == manifest.shards and not _missing(path, manifest)


def _missing(directory: str, manifest: Manifest) -> list[tuple[ShardFile, int]]:
    """The shards that are not in a directory, each with its number of samples."""
    sizes = _sizes(directory)
    return [
        (shard, len(manifest.plan.indices_of(number)))
        for number, shard in enumerate(manifest.shards)
        if sizes.get(shard.name) != shard.nbytes
    ]


def _sizes(directory: str) -> dict[str, int]:
    """The sizes of the files in a directory; none if it does not exist."""
    try:
        return {file.name: file.stat().st_size for file in Path(directory).iterdir()}
    except (FileNotFoundError, NotADirectoryError):  # another process is removing or renaming it
        return {}


# --- downloading -----------------------------------------------------------------------------------------


def _make(files: RemoteFolder, manifest: Manifest, path: str, shown: bool) -> None:
    """Download a copy, or wait while another process downloads it; returns when it is complete."""
    if _is_complete(path, manifest):
        return
    with lock_file(f"{path}.lock") as is_free:
        pass
    if not is_free:
        log.info("cache: waiting: another process downloads %s to %s", manifest.url, path)
    with lock_file(f"{path}.lock", waits=True):
        if not _is_complete(path, manifest):
            _download(files, manifest, path, shown)


def _download(files: RemoteFolder, manifest: Manifest, path: str, shown: bool) -> None:
    """Download the missing shards; the caller holds the lock of the copy."""
    for place in (path, path + _PARTIAL):
        if os.path.lexists(place) and (untrusted := untrusted_path(place)) is not None:
            log.warning(
                "%s could be from a different user (who owns it or can write it, or it is a link): the "
                "copy is downloaded again",
                untrusted,
            )
            os.unlink(place) if os.path.islink(place) else shutil.rmtree(place)
    partial = _unnamed(path)
    found = manifest_of_copy(partial)
    if found is None or found.shards != manifest.shards:
        shutil.rmtree(partial, ignore_errors=True)
    _reserve(manifest, path)
    missing = _missing(partial, manifest)
    done = manifest.plan.num_samples - sum(num_samples for _, num_samples in missing)
    title, is_stopped = f"downloading {manifest.url}", threading.Event()
    with (
        BuildProgress(title, manifest.plan.num_samples, shown=shown, done=done) as progress,
        ThreadPoolExecutor(_AT_ONCE, "fastload-download") as threads,
    ):
        try:
            list(threads.map(lambda one: _fetch(files, partial, is_stopped, progress, *one), missing))
        finally:
            is_stopped.set()
    sync_directory(partial)
    os.rename(partial, path)
    sync_directory(os.path.dirname(path))


def _unnamed(path: str) -> str:
    """Rename a copy away, at once for processes that open it; returns the directory of its files."""
    partial = path + _PARTIAL
    if os.path.lexists(path):
        shutil.rmtree(partial, ignore_errors=True)
        os.rename(path, partial)
    return partial


def _fetch(
    files: RemoteFolder,
    directory: str,
    is_stopped: threading.Event,
    progress: BuildProgress,
    shard: ShardFile,
    num_samples: int,
) -> None:
    """Download a shard, check it, and give it its final name."""
    path, digest = os.path.join(directory, shard.name), new_digest()
    with new_file(f"{path}.part") as file:
        for start in range(0, shard.nbytes, _PART_BYTES):
            if is_stopped.is_set():
                return
            try:
                data = files.load(shard.name, start, min(start + _PART_BYTES, shard.nbytes))
            except OSError as error:
                is_damaged = isinstance(error.__cause__, FileNotFoundError | OtherLengthError)
                kind = CacheCorruptError if is_damaged else CacheError
                raise kind(f"{error}. {_open_again(directory)}") from error
            file.write(data)
            digest.update(data)
            progress.advance(len(data), 0)
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != shard.blake2b:
        os.unlink(f"{path}.part")
        raise CacheCorruptError(
            f"{files.url}/{shard.name} is damaged: its digest is {digest.hexdigest():.16}..., and the "
            f"manifest says {shard.blake2b:.16}.... {_open_again(directory)}"
        )
    os.rename(f"{path}.part", path)
    progress.advance(0, num_samples)


def _open_again(directory: str) -> str:
    return (
        f"The downloaded shards are kept in {directory}: open the cache again to continue. If the error "
        "persists, remove all files at that URL, and build the cache again"
    )


# --- room ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Copy:
    """A copy, or an unfinished download.

    Attributes:
        path: Its directory, without the suffix of an unfinished download.
        manifest: Its manifest; None if there is no valid one.
        nbytes: The bytes that count; for an unfinished download, its final size.
        on_disk: The bytes of its files.
        used_s: When it was last opened, in seconds since 1970.
        is_finished: Whether it has its name.
    """

    path: str
    manifest: Manifest | None
    nbytes: int
    on_disk: int
    used_s: float
    is_finished: bool


def copies() -> list[Copy]:
    """All copies and unfinished downloads of this user, least recently used first."""
    root = copies_directory()
    found = []
    with contextlib.suppress(FileNotFoundError):
        for name in filter(_NAME.fullmatch, os.listdir(root)):
            directory = os.path.join(root, name)
            manifest, on_disk = manifest_of_copy(directory), sum(_sizes(directory).values())
            nbytes = on_disk if manifest is None else max(on_disk, manifest.nbytes)
            with contextlib.suppress(FileNotFoundError):  # another process has just removed or renamed it
                used_s = os.path.getmtime(directory)
                path = directory.removesuffix(_PARTIAL)
                found.append(Copy(path, manifest, nbytes, on_disk, used_s, path == directory))
    return sorted(found, key=lambda copy: copy.used_s)


def allowed_bytes(taken: int) -> int:
    """The maximum size of all copies in bytes.

    Args:
        taken: Bytes of the files of all copies.

    Raises:
        ValueError: `FASTLOAD_CACHE_BYTES` is not a size.
    """
    text = os.environ.get(BYTES_VARIABLE, "").strip() or "auto"
    available = shutil.disk_usage(copies_directory()).free + taken
    try:
        return parse_memory(int(text) if text.isdecimal() else text, available=available)
    except ValueError:
        raise ValueError(
            f"{BYTES_VARIABLE}={text!r} is not a size above zero: set bytes, or a size such as 200GB or "
            "500GiB"
        ) from None


def _reserve(manifest: Manifest, path: str) -> None:
    """Make room for a copy, and count its bytes from now on.

    Unused copies are removed until the new copy fits; none is removed if it cannot fit.

    Raises:
        CacheError: Copies in use leave too little room.
    """
    root = os.path.dirname(path)
    with lock_file(os.path.join(root, "room.lock"), waits=True), contextlib.ExitStack() as locks:
        found = copies()
        allowed = allowed_bytes(sum(copy.on_disk for copy in found))
        others = [copy for copy in found if copy.path != path]
        in_use = sum(copy.nbytes for copy in others)
        chosen = []
        for copy in others if manifest.nbytes <= allowed else []:
            if in_use + manifest.nbytes > allowed and _locked(copy, locks):
                chosen.append(copy)
                in_use -= copy.nbytes
        if in_use + manifest.nbytes > allowed:
            raise CacheError(
                f"a copy of {manifest.url} takes {readable_size(manifest.nbytes)}, and all copies in {root} "
                f"can take {readable_size(allowed)}, of which copies in use take {readable_size(in_use)}: "
                f"allow more with the environment variable {BYTES_VARIABLE}, free space on that disk, or "
                f"name a directory on a different disk with {DIRECTORY_VARIABLE}"
            )
        for copy in chosen:
            log.info("cache: removes the copy %s of %s", copy.path, readable_size(copy.nbytes))
            shutil.rmtree(_unnamed(copy.path))
        partial = path + _PARTIAL
        make_private_directory(partial)
        write_new(os.path.join(partial, MANIFEST_NAME), manifest_text(manifest))


def remove_copies(before_s: float) -> list[Copy]:
    """Remove the copies and interrupted downloads that are not in use; returns those that were removed.

    Args:
        before_s: Keep what was opened later, in seconds since 1970.
    """
    root, removed = copies_directory(), []
    if not os.path.isdir(root):
        return []
    with lock_file(os.path.join(root, "room.lock"), waits=True), contextlib.ExitStack() as locks:
        for copy in copies():
            if copy.used_s <= before_s and _locked(copy, locks):
                shutil.rmtree(_unnamed(copy.path))
                removed.append(copy)
    return removed


def _locked(copy: Copy, locks: contextlib.ExitStack) -> bool:
    """Take the locks of a copy, unless a process has it open, downloads it or removes it."""
    try:
        is_free = locks.enter_context(lock_file(f"{copy.path}.lock"))
        if is_free and copy.is_finished and copy.manifest is not None:
            first = os.path.join(copy.path, copy.manifest.shards[0].name)
            fd = os.open(first, os.O_RDONLY | os.O_CLOEXEC)
            locks.callback(os.close, fd)
            is_free = flock_fd(fd)
    except OSError:  # it was just removed, or belongs to a different user
        return False
    return is_free
