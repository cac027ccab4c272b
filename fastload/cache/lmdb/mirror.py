"""Local mirrors of caches in object stores: downloaded once per host, checked, limited in size.

A mirror is the directory `copies-UID/DIGEST-BUILD_ID` below `FASTLOAD_CACHE_DIR`: the digest of the URL, and
the id of the build. It holds the shards and the manifest, and is a cache on disk like any other. Rules:

1. A mirror gets its name when all its shards are complete, checked and on the disk. Until then its files are
   in a directory whose name ends in `.partial`. A shard in it gets its final name once it was checked, so an
   interrupted download continues with the next shard.
2. One process downloads a mirror: it holds the lock on `NAME.lock`, which is the lock of builds and removals
   too. Other processes wait.
3. The manifest is read on every opening, so a cache that was rebuilt at the URL gets a new mirror. If the
   store cannot be reached and there is a complete mirror of the URL, it is opened with a warning. If the
   store answers that there is no cache, or denies access, this is always an error.
4. Each open file of a mirror holds a shared lock (see `files`). Mirrors are removed only under the exclusive
   lock of their first file, least recently used first. They lose their name at once.
5. One lock guards the quota. A mirror counts with its full size as soon as its download begins.
6. Several users can share `FASTLOAD_CACHE_DIR`. What another user can have written is neither read nor
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
from fastload.cache.lmdb.files import MANIFEST_NAME, PARTIAL_SUFFIX, open_files
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
from fastload.system.locks import flocked, lock_file
from fastload.system.logs import log
from fastload.system.os_errors import write_errors_as

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from fastload.cache.lmdb.files import OpenFile
    from fastload.cache.lmdb.manifest import ShardFile
    from fastload.files.remote import RemoteFolder

DIRECTORY_VARIABLE = "FASTLOAD_CACHE_DIR"
BYTES_VARIABLE = "FASTLOAD_CACHE_BYTES"

_AT_ONCE = 8  # shards
_PART_BYTES = 16 << 20  # of a shard, that one request reads
_QUOTA_LOCK = "quota.lock"
_NAME = re.compile(rf"[0-9a-f]{{16}}-[0-9a-f]{{1,32}}({re.escape(PARTIAL_SUFFIX)})?")


def own_directory(name: str) -> str:
    """This user's directory of this name below `FASTLOAD_CACHE_DIR`, which several users can share."""
    root = os.path.expanduser(os.environ.get(DIRECTORY_VARIABLE) or "~/.cache/fastload")
    user = f"-{os.getuid()}" if hasattr(os, "getuid") else ""
    return os.path.abspath(os.path.join(root, name + user))


def mirrors_directory() -> str:
    """The directory of mirrors."""
    return own_directory("copies")


def digest_of_url(url: str) -> str:
    """A short name for a URL."""
    return hashlib.blake2b(url.rstrip("/").encode(errors="surrogateescape"), digest_size=8).hexdigest()


def open_mirror(
    url: str, storage_options: Mapping[str, Any] | None = None, *, progress: bool = True
) -> tuple[str, tuple[OpenFile, ...]]:
    """The path and the open files of the mirror of a cache, downloaded if missing.

    Args:
        url: The URL of the cache.
        storage_options: Arguments for fsspec's file system, such as credentials.
        progress: Show a bar if standard error is a terminal; progress is logged otherwise.

    Raises:
        FileNotFoundError: There is no finished cache at the URL.
        CacheCorruptError: The manifest or a shard is damaged, or a shard is missing.
        CacheMismatchError: The cache has a different format.
        CacheError: The store cannot be read, the mirror cannot be written, or it exceeds the quota of all
            mirrors.
        ImportError: A package for the URL is missing.
        ValueError: The URL has an unknown protocol, or `FASTLOAD_CACHE_BYTES` is not a size.
    """
    files = remote_files(url, storage_options)
    root = mirrors_directory()
    with _writing(root):
        make_private_directory(root)
    try:
        manifest = read_manifest(files)
    except CacheError as error:
        cause, newest = error.__cause__, _newest_manifest(files.url)
        if newest is None or not isinstance(cause, RemoteFolderError) or not is_transient(cause):
            raise
        manifest = newest
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
            opened = open_files(path)
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


def _newest_manifest(url: str) -> Manifest | None:
    """The manifest of the complete mirror of a URL whose build is the newest."""
    manifests = [
        mirror.manifest
        for mirror in mirrors()
        if mirror.manifest is not None
        and mirror.manifest.url == url
        and _is_complete(mirror.path, mirror.manifest)
    ]
    return max(manifests, key=lambda manifest: manifest.plan.created_s, default=None)


def manifest_in(directory: str) -> Manifest | None:
    """The manifest of a mirror, complete or not; None if there is no valid one."""
    try:
        return parse_manifest(Path(directory, MANIFEST_NAME).read_bytes())
    except (OSError, ValueError):  # CacheMismatchError is a ValueError
        return None


def _is_complete(path: str, manifest: Manifest) -> bool:
    """Whether all files of a mirror exist, with the lengths and digests of this manifest."""
    try:
        if untrusted_path(path) is not None:
            return False
    except OSError:
        return False
    actual = manifest_in(path)
    return actual is not None and actual.shards == manifest.shards and not _missing(path, manifest)


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
    """Download a mirror, or wait while another process downloads it; returns when it is complete."""
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
    """Download the missing shards; the caller holds the lock of the mirror."""
    for directory in (path, path + PARTIAL_SUFFIX):
        if os.path.lexists(directory) and (untrusted := untrusted_path(directory)) is not None:
            log.warning(
                "%s could be from a different user (who owns it or can write it, or it is a link): the "
                "copy is downloaded again",
                untrusted,
            )
            os.unlink(directory) if os.path.islink(directory) else shutil.rmtree(directory)
    partial = _unnamed(path)
    earlier = manifest_in(partial)
    if earlier is None or earlier.shards != manifest.shards:
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
            list(threads.map(lambda shard: _fetch(files, partial, is_stopped, progress, *shard), missing))
        finally:
            is_stopped.set()
    sync_directory(partial)
    os.rename(partial, path)
    sync_directory(os.path.dirname(path))


