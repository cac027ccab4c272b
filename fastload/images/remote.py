"""Images in object stores, over fsspec: the list of a folder, and the files of a batch in one call.

Rules:

1. Each process makes its own file system, because the thread in which fsspec sends requests does not survive
   a fork. A forked process keeps those of its parent and never closes them: a connection that it closes would
   leave the epoll instance that both share, and the parent would wait for its next answer for ever.
2. The files that are announced are fetched with the first of them that is read, at most 256 MiB at once.
   Samples are still read one by one, and a file that is not there is an error of its sample alone.
3. The clients retry, not this file.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.errors import ImageReadError, RemoteFolderError
from fastload.images.listing import DIGEST_BYTES, Listing

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_BYTES = 256 << 20
_PATTERN = re.compile(r"[*?[]")  # fsspec would look for names that match
# In which fsspec's file systems report the version of a file, best first.
_VERSIONS = (
    *("ETag", "etag", "e_tag", "md5Hash", "generation"),
    *("mtime", "LastModified", "last_modified", "updated", "created"),
)
# Without these, s3fs has ten connections, and asks for the length of each file before it reads it.
_S3 = {"max_concurrency": 1, "config_kwargs": {"max_pool_connections": 64}}


class _Files(threading.local):
    """Of one thread: the contents or errors of files, and the lengths of those to fetch, by name."""

    def __init__(self) -> None:
        self.fetched: dict[str, Any] = {}
        self.coming: dict[str, int] = {}

    def take(self, name: str) -> list[str]:
        """This file and those that come with it, up to the limit."""
        taken, nbytes = [name], self.coming.pop(name)
        for other, other_bytes in [*self.coming.items()]:
            nbytes += other_bytes
            if nbytes > _MAX_BYTES:
                break
            taken.append(other)
            del self.coming[other]
        return taken


class RemoteFiles:
    """The files of a folder at a URL; pickles as the URL and the options.

    Args:
        url: Of a folder in an object store.
        options: Arguments for fsspec's file system, such as credentials.

    Raises:
        ValueError: The URL is a web page's, whose links can lead anywhere, or an archive's.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None) -> None:
        if "::" in url or url.startswith(("http://", "https://")):
            raise ValueError(
                f"root should be a folder of an object store, such as s3://bucket/train, but is {url}: "
                "unpack an archive first; the files of a web server need a dataset of your own"
            )
        self._url, self._options = url if url.endswith("/") else f"{url}/", dict(options or {})
        self._systems: dict[int, tuple[Any, str]] = {}  # by process
        self._files = _Files()
        _all.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteFiles, (self._url, self._options)

    def path(self, name: str) -> str:
        """The URL of a file."""
        return self._url + name

    def listing(self, extensions: tuple[str, ...]) -> Listing:
        """The classes and their images, from one listing of the store.

        Raises:
            RemoteFolderError: The store cannot be listed.
            ImportError: A package is missing.
            ValueError: There is no such protocol, or an option is wrong.
        """
        fs, root = self._system()
        try:
            found = fs.find(root, detail=True)
            fs.invalidate_cache()  # else it keeps all entries in memory
        except FileNotFoundError:
            found = {}
        except Exception as error:
            raise RemoteFolderError(f"cannot list {self._url}: {_reason(error)}") from error
        prefix = f"{root}/" if root else ""
        entries = {path.removeprefix(prefix).lstrip("/"): entry for path, entry in found.items()}
        names: dict[str, list[str]] = {
            label: [] for label in sorted({name.partition("/")[0] for name in entries if "/" in name})
        }
        for name in sorted(entries, key=lambda name: name.rpartition("/")[::2]):
            label = name.partition("/")[0]
            if label in names and label != name and name.lower().endswith(extensions):
                names[label].append(name)
        images = {name: entries[name] for group in names.values() for name in group}
        return Listing(
            list(names),
            [[os.fsencode(name) for name in group] for group in names.values()],
            np.array([entry.get("size") or 0 for entry in images.values()], np.int64),
            _digest(images),
        )

    def expect(self, files: dict[str, int]) -> None:
        """Announce the files that this thread reads next, in order, with their lengths; sends no request."""
        held = self._files
        held.fetched = {name: held.fetched[name] for name in files if name in held.fetched}
        held.coming = {name: nbytes for name, nbytes in files.items() if name not in held.fetched}

    def read(self, name: str) -> bytes:
        """The content of a file.

        Raises:
            ImageReadError: It cannot be read; with its URL.
        """
        held = self._files
        if name not in held.fetched and name in held.coming:
            held.fetched = {}  # before more is fetched: all of it was read
            held.fetched = self._fetch(held.take(name))
        content = held.fetched[name] if name in held.fetched else self._fetch([name])[name]
        if isinstance(content, Exception):
            held.fetched.pop(name, None)  # another attempt sends a request
            raise ImageReadError(self.path(name), _reason(content)) from content
        return bytes(content)

    def _fetch(self, names: list[str]) -> dict[str, Any]:
        """The content of each file, or its error."""
        fs, root = self._system()
        paths = {name: f"{root}/{name}" if root else name for name in names}
        literal = [path for path in paths.values() if not _PATTERN.search(path)]
        found: dict[str, Any] = {}
        try:
            found = fs.cat(literal, on_error="return") if literal else {}
        except Exception as error:  # noqa: BLE001 - of the client; it is raised where a file is read
            found = dict.fromkeys(literal, error)
        for path in set(paths.values()).difference(found):
            try:
                found[path] = fs.cat_file(path)
            except Exception as error:  # noqa: BLE001 - as above
                found[path] = error
        return {name: found[path] for name, path in paths.items()}

    def _system(self) -> tuple[Any, str]:
        """The file system of this process, and the folder's path in it."""
        system = self._systems.get(os.getpid())
        if system is None:
            system = self._systems.setdefault(os.getpid(), _open(self._url, self._options))
        return system


# Those of this process, and of the processes that it was forked from.
_all: weakref.WeakSet[RemoteFiles] = weakref.WeakSet()
_inherited: list[RemoteFiles] = []

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _inherited.extend(_all))


def _open(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """A new file system for a URL, and the URL's path in it."""
    if url.startswith(("s3://", "s3a://")):
        options = {**_S3, **options}
    try:
        import fsspec.core

        # Without fsspec's table of instances, connections are closed once the folder is no longer used.
        fs, root = fsspec.core.url_to_fs(url, **{**options, "skip_instance_cache": True})
    except ImportError as error:
        raise ImportError(
            f"{url} needs a package that is not installed: {error} (pip install "
            '"fastload-torch[remote]" installs fsspec, which needs one for each protocol, such as s3fs)'
        ) from error
    except ValueError as error:
        raise ValueError(f"cannot open {url}: {error}") from error
    return fs, root.rstrip("/")


def _digest(images: Mapping[str, Mapping[str, Any]]) -> str | None:
    """A digest that changes with any file; None if the store has no version of one of them."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name, entry in images.items():
        version = next((entry[field] for field in _VERSIONS if entry.get(field)), None)
        if version is None:
            return None
        text = f"\0{name}\0{entry.get('size')}\0{version}"
        digest.update(text.encode(errors="surrogateescape"))
    return digest.hexdigest()


def _reason(error: Exception) -> str:
    hint = ". Check the credentials, or pass storage_options=" if isinstance(error, PermissionError) else ""
    return f"{type(error).__name__}: {error}{hint}"
