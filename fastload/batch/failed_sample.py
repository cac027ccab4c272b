"""The record of a sample that could not be read, for the reports of loaders and of cache builds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FailedSample:
    """A sample that could not be read.

    Attributes:
        index: The index of the sample in the dataset.
        path: The file that the error named; None if it named no file.
        type: The class of the error.
        reason: The text of the error.
        worker: The worker that read the sample; None without workers.
        epoch: The epoch in which the sample was read.
        replaced_by: The index of the sample that replaced it; None if a function made the replacement.
    """

    index: Any
    path: str | None
    type: str
    reason: str
    worker: int | None = None
    epoch: int = 0
    replaced_by: Any = None

    def __str__(self) -> str:
        where = "" if self.path is None else f" ({self.path})"
        return f"{self.index!r:.50}{where}: {self.type}: {self.reason:.200}"

    @classmethod
    def of(cls, index: Any, error: BaseException, worker: int | None, **more: Any) -> FailedSample:
        """The record of a sample that could not be read because of ``error``."""
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
    """The text of an error, or the shorter `reason` that some errors have."""
    try:
        return str(getattr(error, "reason", None) or error)
    except Exception:  # noqa: BLE001  # the error's class can be the user's
        return f"str() of this {type(error).__name__} raises an error"
