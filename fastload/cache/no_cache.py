"""NoCache: what a CachedDataset has instead of a cache, with `cache=None` or without shared memory."""

from __future__ import annotations

from fastload.cache.sample_cache import SampleCache


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
