"""A file system of fsspec in this process's memory, with faults."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

if TYPE_CHECKING:
    from pathlib import Path


class FaultyFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """It notes what is read, and reads of a path first raise the errors that are planned for it."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    faults: ClassVar[dict[str, list[Exception]]] = {}  # by the end of a path
    reads: ClassVar[Counter[str]] = Counter()  # of each path
    calls: ClassVar[list[list[str]]] = []  # the paths that were asked for together

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("faulty://", "memory://", 1)))

    def cat(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """The content of each path, after its next fault."""
        type(self).calls.append([str(each).rpartition("/")[2] for each in path])
        return super().cat(path, *args, **kwargs)

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
        """The content, after the next fault of this path."""
        type(self).reads[path] += 1
        planned = next((errors for end, errors in type(self).faults.items() if path.endswith(end)), [])
        if planned:
            raise planned.pop(0)
        data: bytes = super().cat_file(path, *args, **kwargs)
        return data

    @classmethod
    def reset(cls) -> None:
        """Forget all files and faults."""
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]
        cls.faults.clear()
        cls.reads.clear()
        cls.calls.clear()


def register() -> None:
    """Make `faulty://` known to fsspec in this process."""
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)


def upload(folder: Path, url: str) -> None:
    """Copy the files of a folder to a URL."""
    fs = fsspec.filesystem(url.partition("://")[0])
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            fs.pipe(f"{url}/{path.relative_to(folder).as_posix()}", path.read_bytes())
