"""Datasets that go wrong while a cache is built of them; importable, so that spawned workers find them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from typing import TYPE_CHECKING, Any

from fastload.cache.inventory import only_builder
from fastload.errors import ImageReadError
from tests.cache.zoo import Images
from tests.kit.jobs import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class BrokenImages(Images):
    """Images: those of `bad` cannot be read, Ctrl-C comes at `stop`, `shift` is added; `version` is known."""

    def __init__(
        self, num_samples: int = 20, *, bad: Any = (), stop: int = -1, version: Any = None, shift: int = 0
    ) -> None:
        super().__init__(num_samples)
        self.bad, self.stop, self.version, self.shift = sorted(bad), stop, version, shift

    def sample(self, index: int) -> Any:
        if index == self.stop:
            raise KeyboardInterrupt
        if index in self.bad:
            raise ImageReadError(f"{index}.jpg", "it is broken")
        image, label = super().sample(index)
        return image + self.shift, label

    def fingerprint(self) -> Any:
        return self.version


class Edited(BrokenImages):
    """The labels of some samples are others than in an earlier state of the code."""

    def __init__(self, num_samples: int, edited: Any, **options: Any) -> None:
        super().__init__(num_samples, **options)
        self.edited = edited

    def sample(self, index: int) -> Any:
        image, label = super().sample(index)
        return image, label + 100 * (index in self.edited)


class Calling(Images):
    """Calls a function when it reads the sample `at` for the first time."""

    def __init__(self, num_samples: int, at: int, call: Callable[[], Any]) -> None:
        super().__init__(num_samples)
        self.at, self.call = at, call

    def sample(self, index: int) -> Any:
        if index == self.at:
            self.at = -1
            self.call()
        return super().sample(index)


class OddError(Exception):
    """Can be pickled, and not read again."""

    def __init__(self, reason: str, number: int) -> None:
        super().__init__(reason)
        self.number = number


def odd() -> None:
    """Raises what does not survive the way from a worker."""
    raise OddError("an odd picture", 7)


def refusing(number: int) -> Callable[..., Any]:
    """A call that the system refuses."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return refuse


def die() -> None:
    """Ends its process."""
    os.kill(os.getpid(), signal.SIGKILL)


def exit_codes(*functions: Callable[[], Any]) -> list[int | None]:
    """The exit codes of forked children that run these functions at the same time."""
    children = [multiprocessing.get_context("fork").Process(target=function) for function in functions]
    for child in children:
        child.start()
    codes = []
    for child in children:
        child.join()
        codes.append(child.exitcode)
        child.close()
    return codes


@contextlib.contextmanager
def building(path: Path) -> Iterator[int]:
    """Another process holds the lock of a builder; gives its number."""
    job = Job(_hold, str(path))
    try:
        yield job.answer()
    finally:
        job.ask(_release)
        job.end()


def _hold(path: str) -> tuple[Any, int]:
    lock = only_builder(path)
    lock.__enter__()
    return lock, os.getpid()


def _release(lock: Any) -> None:
    lock.__exit__(None, None, None)
