"""What CachedDataset asks of a cache: SharedMemoryCache, LMDBCache, PrivateCache, or one of the user's.

A cache pickles as a handle, is shared by `copy.deepcopy`, and may be used in any process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from fastload.cache.columns import Allocate


@runtime_checkable
class SampleCache(Protocol):
    """Samples by index, `0 <= index < num_samples`; the caller checks the bounds."""

    @property
    def num_samples(self) -> int:
        """Number of samples of the dataset."""

    @property
    def num_cached(self) -> int:
        """How many of them are stored now."""

    @property
    def nbytes(self) -> int:
        """Bytes in use now."""

    @property
    def budget_bytes(self) -> int | None:
        """The most bytes it takes; None if it has no limit of its own."""

    @property
    def is_shared(self) -> bool:
        """Whether what a worker process stores is there for all."""

    @property
    def layout(self) -> str:
        """In a word, how samples lie in it."""

    def explain(self) -> str:
        """Why this cache is the one in use, and what it was made of."""

    def missing(self) -> npt.NDArray[np.intp]:
        """Indices of the samples that are not stored and that `put` might take, ascending."""

    def __contains__(self, index: object) -> bool:
        """Whether the sample of this index is stored now."""

    def get(self, index: int) -> Any | None:
        """The sample, its arrays read-only and its tensors private, or None if it is not cached."""

    def put(self, index: int, sample: Any) -> bool:
        """Store a sample; False if it does not fit. Safe to repeat."""

    def gather(self, indices: npt.NDArray[np.intp], allocate: Allocate) -> Any | None:
        """The batch that default_collate would make of these samples, None if it cannot."""

    def close(self) -> None:
        """Give up what this process holds; samples that were handed out stay valid."""
