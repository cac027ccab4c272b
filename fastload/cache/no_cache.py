"""NoCache: `CachedDataset(cache=None)` stores nothing, and reads its dataset at every access."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.cache.sample_cache import BaseCache

if TYPE_CHECKING:
    import numpy.typing as npt


class NoCache(BaseCache):
    """The interface of a cache that is always empty.

    Args:
        num_samples: Number of samples of the dataset.
    """

    num_samples = 0  # as attributes of the class: the properties of SampleCache cannot be set
    num_cached = 0
    nbytes = 0
    layout = "none"

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def explain(self) -> str:
        """The reason why nothing is stored."""
        return "no cache, as cache=None was given: each access reads the dataset"

    def missing(self) -> npt.NDArray[np.intp]:
        """Empty: `put` accepts nothing."""
        return np.empty(0, np.intp)

    def __contains__(self, index: object) -> bool:
        return False

    def get(self, index: int) -> Any | None:
        """None: nothing is stored."""
        return None

    def close(self) -> None:
        """Nothing to release."""