def _unnamed(path: str) -> str:
    """Rename a mirror away, at once for processes that open it; returns the directory of its files."""
    partial = path + PARTIAL_SUFFIX
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


# --- the quota -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalMirror:
    """A mirror, or an unfinished download.

    Attributes:
        path: Its directory, without the suffix of an unfinished download.
        manifest: Its manifest; None if there is no valid one.
        nbytes: The bytes that count; for an unfinished download, its final size.
        disk_bytes: The bytes of its files.
        used_s: When it was last opened, in seconds since 1970.
        is_finished: Whether it has its name.
    """

    path: str
    manifest: Manifest | None
    nbytes: int
    disk_bytes: int
    used_s: float
    is_finished: bool


def mirrors() -> list[LocalMirror]:
    """All mirrors and unfinished downloads of this user, least recently used first."""
    root = mirrors_directory()
    listed = []
    with contextlib.suppress(FileNotFoundError):
        for name in filter(_NAME.fullmatch, os.listdir(root)):
            directory = os.path.join(root, name)
            manifest, disk_bytes = manifest_in(directory), sum(_sizes(directory).values())
            nbytes = disk_bytes if manifest is None else max(disk_bytes, manifest.nbytes)
            with contextlib.suppress(FileNotFoundError):  # another process has just removed or renamed it
                used_s = os.path.getmtime(directory)
                path = directory.removesuffix(PARTIAL_SUFFIX)
                listed.append(LocalMirror(path, manifest, nbytes, disk_bytes, used_s, path == directory))
    return sorted(listed, key=lambda mirror: mirror.used_s)


def quota_bytes(disk_bytes: int) -> int:
    """The maximum size of all mirrors.

    Args:
        disk_bytes: Bytes of the files of all mirrors, which count as free.

    Raises:
        ValueError: `FASTLOAD_CACHE_BYTES` is not a size.
    """
    text = os.environ.get(BYTES_VARIABLE, "").strip() or "auto"
    available = shutil.disk_usage(mirrors_directory()).free + disk_bytes
    try:
        return parse_memory(int(text) if text.isdecimal() else text, available=available)
    except ValueError:
        raise ValueError(
            f"{BYTES_VARIABLE}={text!r} is not a size above zero: set bytes, or a size such as 200GB or "
            "500GiB"
        ) from None


def _reserve(manifest: Manifest, path: str) -> None:
    """Make room for a mirror, and count its bytes from now on.

    Unused mirrors are removed until the new one fits; none is removed if it cannot fit.

    Raises:
        CacheError: Mirrors in use leave too little room.
    """
    root = os.path.dirname(path)
    with lock_file(os.path.join(root, _QUOTA_LOCK), waits=True), contextlib.ExitStack() as locks:
        listed = mirrors()
        quota = quota_bytes(sum(mirror.disk_bytes for mirror in listed))
        others = [mirror for mirror in listed if mirror.path != path]
        taken_bytes = sum(mirror.nbytes for mirror in others)
        unused = []
        for mirror in others if manifest.nbytes <= quota else []:
            if taken_bytes + manifest.nbytes > quota and _locked(mirror, locks):
                unused.append(mirror)
                taken_bytes -= mirror.nbytes
        if taken_bytes + manifest.nbytes > quota:
            raise CacheError(
                f"a copy of {manifest.url} takes {readable_size(manifest.nbytes)}, and all copies in {root} "
                f"can take {readable_size(quota)}, of which copies in use take {readable_size(taken_bytes)}: "
                f"allow more with the environment variable {BYTES_VARIABLE}, free space on that disk, or "
                f"name a directory on a different disk with {DIRECTORY_VARIABLE}"
            )
        for mirror in unused:
            log.info("cache: removes the copy %s of %s", mirror.path, readable_size(mirror.nbytes))
            shutil.rmtree(_unnamed(mirror.path))
        partial = path + PARTIAL_SUFFIX
        make_private_directory(partial)
        write_new(os.path.join(partial, MANIFEST_NAME), manifest_text(manifest))


def remove_mirrors(before_s: float) -> list[LocalMirror]:
    """Remove the mirrors and interrupted downloads that are not in use; returns those that were removed.

    Args:
        before_s: Keep what was opened later, in seconds since 1970.
    """
    root, removed = mirrors_directory(), []
    if not os.path.isdir(root):
        return []
    with lock_file(os.path.join(root, _QUOTA_LOCK), waits=True), contextlib.ExitStack() as locks:
        for mirror in mirrors():
            if mirror.used_s <= before_s and _locked(mirror, locks):
                shutil.rmtree(_unnamed(mirror.path))
                removed.append(mirror)
    return removed


def _locked(mirror: LocalMirror, locks: contextlib.ExitStack) -> bool:
    """Take the locks of a mirror, unless a process has it open, downloads it or removes it."""
    try:
        is_free = locks.enter_context(lock_file(f"{mirror.path}.lock"))
        if is_free and mirror.is_finished and mirror.manifest is not None:
            first = os.path.join(mirror.path, mirror.manifest.shards[0].name)
            # Not by close() alone: a mirror that stays must not be locked by a fork in another thread.
            is_free = locks.enter_context(flocked(lambda: os.open(first, os.O_RDONLY | os.O_CLOEXEC)))
    except OSError:  # it was just removed, or belongs to another user
        return False
    return is_free
