"""SampleCache: the interface that CachedDataset expects of a cache; BaseCache: what our caches inherit.

A cache pickles as a handle, which becomes an empty cache where it cannot be reached. `copy.deepcopy` returns
the same cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from fastload.cache.format.columns import Allocate


@runtime_checkable
class SampleCache(Protocol):
    """Samples by index, `0 <= index < num_samples`; the caller checks the bounds."""

    @property
    def num_samples(self) -> int:
        """Number of samples of the dataset."""

    @property
    def num_cached(self) -> int:
        """How many samples are stored now."""

    @property
    def nbytes(self) -> int:
        """Bytes in use now."""

    @property
    def max_bytes(self) -> int | None:
        """Maximum size in bytes; None if it has no limit."""

    @property
    def layout(self) -> str:
        """How samples are stored, in one word."""

    def explain(self) -> str:
        """Why this cache is in use, and the parts of its fingerprint."""

    def missing(self) -> npt.NDArray[np.intp]:
        """Indices of the samples that are not stored and that `put` might accept, ascending."""

    def __contains__(self, index: object) -> bool:
        """Whether the sample of this index is stored now."""

    def get(self, index: int) -> Any | None:
        """The sample, with read-only arrays and private tensors, or None if it is not cached."""

    def put(self, index: int, sample: Any) -> bool:
        """Store a sample; False if it does not fit. Can be repeated."""

    def gather(self, indices: npt.NDArray[np.intp], allocate: Allocate) -> Any | None:
        """The batch that torch's default_collate would make of these samples, in one call.

        Args:
            indices: `(n,)`, each `0 <= index < num_samples`.
            allocate: Returns a writable C-contiguous array of a shape and dtype, for a part of the batch.

        Returns:
            None if a sample is not stored suitably, or the batch needs default_collate itself.
        """

    def close(self) -> None:
        """Release this process's resources; samples that were handed out stay valid."""


class BaseCache(SampleCache):
    """Default methods of caches, for a finished cache: nothing is missing, `put` stores nothing."""

    @property
    def max_bytes(self) -> int | None:
        """None: the cache has no limit."""
        return None

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def missing(self) -> npt.NDArray[np.intp]:
        """Empty: `put` accepts nothing."""
        return np.empty(0, np.intp)

    def put(self, index: int, sample: Any) -> bool:
        """False: the cache stores nothing more."""
        return False

    def gather(self, indices: npt.NDArray[np.intp], allocate: Allocate) -> Any | None:
        """None: each sample is read by itself."""
        return None
