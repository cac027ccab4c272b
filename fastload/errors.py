"""The error classes of fastload.

Each one also inherits the built-in exception that a caller of torch's DataLoader would already catch.
fastload never replaces an error that the user's own code raises: it keeps its type and gets a note.
"""

from __future__ import annotations

import os
from typing import Any


def __dir__() -> list[str]:
    return sorted(
        name
        for name, value in globals().items()
        if isinstance(value, type) and issubclass(value, FastloadError)
    )


class FastloadError(Exception):
    """Base of all errors that fastload itself raises."""


# --- transport -------------------------------------------------------------------------------------------


class WorkerDiedError(FastloadError, RuntimeError):
    """A worker process ended with batches outstanding (torch raises RuntimeError here)."""


class BatchLostError(FastloadError, RuntimeError):
    """A batch was lost in transit from a worker; the message says why."""


class TooManyFailuresError(FastloadError, RuntimeError):
    """More samples could not be read, in an epoch or for a cache, than `max_errors` allows."""


class WorkerStartError(FastloadError, RuntimeError):
    """Worker processes cannot be started from here; the message says why."""


class LoaderClosedError(FastloadError, RuntimeError):
    """A batch was requested from an iterator whose loader was closed."""

    def __init__(self, message: str = "this iterator was closed; start a new one with iter(loader)") -> None:
        super().__init__(message)


class SharedMemoryError(FastloadError, MemoryError):
    """Shared memory could not be created or grown; the message says how many bytes, and why."""


class ResumeError(FastloadError, ValueError):
    """A loader cannot resume from a state; the message says why."""


# --- caches ----------------------------------------------------------------------------------------------


class CacheError(FastloadError):
    """Base of the errors of CachedDataset and its caches."""


class NondeterministicDatasetError(CacheError, ValueError):
    """A sample draws random numbers, or differs when it is read again: a cache would freeze one draw."""


class UnsupportedSampleError(CacheError, TypeError):
    """A sample contains a value that cannot be cached; the message names its path in the sample."""


class CacheMismatchError(CacheError, ValueError):
    """The cache was made from a different source; the message says which part differs."""


class CacheCorruptError(CacheError, OSError):
    """A stored record, or the file of a cache, is damaged."""


class DecodeMismatchError(CacheError, ValueError):
    """Remembered pixels differ from those that the file gives now; the message names the file."""

    def __init__(self, where: Any) -> None:
        self.where = where
        super().__init__(
            f"the remembered pixels of {where!r} are not those that its decoder returns now: the file "
            "was changed without a new modification time, the decoder is not deterministic, a function "
            "changed but not its fastload.remember(version=...), or this is a defect of fastload, which "
            "we would like to hear of. FASTLOAD_CACHE=off remembers no files"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.where,), vars(self)


class CacheBusyError(CacheError, OSError):
    """Another process or thread is building this cache."""


# --- images ----------------------------------------------------------------------------------------------


class ImageReadError(FastloadError, OSError):
    """An image file could not be read or decoded.

    torch's own loader re-creates the error from its text alone if a worker raises it.

    Attributes:
        path: The file; empty if it comes from a worker of torch's own loader.
        reason: Why it could not be read.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str | None = None) -> None:
        if reason is None:
            path, reason, message = "", os.fspath(path), os.fspath(path)
        else:
            message = f"cannot read the image {os.fspath(path)!r}: {reason}"
        self.path = os.fspath(path)
        self.reason = reason
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        # OSError's own pickling would call the constructor with the message alone.
        arguments = (self.path, self.reason) if self.path else (self.reason,)
        return type(self), arguments, vars(self)


class RemoteFolderError(FastloadError, OSError):
    """A folder in an object store cannot be listed; the message names it and the reason."""


# --- device ----------------------------------------------------------------------------------------------


class DeviceUnavailableError(FastloadError, RuntimeError):
    """The requested device is not available; the message says why."""
