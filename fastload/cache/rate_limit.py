"""Limits how fast training epochs fill a cache in RAM, so no epoch takes much longer.

On some machines, filling fresh memory takes longer than decoding a JPEG. An epoch that stored every sample
would then take twice as long as an epoch without a cache. So storing has a time budget, which reads and cache
hits refill:

1. A sample read from its source earns a fifth of its reading time, or `CHEAP_S` if that is more.
2. A sample found in the cache earns the time that reading it would have taken, plus a fifth.
3. A sample is stored if the budget is not negative. Otherwise it is read again in the next epoch.

Beside its initial budget, storing therefore adds at most about a fifth to the time of an epoch without a
cache, and later epochs store the remaining samples. `CachedDataset.fill` stores all samples at once.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fastload.system.logs import log

if TYPE_CHECKING:
    from fastload.cache.sample_cache import SampleCache

SHARE = 0.2  # of the reading time
CHEAP_S = 0.0001  # samples stored faster are never deferred: only complete batches can be gathered
_BEGIN_S = 0.2  # initial budget: a small dataset is stored in its first epoch
_MAX_S = 1.0  # maximum budget, so no single epoch spends the savings of many
_NEW_WEIGHT = 0.1  # weight of the newest sample in the running mean


class RateLimit:
    """Stores samples within the time budget.

    Attributes:
        hits: Samples that were found in the cache since the last miss; the owner counts them.
    """

    __slots__ = ("_budget_s", "_cheap_s", "_has_logged", "_read_s", "_store_s", "hits")

    def __init__(self) -> None:
        self.hits = 0
        self._cheap_s = CHEAP_S
        self._budget_s = _BEGIN_S
        self._read_s = 0.0  # running means
        self._store_s = 0.0
        self._has_logged = False

    def put(self, cache: SampleCache, index: int, sample: Any, *, read_s: float) -> None:
        """Store a sample that took ``read_s`` seconds to read, if the budget allows it."""
        self._read_s = _mean(self._read_s, read_s)
        hits, self.hits = self.hits, 0
        earned_s = max(SHARE * read_s, self._cheap_s) + hits * (1 + SHARE) * self._read_s
        self._budget_s = min(_MAX_S, self._budget_s + earned_s)
        if self._budget_s < 0:
            self._log_once()
            return
        started_s = time.perf_counter()
        cache.put(index, sample)
        store_s = time.perf_counter() - started_s
        self._store_s = _mean(self._store_s, store_s)
        self._budget_s -= store_s

    def _log_once(self) -> None:
        if not self._has_logged:
            self._has_logged = True
            log.info(
                "cache: a sample takes %.2f ms to read and %.2f ms to store, because this machine "
                "allocates memory slowly: several epochs fill the cache. CachedDataset.fill() fills it "
                "at once",
                1e3 * self._read_s,
                1e3 * self._store_s,
            )


def _mean(before_s: float, new_s: float) -> float:
    return new_s if before_s == 0 else before_s + _NEW_WEIGHT * (new_s - before_s)
