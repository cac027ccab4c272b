"""Count the work of workers: how long they were busy, and what it took to get their batches to the consumer.

A worker, process or thread, measures its work (`Meter`) and sends it with each answer (`Work`). The consumer
adds the work of all workers of a loader (`Tally`).
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from fastload.cache.counts import counts

_NS_PER_US = 1000
_MOST_WORKS = 128  # that are kept before they are added up


class Work(NamedTuple):
    """The work of one worker since its previous answer, or the sums of all workers.

    Attributes:
        busy_us: Microseconds in which the worker did not wait for a task.
        cache_hits: Samples that were found in a cache; also of batches that no caller received.
        cache_misses: Samples that were read from the source of a cache.
        num_copies: Batches that were copied because their slot could not be lent.
        num_restarts: Workers that replaced dead ones.
    """

    busy_us: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    num_copies: int = 0
    num_restarts: int = 0


class Meter:
    """Measures the work of the calling thread, from its making on."""

    __slots__ = ("_hits", "_idle_ns", "_misses", "_since_ns")

    def __init__(self) -> None:
        self._idle_ns = 0
        self._since_ns = time.perf_counter_ns()  # of the previous answer
        self._hits, self._misses = counts.hits, counts.misses

    def waited(self, since_ns: int) -> None:
        """Record that the worker has waited for a task since ``since_ns`` (of `perf_counter_ns`)."""
        self._idle_ns += time.perf_counter_ns() - since_ns

    def work(self) -> Work:
        """The work since the last call."""
        before_ns, self._since_ns = self._since_ns, time.perf_counter_ns()
        idle_ns, self._idle_ns = self._idle_ns, 0
        hits, self._hits = self._hits, counts.hits
        misses, self._misses = self._misses, counts.misses
        busy_us = (self._since_ns - before_ns - idle_ns) // _NS_PER_US
        return Work(busy_us, self._hits - hits, self._misses - misses)


class Tally:
    """The work of all workers of one loader; several iterators and threads may add to it."""

    def __init__(self) -> None:
        # Reentrant: a signal handler may ask for the figures while its thread counts.
        self._lock = threading.RLock()
        self._works: list[Work] = []  # not added up yet; appending to a list needs no lock
        self._sum = Work()

    def add(self, work: Work) -> None:
        """Add the work of an answer, or what the consumer's process has counted."""
        self._works.append(work)
        if len(self._works) >= _MOST_WORKS:
            self.totals()

    def totals(self) -> Work:
        """The sums of all that was added."""
        with self._lock:
            num_works = len(self._works)
            columns = zip(self._sum, *self._works[:num_works], strict=True)
            self._sum = Work(*map(sum, columns))
            del self._works[:num_works]  # other threads append meanwhile
            return self._sum
