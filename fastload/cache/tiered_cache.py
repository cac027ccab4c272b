"""TieredCache: a cache in RAM in front of a finished cache. NoCache: with `cache=None`, or no shared memory.

A sample that is read from the finished cache is kept in RAM, if it fits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastload.cache.format.sample_cache import SampleCache

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from fastload.cache.format.columns import Allocate


class TieredCache(SampleCache):
    """Two caches of the same samples, read one after another.

    Args:
        ram: Stores samples after reading.
        backing: A finished cache that holds all samples, or nearly all.
    """

    def __init__(self, ram: SampleCache, backing: SampleCache) -> None:
        self.num_samples, self.max_bytes = ram.num_samples, ram.max_bytes
        self.layout = f"{ram.layout} over {backing.layout}"
        self.ram = ram
        self.backing = backing

    @property
    def num_cached(self) -> int:
        """How many samples are in RAM now."""
        return self.ram.num_cached

    @property
    def nbytes(self) -> int:
        """Memory in use now."""
        return self.ram.nbytes

    def explain(self) -> str:
        """Why these caches are in use, and the parts of their fingerprints."""
        return f"first {self.ram.explain()}\nthen {self.backing.explain()}"

    def missing(self) -> npt.NDArray[np.intp]:
        """Indices of the samples that are not in RAM, and might fit."""
        return self.ram.missing()

    def __contains__(self, index: object) -> bool:
        return index in self.ram or index in self.backing

    def get(self, index: int) -> Any | None:
        """The sample from the first cache that holds it, or None."""
        sample = self.ram.get(index)
        if sample is None:
            sample = self.backing.get(index)
            if sample is not None:
                self.put(index, sample)
        return sample

    def put(self, index: int, sample: Any) -> bool:
        """Store a sample in RAM; False if it does not fit."""
        return self.ram.put(index, sample)

    def gather(self, indices: npt.NDArray[np.intp], allocate: Allocate) -> Any | None:
        """The batch from RAM only; None if a sample is not there (the caller then calls get())."""
        return self.ram.gather(indices, allocate)

    def close(self) -> None:
        """Release this process's resources of both caches."""
        self.ram.close()
        self.backing.close()


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
