"""Count the hits and misses of all caches that a thread reads.

The code that fetches a batch reads these counts before and after it. The difference covers every cache inside
the dataset, at any depth, and no other threads.
"""

from __future__ import annotations

import threading


class CacheCounts(threading.local):
    """The accesses of the calling thread to all `CachedDataset`s.

    Attributes:
        hits: Samples found in a cache.
        misses: Samples read from their source.
    """

    hits = 0
    misses = 0


counts = CacheCounts()
