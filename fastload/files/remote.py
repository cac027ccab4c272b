"""RemoteFolder: a folder that fsspec reads, such as `s3://bucket/train`.

fsspec and the package of the protocol are imported when the first file is read or listed. Rules:

1. Each process makes its own file system, because those of fsspec must not be used after a fork. The object
   pickles as its URL and its options.
2. An error that may pass (a connection, a time-out, a busy server, a body that was cut short) is tried again
   with growing pauses. An error that cannot pass (no such file, no permission) is raised at once.
3. A body of another length than the list of files says is never returned.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from fastload.errors import ImageReadError, RemoteFolderError
from fastload.files.listing import SAVED_NAME, UNKNOWN_BYTES, RemoteFile, from_bytes, to_bytes
from fastload.system.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

# The most files that one process reads at the same time.
READS_AT_ONCE = 64

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")
_LOCAL_PREFIX = "file://"
_ATTEMPTS = 6
_FIRST_PAUSE_S = 0.1  # doubled after each attempt; six attempts take three seconds of pauses
_SLOW_S, _WARN_EVERY_S = 4.0, 30.0
# Errors that another attempt would meet again.
PERMANENT = (
    *(FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError),
    *(NotImplementedError, TypeError, ValueError, ImportError, AttributeError, MemoryError),
)
# Fields in which file systems of fsspec state the version of a file, the best first.
_VERSION_FIELDS = (
    *("ETag", "etag", "e_tag", "blob_id", "md5Hash", "content_md5", "generation"),
    *("mtime", "LastModified", "last_modified", "updated", "created"),
)


def is_url(path: str) -> bool:
    """Whether a path names a folder that fsspec reads: `s3://...`, or chained protocols: `zip::...`."""
    return _URL.match(path) is not None and not path.startswith(_LOCAL_PREFIX)


def local_path(path: str) -> str:
    """The path without `file://`."""
    return path.removeprefix(_LOCAL_PREFIX)


class RemoteFolder:
    """A folder in an object store, or on a server.

    Args:
        url: Any URL of fsspec.
        storage_options: Arguments for fsspec's file system, such as credentials.
        filesystem: A file system with fsspec's interface; None for the one that fsspec has for the URL.
        has_large_files: Whether files are larger than a few megabytes, so that a client should move parts of
            one file at the same time.

    Attributes:
        url: The URL without a slash at its end.
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any] | None = None,
        filesystem: Any | None = None,
        *,
        has_large_files: bool = False,
    ) -> None:
        self.url = url.rstrip("/")
        self._options = dict(storage_options or {})
        self._has_large_files = has_large_files
        self._maker: tuple[Any, ...] | None = None  # of the user's file system: class, arguments
        if filesystem is not None:
            self._maker = type(filesystem), filesystem.storage_args, filesystem.storage_options
        self._opened: _Opened | None = None
        self._home_pid = os.getpid()  # a forked process is another one

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.url, self._options, self._maker, self._has_large_files)

    def path(self, name: str) -> str:
        """The URL of a file, for people."""
        return f"{self.url}/{name}"

    def list_files(self) -> tuple[list[str], list[RemoteFile]]:
        """The folders directly below this folder, and all files at any depth below them.

        Raises:
            FileNotFoundError: There is no such folder.
            RemoteFolderError: It cannot be listed.
            ImportError: A package is missing.
        """
        fs, root = self._make(for_listing=True)
        top = retried(lambda: fs.ls(root, detail=True), self._list_failed)
        prefix = root.rstrip("/") + "/"
        names = [_below(entry["name"], prefix) for entry in top if entry["type"] == "directory"]
        classes = sorted({name for name in names if name})

        def find(name: str) -> list[RemoteFile]:
            found = retried(lambda: fs.find(prefix + name, detail=True), self._list_failed)
            return [_file(_below(path, prefix), entry) for path, entry in found.items()]

        with ThreadPoolExecutor(READS_AT_ONCE, "fastload-listing") as threads:
            return classes, [file for files in threads.map(find, classes) for file in files]

    def _list_failed(self, error: Exception, tried: str) -> Exception:
        if isinstance(error, FileNotFoundError):
            return FileNotFoundError(f"there is no folder at {self.url}")
        return RemoteFolderError(f"cannot list {self.url}: {reason_of(error)}{tried}")

    def saved_list(self) -> tuple[float, list[str], list[RemoteFile]] | None:
        """The list that `save_list` wrote: when it was made, the folders, the files; None if there is none.

        Raises:
            RemoteFolderError: The list is there, and cannot be read.
        """
        opened = self._open()
        fs, path = opened.fs, f"{opened.root}/{SAVED_NAME}"
        try:
            data = retried(lambda: fs.cat_file(path), self._saved_failed)
        except FileNotFoundError:
            return None
        try:
            return from_bytes(data)
        except ValueError as error:
            raise RemoteFolderError(
                f"cannot use the list of files {self.path(SAVED_NAME)}: {error}. Pass listing='save' to "
                "replace it, or listing='ignore'"
            ) from error

    def _saved_failed(self, error: Exception, tried: str) -> Exception:
        if isinstance(error, FileNotFoundError):
            return error
        return RemoteFolderError(
            f"cannot read the list of files {self.path(SAVED_NAME)}: {reason_of(error)}{tried}. Pass "
            "listing='ignore' to list the folder instead"
        )

    def save_list(self, classes: list[str], files: list[RemoteFile]) -> None:
        """Write the list of files into the folder.

        Raises:
            RemoteFolderError: It cannot be written.
        """
        opened = self._open()
        fs, path = opened.fs, f"{opened.root}/{SAVED_NAME}"
        data = to_bytes(classes, files)

        def failed(error: Exception, tried: str) -> Exception:
            return RemoteFolderError(
                f"cannot write the list of files {self.path(SAVED_NAME)}: {reason_of(error)}{tried}"
            )

        retried(lambda: fs.pipe_file(path, data), failed)

    def read(self, name: str, nbytes: int) -> bytes:
        """The content of a file.

        Args:
            name: Its path below the folder.
            nbytes: Its length in the list of files, or `UNKNOWN_BYTES`.

        Raises:
            ImageReadError: The file cannot be read, or has another length.
        """
        opened = self._open()
        path = f"{opened.root}/{name}"

        def attempt() -> bytes:
            data = opened.read(path)
            if nbytes not in (UNKNOWN_BYTES, len(data)):
                raise OtherLengthError(
                    f"{len(data):,} bytes arrived, but the file had {nbytes:,} when the folder was listed"
                )
            return data

        def failed(error: Exception, tried: str) -> Exception:
            was_there = (
                "; it was there when the folder was listed" if isinstance(error, FileNotFoundError) else ""
            )
            return ImageReadError(self.path(name), f"{reason_of(error)}{was_there}{tried}")

        return retried(attempt, failed)

    def file_system(self) -> tuple[Any, str]:
        """The file system of this process, and the folder's path in it; made at the first use.

        Raises:
            ImportError: A package is missing.
            ValueError: There is no such protocol.
        """
        opened = self._open()
        return opened.fs, opened.root

    def _open(self) -> _Opened:
        opened = self._opened
        if opened is None or opened.pid != os.getpid():
            with _locks.setdefault(os.getpid(), threading.Lock()):
                opened = self._opened
                if opened is None or opened.pid != os.getpid():
                    self._opened = opened = _Opened(*self._make())
        return opened

    def _make(self, *, for_listing: bool = False) -> tuple[Any, str]:
        """A new file system, and the folder's path in it."""
        if self._maker is not None:
            kind, args, options = self._maker
            if os.getpid() != self._home_pid and kind.__module__.partition(".")[0] == "obstore":
                raise RuntimeError(
                    f"{self.url} is read through obstore, whose threads do not survive a fork: reading would "
                    'wait for ever. Start workers with multiprocessing_context="forkserver" or "spawn"'
                )
            return _made(kind, args, options, self.url)
        # Other file systems keep the entries of all folders that they list in memory.
        unkept = {"use_listings_cache": False} if for_listing else {}
        return _open_url(self.url, {**self._options, **unkept}, has_large_files=self._has_large_files)


