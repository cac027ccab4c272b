"""Keeps as many samples decoded in RAM as fit, and the files of the others: `cache=["ram", "ram-encoded"]`.

A sample is decoded and stored in the first cache while that has room; afterwards its files are stored in the
second one. `split_budget` divides the memory so that all samples fit into one of the two, if they can.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.cache.encoded import decode_images
from fastload.cache.record import ALIGNMENT_BYTES
from fastload.cache.sample_cache import retain
from fastload.cache.tiered import TieredCache
from fastload.nested.tree import read_only

if TYPE_CHECKING:
    import numpy.typing as npt

    from fastload.cache.sample_cache import SampleCache


# A cache without room for one sample may have room for a smaller one, but decoding costs time.
_MOST_REFUSED = 16
_EMPTY_BYTES = 32 << 10  # a cache takes these at most beside its samples and 8 bytes for each of them


class DecodedAndEncodedCache(TieredCache):
    """Two caches in RAM of one dataset; each sample is in one of them.

    Args:
        fast: Stores decoded samples.
        slow: Stores samples with undecoded images.
    """

    def __init__(self, fast: SampleCache, slow: SampleCache) -> None:
        super().__init__(fast, slow)
        self._num_refused = 0  # samples in a row that this generation of the fast cache has refused
        self._generation = 0

    @property
    def num_cached(self) -> int:
        """How many samples are stored now, in both caches."""
        return self.fast.num_cached + self.slow.num_cached

    @property
    def nbytes(self) -> int:
        """Memory that both caches take now."""
        return self.fast.nbytes + self.slow.nbytes

    @property
    def budget_bytes(self) -> int | None:
        """The most memory that both caches take."""
        return (self.fast.budget_bytes or 0) + (self.slow.budget_bytes or 0)

    @property
    def capacity(self) -> None:
        """None: how many samples fit depends on their sizes."""

    @property
    def layout(self) -> str:
        """How each cache stores samples, such as `"uniform over encoded"`."""
        return f"{self.fast.layout} over encoded"

    def missing(self) -> npt.NDArray[np.intp]:
        """Indices of the samples that neither cache stores, and one of them may accept."""
        lacking = self.slow.missing()
        return np.array([index for index in lacking.tolist() if index not in self.fast], np.intp)

    def get(self, index: int) -> Any | None:
        """The sample from the cache that holds it, or None; images of the slow one are not decoded."""
        sample = self.fast.get(index)
        return self.slow.get(index) if sample is None else sample

    def put(self, index: int, sample: Any) -> bool:
        """Decode the sample and store it, or store it with undecoded images if there is no room."""
        if index in self:
            return True
        if not getattr(self.fast, "is_retained", _always)(index):
            return False
        generation = getattr(self.fast, "generation", 0)
        if generation != self._generation:
            self._generation, self._num_refused = generation, 0
        if self._num_refused < _MOST_REFUSED:
            if self.fast.put(index, read_only(decode_images(sample))):
                self._num_refused = 0
                return True
            self._num_refused += 1
        return self.slow.put(index, sample)

    def retain(self, indices: npt.NDArray[np.intp] | None) -> None:
        """Drop all samples but these from both caches, and store no others."""
        retain(self.fast, indices)
        retain(self.slow, indices)


def _always(_: int) -> bool:
    return True


def split_budget(
    budget_bytes: int, num_samples: int, decoded_bytes: float, encoded_bytes: float
) -> tuple[int, int]:
    """The budgets of the two caches, so that as many samples as possible are decoded and all others fit.

    Args:
        budget_bytes: For both.
        num_samples: Of the dataset.
        decoded_bytes: The mean size of a decoded sample.
        encoded_bytes: The mean size of a sample with undecoded images.
    """
    empty_bytes = min(budget_bytes // 2, _EMPTY_BYTES + 8 * num_samples)
    encoded_bytes += 2 * ALIGNMENT_BYTES  # the frame of a record, and the gap behind it
    budget_bytes -= 2 * empty_bytes
    saved_bytes = decoded_bytes - encoded_bytes
    fast_bytes = budget_bytes
    if saved_bytes > 0 and num_samples * decoded_bytes > budget_bytes:
        num_decoded = max(0, (budget_bytes - num_samples * encoded_bytes) // saved_bytes)
        fast_bytes = int(num_decoded * decoded_bytes)
    return max(1, fast_bytes + empty_bytes), max(1, budget_bytes - fast_bytes + empty_bytes)
