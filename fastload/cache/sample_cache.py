"""SampleCache: the base class of caches, and NoCache, which stores nothing.

A cache pickles as a handle, which becomes an empty cache where it cannot be reached. `copy.deepcopy` returns
the same cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from fastload.system.humanize import readable_size

if TYPE_CHECKING:
    import numpy.typing as npt

    from fastload.cache.columns import Allocate


class SampleCache(ABC):
    """Samples by index, `0 <= index < num_samples`; the caller checks the bounds.

    What has a default is as in a finished cache: nothing is missing, `put` stores nothing.

    Attributes:
        num_samples: Number of samples of the dataset.
        max_bytes: Maximum size; None if it has no limit.
        layout: How samples are stored, in one word.
        place: Where they are.
        reason: Why this cache is in use.
    """

    num_samples: int
    max_bytes: int | None = None
    layout: str
    place = reason = ""

    @property
    @abstractmethod
    def num_cached(self) -> int:
        """How many samples are stored now."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes in use now."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    @property
    def parts(self) -> dict[str, str] | None:
        """Of the fingerprint of the samples, by name; None if there is none."""
        return None

    def explain(self) -> str:
        """Where the samples are, how many, why this cache is in use, and the parts of its fingerprint."""
        parts = "".join(f"\n  {name}: {value}" for name, value in (self.parts or {}).items())
        size = f"{self.num_cached:,} of {self.num_samples:,} samples, {readable_size(self.nbytes)}"
        return f"{self.place}, {size}: {self.reason}{parts}"

    def missing(self) -> npt.NDArray[np.intp]:
        """Indices of the samples that are not stored and that `put` might accept, ascending."""
        return np.empty(0, np.intp)

    @abstractmethod
    def __contains__(self, index: object) -> bool:
        """Whether the sample of this index is stored now."""

    @abstractmethod
    def get(self, index: int) -> Any | None:
        """The sample, with read-only arrays and private tensors, or None if it is not cached."""

    def put(self, index: int, sample: Any) -> bool:
        """Store a sample; False if it does not fit. Can be repeated."""
        return False

    def flush(self) -> None:  # noqa: B027 - not every cache keeps something back
        """Let other processes find all that was put."""

    def gather(self, indices: npt.NDArray[np.intp], allocate: Allocate) -> Any | None:
        """The batch that torch's default_collate would make of these samples, in one call.

        Args:
            indices: `(n,)`, each `0 <= index < num_samples`.
            allocate: Returns a writable C-contiguous array of a shape and dtype, for a part of the batch.

        Returns:
            None if a sample is not stored suitably, or the batch needs default_collate itself.
        """
        return None

    def close(self) -> None:  # noqa: B027 - not every cache holds something
        """Release this process's resources; samples that were handed out stay valid."""


class NoCache(SampleCache):
    """No cache: every access reads the dataset.

    Args:
        num_samples: Number of samples of the dataset.
        reason: Why, as a readable clause.
    """

    num_cached, nbytes = 0, 0
    layout = "none"

    def __init__(self, num_samples: int, reason: str) -> None:
        self.num_samples, self.reason = num_samples, reason

    def explain(self) -> str:
        """Why there is no cache."""
        return f"no cache, because {self.reason}: every access reads the dataset"

    def __contains__(self, index: object) -> bool:
        return False

    def get(self, index: int) -> None:
        """None: nothing is stored."""