class _Opened:
    """A file system of this process, and the folder's path in it.

    Until one read has succeeded, only one thread reads: the first request makes the client, and s3fs would
    make one of 14 MB for each thread that sends a request before there is one.
    """

    def __init__(self, fs: Any, root: str) -> None:
        self.pid = os.getpid()
        self.fs = fs
        self.root = root.rstrip("/")
        self._connecting = threading.Lock()
        self._is_connected = False

    def read(self, path: str) -> bytes:
        """The content of a file."""
        if not self._is_connected:
            with self._connecting:
                if not self._is_connected:
                    content: bytes = self.fs.cat_file(path)
                    self._is_connected = True
                    return content
        return bytes(self.fs.cat_file(path))  # a copy only if it is not bytes


class OtherLengthError(OSError):
    """A body was cut short, or the file was replaced after the folder was listed."""


def _unpickled(
    url: str, options: dict[str, Any], maker: tuple[Any, ...] | None, has_large_files: bool
) -> RemoteFolder:
    folder = RemoteFolder(url, options, has_large_files=has_large_files)
    folder._maker = maker
    return folder


def _open_url(url: str, options: Mapping[str, Any], *, has_large_files: bool) -> tuple[Any, str]:
    try:
        import fsspec.core
    except ImportError as error:
        raise ImportError(
            f"{url} is not on this machine, and remote files need the package fsspec: pip install "
            '"fastload-torch[remote]"'
        ) from error
    _forget_thread_of_parent()
    protocol = _URL.match(url)
    name = "" if protocol is None else protocol.group().rstrip(":/")
    if name in ("s3", "s3a"):
        options = _for_s3fs(options, has_large_files=has_large_files)
    try:
        # Without fsspec's table of instances, connections are closed once the folder is not used any more.
        fs, root = fsspec.core.url_to_fs(url, **{**options, "skip_instance_cache": True})
    except ImportError as error:
        raise ImportError(f"{url} needs a package that is not installed: {error}") from error
    except ValueError as error:
        raise ValueError(f"cannot open {url}: {error}") from error
    return fs, root


