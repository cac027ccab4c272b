"""TieredCache: a cache in RAM in front of a finished cache on disk.

`cache=["ram", "lmdb:PATH"]` makes one. A sample that the cache in RAM lacks is read from the file and kept in
RAM, as far as the budget goes. A sample that neither holds is read from the dataset by the caller.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fastload.cache.pace import Pace

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from fastload.cache.columns import Allocate
    from fastload.cache.protocol import SampleCache


class TieredCache:
    """Two caches of the same samples, the fast one asked first.

    Args:
        fast: Takes what was read from the other.
        slow: Holds all samples, or nearly all.
    """

    def __init__(self, fast: SampleCache, slow: SampleCache) -> None:
        self.fast = fast
        self.slow = slow
        self._pace = Pace()

    def __copy__(self) -> TieredCache:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TieredCache:
        return self

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
    def is_shared(self) -> bool:
        """Whether what a worker process stores in the fast cache is there for all."""
        return self.fast.is_shared

    @property
    def layout(self) -> str:
        """How samples lie in each: such as `"uniform over lmdb"`."""
        return f"{self.fast.layout} over {self.slow.layout}"

    def explain(self) -> str:
        """Why these caches are in use, and what they were made of."""
        return f"first {self.fast.explain()}\nthen {self.slow.explain()}"

    def missing(self) -> npt.NDArray[np.intp]:
        """Indices of the samples that the fast cache lacks and might take."""
        return self.fast.missing()

    def __contains__(self, index: object) -> bool:
        return index in self.fast

    def get(self, index: int) -> Any | None:
        """The sample from whichever holds it, or None."""
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
        """The batch from the fast cache alone; what it lacks is read sample by sample, and kept."""
        batch = self.fast.gather(indices, allocate)
        if batch is not None:
            self._pace.hits += len(indices)
        return batch

    def close(self) -> None:
        """Give up what this process holds of both."""
        self.fast.close()
        self.slow.close()
