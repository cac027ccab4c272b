"""Every error that fastload raises by its own name, drawn first.

Each also inherits the built-in that a caller of torch's DataLoader would already catch.
An error that the user's own code raises is never replaced: it keeps its type and gets a note.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error, unless its class refuses notes, as a frozen dataclass does."""
    with contextlib.suppress(Exception):
        error.add_note(note)


_PLACE = "fastload: batch "


def add_place(error: BaseException, place: str) -> None:
    """Note which batch an error belongs to, as ``"3, dataset index 7"``.

    The note replaces that of an earlier batch: a dataset may raise the same object again and again.
    """
    with contextlib.suppress(Exception):
        notes = getattr(error, "__notes__", [])
        notes[:] = [note for note in notes if not note.startswith(_PLACE)]
        error.add_note(_PLACE + place)


class FastloadError(Exception):
    """Base of all errors that fastload itself raises."""


# --- transport -------------------------------------------------------------------------------------------


class WorkerDiedError(FastloadError, RuntimeError):
    """A worker process ended while it still owed batches (torch raises RuntimeError here)."""


class BatchLostError(FastloadError, RuntimeError):
    """A batch was lost on its way from a worker, and why; the batches after it are as they should be."""


class ErrorBudgetError(FastloadError, RuntimeError):
    """More samples of an epoch could not be read than `error_budget` of the loader allows."""


class WorkerStartError(FastloadError, RuntimeError):
    """Worker processes cannot be started from here, and why."""


class LoaderClosedError(FastloadError, RuntimeError):
    """A batch was asked of an iterator whose loader was closed."""

    def __init__(self, message: str = "this iterator was closed; start a new one with iter(loader)") -> None:
        super().__init__(message)


class SegmentError(FastloadError, MemoryError):
    """Shared memory could not be made or grown: how many bytes were asked for, and why not."""


class ResumeError(FastloadError, ValueError):
    """A loader cannot go on where a state says, and why."""


# --- caches ----------------------------------------------------------------------------------------------


class CacheError(FastloadError):
    """Base of the errors of CachedDataset and the caches under it."""


class RandomDatasetError(CacheError, ValueError):
    """The dataset gives another sample at each access, so that caching it would freeze one draw."""


class UnsupportedSampleError(CacheError, TypeError):
    """A sample holds something that cannot be cached; the path of the leaf is in the message."""


class CacheMismatchError(CacheError, ValueError):
    """The cache was made from something else; the message says which part differs."""


class CacheCorruptError(CacheError, OSError):
    """A stored record is damaged."""


class CacheBusyError(CacheError, OSError):
    """Another process is building this cache, or one died while it did."""


# --- images ----------------------------------------------------------------------------------------------


class ImageReadError(FastloadError, OSError):
    """An image file could not be read or decoded.

    Attributes:
        path: The file.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        self.path = os.fspath(path)
        self.reason = reason
        super().__init__(f"cannot read the image {self.path!r}: {reason}")

    def __reduce__(self) -> tuple[type[ImageReadError], tuple[str, str]]:
        # OSError's own pickling would call the constructor with the message alone.
        return type(self), (self.path, self.reason)


# --- device ----------------------------------------------------------------------------------------------


class DeviceUnavailableError(FastloadError, RuntimeError):
    """The device that was asked for by name is not there, and why."""


def short_repr(index: Any) -> str:
    """An index for a message: its repr, cut where it gets long.

    An index whose repr() raises is named by its type, so that the error that is reported is not lost.
    """
    try:
        text = repr(index)
    except Exception as error:  # noqa: BLE001  # of a class of the user's
        text = f"<{type(index).__name__}, whose repr() raised {type(error).__name__}>"
    return text if len(text) <= 200 else text[:200] + "..."