def _forget_thread_of_parent() -> None:
    """Let fsspec start its thread anew in a forked process.

    Older releases do not notice the fork: each read would wait for the parent's thread, for ever.
    """
    from fsspec import asyn

    thread = asyn.iothread[0]
    if thread is not None and not thread.is_alive():
        asyn.reset_lock()


def _made(kind: Any, args: Any, options: Mapping[str, Any], url: str) -> tuple[Any, str]:
    _forget_thread_of_parent()
    fs = kind(*args, **options, skip_instance_cache=True)
    root = str(fs._strip_protocol(url))
    if root == url and not url.startswith("http"):
        root = url.partition("://")[2]  # obstore's keeps the protocol, and returns names without it
    return fs, root


def _for_s3fs(options: Mapping[str, Any], *, has_large_files: bool) -> dict[str, Any]:
    """Options of s3fs for many requests at the same time; those that the user gave stay.

    By default it has ten connections. It moves parts of a file at the same time, and for this it asks for the
    size of each file before it reads the file, which is one request too many for each small file.
    """
    config = {"max_pool_connections": READS_AT_ONCE, **(options.get("config_kwargs") or {})}
    of_files = {} if has_large_files else {"max_concurrency": 1}
    return {**of_files, **options, "config_kwargs": config}


def retried(attempt: Callable[[], T], failed: Callable[[Exception, str], Exception]) -> T:
    """The result of the first attempt that succeeds.

    Failed attempts are logged; as a warning if they have taken several seconds, because a client that has
    retries of its own may take a minute to find that the endpoint is wrong.

    Args:
        attempt: What to try.
        failed: Makes the error to raise from the last error and a clause about the attempts.
    """
    started_s = _now_s()
    number = 0
    while True:
        number += 1
        try:
            return attempt()
        except PERMANENT as error:
            raise failed(error, "") from error
        except Exception as error:
            took_s = _now_s() - started_s
            if number == _ATTEMPTS:
                raise failed(error, f" (tried {number} times in {took_s:.1f} s)") from error
            said = str(failed(error, f" (attempt {number} of {_ATTEMPTS}, after {took_s:.1f} s)"))
            log.log(logging.WARNING if took_s >= _SLOW_S and _may_warn() else logging.INFO, "%s", said)
            _sleep(_pause_s(number))


def _may_warn() -> bool:
    """Whether the last warning of this process was some time ago: 64 requests may fail at the same time."""
    now_s = _now_s()
    if now_s < _warned["at_s"] + _WARN_EVERY_S:
        return False
    _warned["at_s"] = now_s
    return True


def _pause_s(number: int) -> float:
    """The pause after a failed attempt: half of it random, so that processes do not all come back at once.

    The random part does not come from `random`, whose state belongs to the user's code.
    """
    return _FIRST_PAUSE_S * float(2 ** (number - 1)) * (0.5 + os.urandom(1)[0] / 510)


# By process, because a lock that another thread held during a fork is never released in the child.
_locks: dict[int, threading.Lock] = {}

_warned = {"at_s": float("-inf")}  # of this process

_sleep, _now_s = time.sleep, time.monotonic  # tests replace them


def reason_of(error: Exception) -> str:
    """The error of an attempt in words."""
    text = str(error) or repr(error)
    return text if isinstance(error, OtherLengthError) else f"{type(error).__name__}: {text}"


def _below(path: str, prefix: str) -> str:
    """A path below the folder; empty for the folder itself and for anything outside of it."""
    return path.rstrip("/").removeprefix(prefix) if path.startswith(prefix) else ""


def _file(name: str, entry: Mapping[str, Any]) -> RemoteFile:
    size = entry.get("size")
    version = next((str(entry[field]) for field in _VERSION_FIELDS if entry.get(field)), "")
    return RemoteFile(name, UNKNOWN_BYTES if size is None else int(size), version)
