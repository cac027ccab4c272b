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
    """The work of one worker since its previous answer.

    Attributes:
        busy_us: Microseconds in which the worker did not wait for a task.
        cache_hits: Samples that it found in a cache.
        cache_misses: Samples that it read from the source of a cache.
    """

    busy_us: int = 0
    cache_hits: int = 0
    cache_misses: int = 0


class Totals(NamedTuple):
    """The sums of one loader.

    Attributes:
        busy_us: Of all workers.
        cache_hits: See `Work`; also of batches that no caller received.
        cache_misses: As `cache_hits`.
        num_copies: Batches that were copied because their slot could not be lent.
        num_restarts: Workers that replaced dead ones.
    """

    busy_us: int
    cache_hits: int
    cache_misses: int
    num_copies: int
    num_restarts: int


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
        self._hits = self._misses = 0  # of the consumer's process
        self._num_copies = 0
        self._num_restarts = 0

    def add(self, work: Work) -> None:
        """Add the work of an answer."""
        self._works.append(work)
        if len(self._works) >= _MOST_WORKS:
            self._add_up()

    def _add_up(self) -> None:
        with self._lock:
            num_works = len(self._works)
            columns = zip(self._sum, *self._works[:num_works], strict=True)
            self._sum = Work(*map(sum, columns))
            del self._works[:num_works]  # other threads append meanwhile

    def add_accesses(self, hits: int, misses: int) -> None:
        """Add accesses to caches in the consumer's process."""
        with self._lock:
            self._hits += hits
            self._misses += misses

    def add_copy(self) -> None:
        """Count a batch that was copied because its slot could not be lent."""
        with self._lock:
            self._num_copies += 1

    def add_restart(self) -> None:
        """Count a worker that replaced a dead one."""
        with self._lock:
            self._num_restarts += 1

    def totals(self) -> Totals:
        """The sums of all that was added."""
        with self._lock:
            self._add_up()
            busy_us, hits, misses = self._sum
            hits, misses = hits + self._hits, misses + self._misses
            return Totals(busy_us, hits, misses, self._num_copies, self._num_restarts)
