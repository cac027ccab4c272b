"""RemoteFiles: whole files that are read from a URL and written to it, with the retries of `remote`.

Rules:

1. A large file is read in parts, and each part is tried again by itself. A part of another length than was
   asked for is never returned.
2. A file that was written is compared with its length. Object stores show a file when it is complete; other
   stores may show a part of it, so the caller must not trust a file by its name.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from fastload.errors import RemoteFolderError
from fastload.files.attempts import PERMANENT, OtherLengthError, reason_of, retried
from fastload.files.remote import RemoteFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

PART_BYTES = 16 << 20


class RemoteFiles:
    """The files directly below a URL.

    Args:
        url: Any URL of fsspec.
        storage_options: Arguments for fsspec's file system, such as credentials.

    Attributes:
        url: The URL without a slash at its end.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self._folder = RemoteFolder(url, storage_options, has_large_files=True)
        self.url = self._folder.url
        self._has_folder = False

    def check(self) -> None:
        """Open the file system; sends no request.

        Raises:
            ImportError: A package is missing.
            ValueError: There is no such protocol.
        """
        self._folder.file_system()

    def read(self, name: str) -> bytes:
        """The content of a small file.

        Raises:
            FileNotFoundError: There is no such file.
            RemoteFolderError: It cannot be read.
            ImportError: A package is missing.
            ValueError: There is no such protocol.
        """
        return self._folder.read_file(name, 0, self._failed("read", name))

    def parts(self, name: str, nbytes: int) -> Iterator[bytes]:
        """The content of a file of this length, in parts.

        Raises:
            FileNotFoundError: There is no such file.
            RemoteFolderError: It cannot be read, or is shorter.
        """
        for start in range(0, nbytes, PART_BYTES):
            yield self._part(name, start, min(start + PART_BYTES, nbytes))

    def _part(self, name: str, start: int, stop: int) -> bytes:
        def check(data: bytes) -> None:
            if len(data) != stop - start:
                raise OtherLengthError(
                    f"{len(data):,} bytes arrived of the {stop - start:,} from position {start:,}"
                )

        failed = self._failed("read", name)
        return self._folder.read_file(name, stop - start, failed, check, start=start, end=stop)

    def nbytes(self, name: str) -> int | None:
        """The length of a file; None if the store does not tell it.

        Raises:
            FileNotFoundError: There is no such file.
            RemoteFolderError: The store does not answer.
        """
        size = self._folder.ask("info", name, self._failed("read", name)).get("size")
        return None if size is None else int(size)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file.

        Raises:
            RemoteFolderError: It cannot be written.
        """
        fs, path = self._place(name)

        def attempt(_: int) -> None:
            self._make_folder(fs)
            fs.pipe_file(path, data)

        retried(attempt, self._failed("write", name), self._folder.limits)

    def put(self, name: str, local: str) -> None:
        """Copy a file of this machine to the URL.

        Raises:
            RemoteFolderError: It cannot be written.
        """
        fs, path = self._place(name)
        nbytes = os.path.getsize(local)

        def attempt(_: int) -> None:
            self._make_folder(fs)
            fs.put_file(local, path)
            size = fs.info(path).get("size")
            if size not in (None, nbytes):
                raise OtherLengthError(f"{size:,} bytes arrived of {nbytes:,}")

        retried(attempt, self._failed("write", name), self._folder.limits)

    def _place(self, name: str) -> tuple[Any, str]:
        fs, root = self._folder.file_system()
        return fs, f"{root}/{name}"

    def _make_folder(self, fs: Any) -> None:
        """Make the folder, where folders exist: clients of object stores would make the bucket."""
        if not self._has_folder and not getattr(fs, "async_impl", False):
            fs.makedirs(self._folder.file_system()[1], exist_ok=True)
        self._has_folder = True

    def _failed(self, doing: str, name: str) -> Callable[[Exception, str], Exception]:
        def failed(error: Exception, tried: str) -> Exception:
            path = self._folder.path(name)
            if isinstance(error, FileNotFoundError) and doing == "read":
                return FileNotFoundError(f"there is no file at {path}")
            return RemoteFolderError(f"cannot {doing} {path}: {reason_of(error)}{tried}")

        return failed


def may_pass(error: RemoteFolderError) -> bool:
    """Whether the cause may pass by itself, as a network that is down does."""
    return not isinstance(error.__cause__, PERMANENT)
