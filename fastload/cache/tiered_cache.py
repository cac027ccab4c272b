"""TieredCache: caches in front of a dataset; the first one that holds a sample returns it.

- `cache=["ram", "lmdb:PATH"]`: a tier in RAM, backed by a finished file. A sample read from the file is kept
  in RAM, if it fits.
- `cache=["ram", "ram-encoded"]`: two tiers in RAM. A sample is decoded and stored in the first one while
  that has room; afterwards its files are stored in the second one. `split_budget` divides the memory such
  that all samples fit into one of the two, if they can.
- `cache=None`: no tier. Every access reads the dataset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.cache.format.record import ALIGNMENT_BYTES
from fastload.cache.format.sample_cache import BaseCache, SampleCache
from fastload.cache.format.undecoded import decode_images
from fastload.nested.tree import read_only

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from fastload.cache.format.columns import Allocate

# A cache without room for one sample can have room for a smaller one, but decoding costs time.
_MAX_REJECTED = 16
_EMPTY_BYTES = 32 << 10  # the maximum beside its samples and 8 bytes for each of them


class TieredCache(BaseCache):
    """Caches of the same samples, read one after another.

    Args:
        num_samples: Number of samples of the dataset.
        tiers: Caches in RAM that store samples after reading: one, none, or a first one for decoded samples
            and a second one, with undecoded images, for the samples that do not fit into it.
        backing: A finished cache that holds all samples, or nearly all; None if there is none.
    """

    num_samples = 0  # as an attribute of the class: the property of SampleCache cannot be set

    def __init__(
        self, num_samples: int, tiers: Sequence[Any] = (), backing: SampleCache | None = None
    ) -> None:
        self.num_samples = num_samples
        self.tiers = tiers
        self.backing = backing
        self._caches = [*tiers] if backing is None else [*tiers, backing]
        self._num_rejected = 0  # decoded samples in a row that did not fit into the first tier

    @property
    def num_cached(self) -> int:
        """How many samples are in RAM now."""
        return sum(tier.num_cached for tier in self.tiers)

    @property
    def nbytes(self) -> int:
        """Memory that the tiers take now."""
        return sum(tier.nbytes for tier in self.tiers)

    @property
    def max_bytes(self) -> int | None:
        """Maximum memory of the tiers; None without tiers."""
        return sum(tier.max_bytes for tier in self.tiers) if self.tiers else None

    @property
    def is_shared(self) -> bool:
        """Whether all processes see the samples that a worker process stores."""
        return all(tier.is_shared for tier in self.tiers)

    @property
    def layout(self) -> str:
        """How each cache stores samples, such as `"uniform over lmdb"`."""
        layouts = [cache.layout for cache in self._caches]
        if len(self.tiers) > 1:
            layouts[1] = "encoded"
        return " over ".join(layouts) or "none"

    def explain(self) -> str:
        """Why these caches are in use, and the parts of their fingerprints."""
        if not self._caches:
            return "no cache, because of cache=None: every access reads the dataset"
        return "first " + "\nthen ".join(cache.explain() for cache in self._caches)

    def missing(self) -> npt.NDArray[np.intp]:
        """Indices of the samples that no tier holds and the last one might accept."""
        if not self.tiers:
            return super().missing()
        *first, last = self.tiers
        lacking = last.missing()
        return np.array([i for i in lacking.tolist() if i not in first[0]], np.intp) if first else lacking

    def __contains__(self, index: object) -> bool:
        return any(index in cache for cache in self._caches)

    def get(self, index: int) -> Any | None:
        """The sample from the first cache that holds it, or None."""
        for tier in self.tiers:
            sample = tier.get(index)
            if sample is not None:
                return sample
        sample = None if self.backing is None else self.backing.get(index)
        if sample is not None:
            self.put(index, sample)
        return sample

    def put(self, index: int, sample: Any) -> bool:
        """Store a sample in the first tier; with two, decoded there or undecoded in the second one."""
        if len(self.tiers) < 2:
            return any(tier.put(index, sample) for tier in self.tiers)
        first, second = self.tiers
        if index in self:
            return True
        if self._num_rejected < _MAX_REJECTED:
            if first.put(index, read_only(decode_images(sample))):
                self._num_rejected = 0
                return True
            self._num_rejected += 1
        return bool(second.put(index, sample))

    def gather(self, indices: npt.NDArray[np.intp], allocate: Allocate) -> Any | None:
        """The batch from the first tier only; None if it lacks a sample (the caller then calls get())."""
        return self.tiers[0].gather(indices, allocate) if self.tiers else None

    def close(self) -> None:
        """Release this process's resources of all caches."""
        for cache in self._caches:
            cache.close()


def split_budget(
    max_bytes: int, num_samples: int, decoded_bytes: float, encoded_bytes: float
) -> tuple[int, int]:
    """The budgets of the two caches, to decode as many samples as possible while all others fit.

    Args:
        max_bytes: For both.
        num_samples: Of the dataset.
        decoded_bytes: The mean size of a decoded sample.
        encoded_bytes: The mean size of a sample with undecoded images.
    """
    empty_bytes = min(max_bytes // 2, _EMPTY_BYTES + 8 * num_samples)
    encoded_bytes += 2 * ALIGNMENT_BYTES  # the frame of a record, and the gap after it
    max_bytes -= 2 * empty_bytes
    saved_bytes = decoded_bytes - encoded_bytes
    fast_bytes = max_bytes
    if saved_bytes > 0 and num_samples * decoded_bytes > max_bytes:
        num_decoded = max(0, (max_bytes - num_samples * encoded_bytes) // saved_bytes)
        fast_bytes = int(num_decoded * decoded_bytes)
    return max(1, fast_bytes + empty_bytes), max(1, max_bytes - fast_bytes + empty_bytes)
