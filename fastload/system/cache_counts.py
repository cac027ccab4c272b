"""The accesses to caches, counted for the thread that reads a dataset."""

from __future__ import annotations

import threading
from collections import Counter


class CacheCounts(threading.local):
    """The accesses of the calling thread to all caches, of samples and of files.

    The code that fetches a batch reads these counts before and after it. The difference covers every cache
    inside the dataset, at any depth, and no other threads.

    Attributes:
        hits: Samples, or files, found in a cache.
        misses: Samples, or files, read from their source.
        reasons: Why files were read from their source, and how often.
    """

    hits = 0
    misses = 0

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()

    def take_reasons(self) -> dict[str, int]:
        """The reasons since the last call."""
        if not self.reasons:
            return {}
        reasons, self.reasons = self.reasons, Counter()
        return dict(reasons)


cache_counts = CacheCounts()
