"""A sample that could not be read: what reports of loaders and of cache builds say about it."""

from __future__ import annotations

import os
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
        return cls(index, path_of(error), type(error).__name__, _reason(error), worker, **more)


def path_of(error: BaseException) -> str | None:
    """The file that an error names in its attribute `path` or `filename`; None if it names no file there."""
    for name in ("path", "filename"):
        try:
            path = os.fsdecode(getattr(error, name, None))  # type: ignore[arg-type]
        except Exception:  # noqa: BLE001  # no path, or an attribute of a user's class that raises
            continue
        if path:
            return path
    return None


def _reason(error: BaseException) -> str:
    """The text of an error, or of the shorter `reason` that some errors have."""
    try:
        return str(getattr(error, "reason", None) or error)
    except Exception:  # noqa: BLE001  # of a class of the user's
        return f"str() of this {type(error).__name__} raises an error"
