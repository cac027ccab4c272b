"""A file system of fsspec in this process's memory, with faults: latency is a barrier, never a pause."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TIMEOUT_S = 30.0


class FaultyFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Reads of a path first go through the faults that are planned for it, one for each read."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    # By the end of a path: functions that get the content, and return it or raise.
    faults: ClassVar[dict[str, list[Callable[[bytes], bytes]]]] = {}
    reads: ClassVar[Counter[str]] = Counter()  # of each path, by all threads of this process
    gate: ClassVar[Callable[[str], object]] = staticmethod(lambda _: None)  # called before each read

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("faulty://", "memory://", 1)))

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
        """The content, after the next fault of this path."""
        type(self).gate(path)
        type(self).reads[path] += 1
        data: bytes = super().cat_file(path, *args, **kwargs)
        planned = next((faults for end, faults in type(self).faults.items() if path.endswith(end)), [])
        return planned.pop(0)(data) if planned else data

    @classmethod
    def reset(cls) -> None:
        """Forget all files and faults."""
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]
        cls.faults.clear()
        cls.reads.clear()
        cls.gate = staticmethod(lambda _: None)


def register() -> None:
    """Make `faulty://` known to fsspec in this process."""
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)


def upload(folder: Path, url: str) -> None:
    """Copy the files of a folder to a URL."""
    fs = fsspec.filesystem(url.partition("://")[0])
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            fs.pipe(f"{url}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def raising(error: Exception) -> Callable[[bytes], bytes]:
    """A fault: the read raises this error."""

    def fault(_: bytes) -> bytes:
        raise error

    return fault


def cut(data: bytes) -> bytes:
    """A fault: the body ends too early."""
    return data[: len(data) // 2]


class NotTogetherError(BaseException):
    """Fewer reads than expected took place at the same time; no exception that is retried."""


class NotSetError(BaseException):
    """An event was not set in time; no exception that is retried."""


def until_set(event: Any) -> None:
    """Wait for an event of threads or of processes; raise NotSetError if it is not set in time."""
    if not event.wait(TIMEOUT_S):
        raise NotSetError(f"nothing has set the event in {TIMEOUT_S} s")


def meet(parties: int, *, alone: int = 1) -> Callable[..., object]:
    """A gate that opens once so many reads are there at the same time, after some that pass `alone`."""
    changed = threading.Condition()
    left = {"alone": alone, "missing": parties}

    def wait(_: str = "") -> None:
        with changed:
            if left["alone"]:
                left["alone"] -= 1
                return
            left["missing"] -= 1
            changed.notify_all()
            if not changed.wait_for(lambda: left["missing"] <= 0, TIMEOUT_S):
                raise NotTogetherError(f"{left['missing']} more reads were expected at the same time")

    return wait
