"""RemoteFolder: a folder that fsspec reads, such as `s3://bucket/train`.

fsspec and the package of the protocol are imported when the first file is read or listed. Rules:

1. Each process makes its own file system, because fsspec's must not be used after a fork. The object pickles
   as its URL and its options.
2. A forked process keeps the file systems of its parent and never closes them: closing a connection removes
   it from the epoll instance that both processes share, and the parent would wait forever for its next
   answer.
3. Requests are watched and retried (see `retry`).
4. A body whose length differs from the list of files, or from the request, is never returned.
5. No name leads out of the folder. The links of a web page are untrusted: those that lead elsewhere are
   neither followed nor taken for files.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from fastload.errors import ImageReadError, RemoteFolderError
from fastload.files import file_systems
from fastload.files.listing import SAVED_NAME, UNKNOWN_BYTES, RemoteFile, from_bytes, is_below, to_bytes
from fastload.files.retry import OtherLengthError, reason_of, request, retry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


class RemoteFolder:
    """A folder in an object store, or on a server.

    Args:
        url: Any URL of fsspec.
        storage_options: Arguments for fsspec's file system, such as credentials.
        filesystem: A file system with fsspec's interface; None for the one that fsspec has for the URL.

    Attributes:
        url: The URL without a slash at its end.
        limits: How long the store can keep a request waiting.

    Raises:
        ValueError: An environment variable with a limit is not a number of seconds.
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any] | None = None,
        filesystem: Any | None = None,
    ) -> None:
        stripped = url.rstrip("/")
        self.url = f"{stripped}//" if stripped.endswith(":") else stripped  # `memory://` is a folder, too
        self._options = dict(storage_options or {})
        self._maker: tuple[Any, Any, Any] | None = None  # of the user's file system: class, arguments
        if filesystem is not None:
            self._maker = type(filesystem), filesystem.storage_args, filesystem.storage_options
        self.limits = file_systems.Limits.of_environment()
        self._connection: _Connection | None = None
        self._home_pid = os.getpid()  # a forked process is a different one

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_connection": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _home_pid=os.getpid())

    def path(self, name: str) -> str:
        """The URL of a file, for people."""
        return file_systems.join_url(self.url, name)

    def list_files(self) -> tuple[list[str], list[RemoteFile]]:
        """The folders directly below this folder, and all files at any depth below them.

        Raises:
            FileNotFoundError: There is no such folder.
            RemoteFolderError: It cannot be listed.
            ImportError: A package is missing.
        """
        connection = _Connection(*self._make(for_listing=True))
        fs = connection.fs

        def ask(method: str, path: str) -> Any:
            def attempt(_: int) -> Any:
                # Without a limit, unless the client has one: a listing takes any number of requests.
                return request(fs, method, path, detail=True, what=self.url)

            return retry(attempt, _failing("list", self.url, "folder"), self.limits)

        prefix = connection.root and connection.root + "/"  # the root of an archive has no name
        names = [
            _below(entry["name"], prefix)
            for entry in ask("ls", connection.root)
            if entry["type"] == "directory"
        ]
        if set(names) == {"."}:  # of a tar file made with `tar -cf x.tar .`, whose names begin with "./"
            self.url, self._connection = self.path("."), None
            return self.list_files()
        classes = sorted({name for name in names if name})

        def find(name: str) -> list[RemoteFile]:
            entries = pages(name) if file_systems.is_web(fs) else ask("find", prefix + name).items()
            files = (_file(_below(path, prefix), entry) for path, entry in entries)
            return [file for file in files if file.name]

        def pages(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
            """The links to files on the page of a class and on the pages below it."""
            folders, seen = [name], {name}
            while folders:
                try:
                    entries = ask("ls", prefix + folders.pop())
                except FileNotFoundError:
                    continue  # a link to nothing
                for entry in entries:
                    below = _below(entry["name"], prefix)
                    if entry["type"] != "directory":
                        yield entry["name"], entry
                    elif below and below not in seen:
                        seen.add(below)
                        folders.append(below)

        with ThreadPoolExecutor(file_systems.READS_AT_ONCE, "fastload-listing") as threads:
            return classes, [file for files in threads.map(find, classes) for file in files]

    def saved_list(self) -> tuple[str, list[str], list[RemoteFile]] | None:
        """The list that `save_list` wrote: when it was made, the folders, the files; None if there is none.

        Raises:
            RemoteFolderError: The list exists, but is damaged or cannot be read.
        """
        try:
            data = self.load(SAVED_NAME)
        except FileNotFoundError:
            return None
        try:
            return from_bytes(data)
        except ValueError as error:
            raise RemoteFolderError(
                f"cannot use the list of files {self.path(SAVED_NAME)}: {error}. Pass listing='save' to "
                "replace it, or listing='ignore'"
            ) from error

    def save_list(self, classes: list[str], files: list[RemoteFile]) -> None:
        """Write the list of files into the folder.

        Raises:
            RemoteFolderError: It cannot be written.
        """
        self.write(SAVED_NAME, to_bytes(classes, files))

    def read(self, name: str, nbytes: int) -> bytes:
        """The content of a file.

        Args:
            name: Its path below the folder.
            nbytes: Its length in the list of files, or `UNKNOWN_BYTES`.

        Raises:
            ImageReadError: The file cannot be read, or has a different length.
        """

        def failed(error: Exception, tried: str) -> Exception:
            before = ""
            if isinstance(error, FileNotFoundError):
                before = "; it was there when the folder was listed"
            elif isinstance(error, OtherLengthError):
                before = " that the file had when the folder was listed"
            hint = file_systems.credentials_hint(error, self.url)
            return ImageReadError(self.path(name), f"{reason_of(error)}{before}{tried}{hint}")

        return self._cat(name, nbytes, failed)

    def load(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """The content of a file, or of a part of it.

        Raises:
            FileNotFoundError: There is no such file.
            RemoteFolderError: It cannot be read, or is shorter than the part.
        """
        failed = _failing("read", self.path(name), "file")
        if stop is None:
            return self._cat(name, UNKNOWN_BYTES, failed)
        return self._cat(name, stop - start, failed, start=start, end=stop)

    def _cat(
        self, name: str, nbytes: int, failed: Callable[[Exception, str], Exception], **part: int
    ) -> bytes:
        """The content of a file, or of a part of it, of this length."""
        connection = self._connect()

        def attempt(number: int) -> bytes:
            limit_s = math.inf if connection.ends_stalled else self.limits.read_s * 2.0 ** (number - 1)
            content = connection.cat(name, what=self.path(name), limit_s=limit_s, nbytes=nbytes, **part)
            if nbytes not in (UNKNOWN_BYTES, len(content)):
                raise OtherLengthError(f"{len(content):,} bytes arrived of the {nbytes:,}")
            return bytes(content)  # a copy only if it is not bytes

        return retry(attempt, failed, self.limits)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file.

        Raises:
            RemoteFolderError: It cannot be written.
        """
        self._write(name, lambda fs, path: fs.pipe_file(path, data))

    def put(self, name: str, local: str) -> None:
        """Copy a file of this machine into the folder, and compare its length.

        Object stores show a file when it is complete. Other stores can show a part of it, so the caller must
        not trust a file by its name.

        Raises:
            RemoteFolderError: It cannot be written.
        """
        nbytes = os.path.getsize(local)

        def put(fs: Any, path: str) -> None:
            fs.put_file(local, path)
            size = fs.info(path).get("size")
            if size not in (None, nbytes):
                raise OtherLengthError(f"{size:,} bytes arrived of {nbytes:,}")

        self._write(name, put)

    def _write(self, name: str, write: Callable[[Any, str], object]) -> None:
        fs, root = self.file_system()

        def attempt(_: int) -> None:
            if not getattr(fs, "async_impl", False):  # clients of object stores would create the bucket
                fs.makedirs(root, exist_ok=True)
            write(fs, f"{root}/{name}" if root else name)

        retry(attempt, _failing("write", self.path(name)), self.limits)

    def file_system(self) -> tuple[Any, str]:
        """The file system of this process, and the folder's path in it; made on first use.

        Raises:
            ImportError: A package is missing.
            ValueError: There is no such protocol.
        """
        connection = self._connect()
        return connection.fs, connection.root

    def _connect(self) -> _Connection:
        connection = self._connection
        if connection is None or connection.pid != os.getpid():
            with _locks.setdefault(os.getpid(), threading.Lock()):
                connection = self._connection
                if connection is None or connection.pid != os.getpid():
                    self._connection = connection = _Connection(*self._make())
        return connection

    def _make(self, *, for_listing: bool = False) -> tuple[Any, str, bool]:
        """A new file system, the folder's path in it, and whether it ends stalled requests itself."""
        if self._maker is not None:
            kind, args, options = self._maker
            is_forked = os.getpid() != self._home_pid
            return file_systems.make_again(kind, args, options, self.url, self.limits, is_forked=is_forked)
        # Other file systems keep the entries of all folders that they list in memory.
        options = {**self._options, **({"use_listings_cache": False} if for_listing else {})}
        return file_systems.open_url(self.url, options, self.limits)


class _Connection:
    """A file system of this process, and the folder's path in it.

    Until one read has succeeded, only one thread reads: the first request makes the client, and s3fs would
    make one of 14 MB for each thread that sends a request before there is one. Of a tar file, only one thread
    reads at any time: fsspec seeks and reads through one handle.
    """

    def __init__(self, fs: Any, root: str, ends_stalled: bool) -> None:
        self.pid = os.getpid()
        self.fs = fs
        self.root = root.rstrip("/")
        self.ends_stalled = ends_stalled
        self._reading = threading.Lock()
        self._is_connected = False
        self._has_one_handle = type(fs).__module__ in _WITH_ONE_HANDLE
        _connections.add(self)

    def cat(self, name: str, **options: Any) -> Any:
        """The content of a file, with the options of `request`."""
        path = f"{self.root}/{name}" if self.root else name
        if self._has_one_handle or not self._is_connected:
            with self._reading:
                if self._has_one_handle or not self._is_connected:
                    content = request(self.fs, "cat_file", path, **options)
                    self._is_connected = True
                    return content
        return request(self.fs, "cat_file", path, **options)


def _failing(doing: str, url: str, missing: str = "") -> Callable[[Exception, str], Exception]:
    """Makes the error of a request; a different one if the missing file is expected to exist."""

    def failed(error: Exception, tried: str) -> Exception:
        if missing and isinstance(error, FileNotFoundError):
            return FileNotFoundError(f"there is no {missing} at {url}")
        return RemoteFolderError(
            f"cannot {doing} {url}: {reason_of(error)}{tried}{file_systems.credentials_hint(error, url)}"
        )

    return failed


# By process, because a lock that another thread held during a fork is never released in the child.
_locks: dict[int, threading.Lock] = {}
_WITH_ONE_HANDLE = frozenset({"fsspec.implementations.tar", "fsspec.implementations.libarchive"})

# Those of this process, and of its parents.
_connections: weakref.WeakSet[_Connection] = weakref.WeakSet()
_inherited: list[_Connection] = []

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _inherited.extend(_connections))


def _below(path: str, prefix: str) -> str:
    """A path below the folder; empty for the folder itself and for anything outside of it."""
    if not prefix:
        path = path.lstrip("/")  # as file systems in memory have it
    name = path.rstrip("/").removeprefix(prefix) if path.startswith(prefix) else ""
    if prefix.startswith("http"):  # a link, which can say "./"
        name = "/".join(part for part in name.split("/") if unquote(part) != ".")
    return name if is_below(name) else ""


def _file(name: str, entry: Mapping[str, Any]) -> RemoteFile:
    size = entry.get("size")
    return RemoteFile(name, UNKNOWN_BYTES if size is None else int(size), file_systems.version_of(entry))
