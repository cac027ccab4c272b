"""Datasets that go wrong while a cache is built of them; importable, so that spawned workers find them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from typing import TYPE_CHECKING, Any

from fastload.cache.build.build_lock import only_builder
from fastload.errors import ImageReadError
from tests.cache.zoo import Images

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


class BrokenImages(Images):
    """Some files cannot be read."""

    def __init__(self, num_samples: int = 20, *, bad: Sequence[int] = ()) -> None:
        super().__init__(num_samples)
        self.bad = bad

    def sample(self, index: int) -> Any:
        if index in self.bad:
            raise ImageReadError(f"{index}.jpg", "it is broken")
        return super().sample(index)


class OddError(Exception):
    """Can be pickled, and not read again."""

    def __init__(self, reason: str, number: int) -> None:
        super().__init__(reason)
        self.number = number


class OddlyBroken(Images):
    """Raises, at one index, what does not survive the way from a worker."""

    def sample(self, index: int) -> Any:
        if index == 7:
            raise OddError("an odd picture", 7)
        return super().sample(index)


class Dying(Images):
    """Ends the process that reads one of its samples."""

    def sample(self, index: int) -> Any:
        if index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().sample(index)


class Stopping(BrokenImages):
    """Images whose reader is interrupted at one sample, as by Ctrl-C."""

    def __init__(self, num_samples: int, stop: int, **options: Any) -> None:
        super().__init__(num_samples, **options)
        self.stop = stop

    def sample(self, index: int) -> Any:
        if index == self.stop:
            raise KeyboardInterrupt
        return super().sample(index)


def exit_codes(*functions: Callable[[], Any]) -> list[int | None]:
    """The exit codes of forked children that run these functions at the same time."""
    children = [multiprocessing.get_context("fork").Process(target=function) for function in functions]
    for child in children:
        child.start()
    for child in children:
        child.join()
    codes = [child.exitcode for child in children]
    for child in children:
        child.close()
    return codes


@contextlib.contextmanager
def building(path: Path) -> Iterator[int]:
    """Another process holds the lock of a builder; gives its number."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_hold, args=(str(path), theirs))
    child.start()
    theirs.close()
    ours.recv_bytes()
    try:
        yield child.pid or 0
    finally:
        ours.send_bytes(b"end")
        child.join()
        ours.close()
        child.close()


def _hold(path: str, pipe: Any) -> None:
    with only_builder(path):
        pipe.send_bytes(b"held")
        pipe.recv_bytes()
