"""A sample that could not be read: what reports of loaders and of cache builds say about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FailedSample:
    """A sample that could not be read.

    Attributes:
        index: Of the sample in the dataset.
        path: The file that the error named; None where it named none.
        type: The class of the error.
        reason: The text of the error.
        worker: The worker that read it; None without workers.
        epoch: In which it was read.
        replaced_by: The index of the sample that took its place; None where a function made that sample.
    """

    index: Any
    path: str | None
    type: str
    reason: str
    worker: int | None = None
    epoch: int = 0
    replaced_by: Any = None

    @classmethod
    def of(cls, index: Any, error: BaseException, worker: int | None, **more: Any) -> FailedSample:
        """What is known of a sample whose reading raised ``error``."""
        reason = getattr(error, "reason", None) or error
        return cls(index, path_of(error), type(error).__name__, str(reason), worker, **more)


def path_of(error: BaseException) -> str | None:
    """The file that an error names, if it names one."""
    path = getattr(error, "path", None) or getattr(error, "filename", None)
    return None if path is None else str(path)
