"""TieredCache: a cache in RAM in front of a finished cache on disk.

`cache=["ram", "lmdb:PATH"]` makes one. A sample that is not in RAM is read from the file and kept in RAM, if
it fits into the budget. If neither cache holds a sample, the caller reads it from the dataset.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fastload.cache.pace import Pace
from fastload.cache.sample_cache import BaseCache, SampleCache, retain

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from fastload.cache.columns import Allocate


class TieredCache(BaseCache):
    """Two caches of the same samples; reads try the fast cache first.

    Args:
        fast: The cache in front; it stores samples that were read from the slow cache.
        slow: The cache behind; it holds all samples, or nearly all.
    """

    def __init__(self, fast: SampleCache, slow: SampleCache) -> None:
        self.fast = fast
        self.slow = slow
        self._pace = Pace()

    @property
    def num_samples(self) -> int:
        """Number of samples of the dataset."""
        return self.fast.num_samples

    @property
    def num_cached(self) -> int:
        """How many samples are in the fast cache now."""
        return self.fast.num_cached

    @property
    def nbytes(self) -> int:
        """Memory that the fast cache takes now."""
        return self.fast.nbytes

    @property
    def budget_bytes(self) -> int | None:
        """The most memory that the fast cache takes."""
        return self.fast.budget_bytes

    @property
    def capacity(self) -> int | None:
        """How many uniform samples fit into the fast cache; None for ragged samples."""
        capacity: int | None = getattr(self.fast, "capacity", None)
        return capacity

    @property
    def is_shared(self) -> bool:
        """Whether all processes see the samples that a worker process stores in the fast cache."""
        return self.fast.is_shared

    @property
    def layout(self) -> str:
        """How each cache stores samples, such as `"uniform over lmdb"`."""
        return f"{self.fast.layout} over {self.slow.layout}"

    def explain(self) -> str:
        """The reasons why these caches are in use, and the parts of their fingerprints."""
        return f"first {self.fast.explain()}\nthen {self.slow.explain()}"

    def missing(self) -> npt.NDArray[np.intp]:
        """Indices of the samples that the fast cache lacks and may accept."""
        return self.fast.missing()

    def __contains__(self, index: object) -> bool:
        return index in self.fast or index in self.slow

    def get(self, index: int) -> Any | None:
        """The sample from the first cache that holds it, or None."""
        sample = self.fast.get(index)
        if sample is not None:
            self._pace.hits += 1
            return sample
        started_s = time.perf_counter()
        sample = self.slow.get(index)
        read_s = time.perf_counter() - started_s
        if sample is not None:
            self._pace.put(self.fast, index, sample, read_s=read_s)
        return sample

    def put(self, index: int, sample: Any) -> bool:
        """Store a sample in the fast cache."""
        return self.fast.put(index, sample)

    def gather(self, indices: npt.NDArray[np.intp], allocate: Allocate) -> Any | None:
        """The batch from the fast cache only; None if it lacks a sample (the caller then calls get())."""
        batch = self.fast.gather(indices, allocate)
        if batch is not None:
            self._pace.hits += len(indices)
        return batch

    def retain(self, indices: npt.NDArray[np.intp] | None) -> None:
        """Drop all samples but these from the fast cache, and store no others there."""
        retain(self.fast, indices)

    def close(self) -> None:
        """Release this process's resources of both caches."""
        self.fast.close()
        self.slow.close()
