"""The always-on counters of a loader: `DataLoader.stats()`.

Runs in the consumer's process. Only the caller's iterator, no iterator inside it, measures with a `Clock`.
The figures add up over the epochs and iterators of a loader, which threads can share.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastload.system.humanize import readable_time

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.workers.messages import WorkerCounters

# Of `next`: the step before it, its wait, and what of it was for the device, in nanoseconds; the number of
# workers; the samples of its batch, or None.
Call = tuple[int, int, int, int, "int | None"]

_NS_PER_S = 1_000_000_000
_US_PER_S = 1_000_000
_MAX_CALLS = 256  # that wait to be counted
_BUCKETS = 16  # of the histogram, per doubling: all times in one are within 2.2% of its middle


@dataclass(frozen=True, kw_only=True)
class LoaderStats:
    """What a loader did, over all its iterators, since it was made or since the last reset.

    Attributes:
        num_batches: Batches that the caller received.
        num_samples: Samples in these batches. One per batch, if `batch_size` and `batch_sampler` are None.
        num_epochs: Epochs that returned a batch.
        elapsed_s: Seconds in epochs: from `iter(loader)` to the last batch or the end. Concurrent iterators
            add up.
        first_batch_wait_s: Seconds in `iter(loader)` and in the wait for the first batch, of all epochs,
            including the start of the workers.
        wait_p50_s: Median wait of the caller for a batch in seconds, without the first batches of epochs;
            within 2.2%. None if there was no such batch.
        wait_p95_s: 95th percentile of these waits.
        wait_max_s: The longest of these waits. Exact since the loader was made, otherwise within 2.2%.
        wait_total_s: The sum of these waits.
        step_total_s: Seconds between a batch and the next call, and `device_wait_s`: the consumer's own work.
        device_wait_s: Seconds of `step_total_s` in which a loader with `device=` waited, within `next`, for
            the device to do the work that the consumer had queued: the device's pace, not a wait for data.
        wait_share: Waits as a share of waits and steps: 0 if data was always ready, close to 1 if the
            consumer only waits. None if there was no wait.
        worker_utilization: The share of an epoch, 0 to 1, in which workers make batches. Batches
            count when the consumer takes them from their worker. None without workers.
        cache_hits: Samples of `CachedDataset`s, or files of a loader with `cache=`, found in the cache,
            including those of prefetched batches that no caller received. None if none was read.
        cache_misses: Samples read from their source, or files that were decoded, as above.
        miss_reasons: Of files that were decoded: why, and how often.
        num_copies: Batches copied because slots were scarce (the caller holds many batches, or
            `max_prefetch_memory` is small), or because objects in them hide tensors from the device.
        num_restarts: Dead workers that were replaced.
    """

    num_batches: int
    num_samples: int
    num_epochs: int
    elapsed_s: float
    first_batch_wait_s: float
    wait_p50_s: float | None
    wait_p95_s: float | None
    wait_max_s: float | None
    wait_total_s: float
    step_total_s: float
    device_wait_s: float
    wait_share: float | None
    worker_utilization: float | None
    cache_hits: int | None
    cache_misses: int | None
    miss_reasons: dict[str, int]
    num_copies: int
    num_restarts: int

    def as_dict(self) -> dict[str, float]:
        """The figures by name, without those that are None; for a metrics logger."""
        fields = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: value for name, value in fields if isinstance(value, (int, float))}

    def __str__(self) -> str:
        return "\n".join(_lines(self))


@dataclass(slots=True)
class Counts:
    """The figures of one loader as they are counted; they only grow. Times are in nanoseconds."""

    num_batches: int = 0
    num_samples: int = 0
    num_epochs: int = 0
    first_wait_ns: int = 0
    wait_ns: int = 0
    wait_max_ns: int = 0
    step_ns: int = 0
    device_wait_ns: int = 0  # of `step_ns`
    other_ns: int = 0  # in calls that returned no batch
    workers_ns: int = 0  # time of each epoch, for each of its workers
    busy_us: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    miss_reasons: Counter[str] = field(default_factory=Counter)
    num_copies: int = 0
    num_restarts: int = 0
    histogram: Counter[int] = field(default_factory=Counter)  # of waits, by bucket

    def add_call(self, call: Call) -> int:
        """Count a call, except for its wait, which this returns."""
        step_ns, wait_ns, device_wait_ns, num_workers, num_samples = call
        step_ns = max(0, step_ns) + device_wait_ns  # threads that share an iterator wait at the same time
        wait_ns -= device_wait_ns
        self.step_ns += step_ns
        self.device_wait_ns += device_wait_ns
        self.workers_ns += num_workers * (step_ns + wait_ns)
        if num_samples is not None:
            self.num_batches += 1
            self.num_samples += num_samples
        return wait_ns

    def add_wait(self, wait_ns: int) -> None:
        """Count a wait for a batch."""
        self.wait_ns += wait_ns
        self.wait_max_ns = max(self.wait_max_ns, wait_ns)
        self.histogram[round(_BUCKETS * math.log2(max(1, wait_ns)))] += 1

    def since(self, before: Counts) -> Counts:
        """What was counted since ``before``, a copy of these figures then."""
        names = [field.name for field in dataclasses.fields(Counts)]
        sums = {name: getattr(self, name) - getattr(before, name) for name in names}
        sums["wait_max_ns"] = round(min(self.wait_max_ns, _quantile_ns(sums["histogram"], 1.0)))
        return Counts(**sums)


class Meter:
    """The figures of one loader.

    Attributes:
        counts: The figures without those of `calls`; read and changed under `lock`.
        calls: Of `next`, to be counted some hundred at a time: this takes a quarter of the time.
        lock: Reentrant, because a signal handler can ask for the figures while its thread counts.
    """

    def __init__(self) -> None:
        self.counts = Counts()
        self.calls: list[Call] = []
        self.lock = threading.RLock()
        self._reset = Counts()  # the figures at the last reset

    def add(self, counters: WorkerCounters) -> None:
        """Add what a worker counted, or what the consumer's process did for it."""
        with self.lock:
            counts = self.counts
            counts.busy_us += counters.busy_us
            counts.cache_hits += counters.cache_hits
            counts.cache_misses += counters.cache_misses
            if counters.miss_reasons:
                counts.miss_reasons.update(counters.miss_reasons)
            counts.num_copies += counters.num_copies
            counts.num_restarts += counters.num_restarts
        if self is not of_process and (counters.cache_hits or counters.cache_misses):
            of_process.add(counters)

    def count_calls(self) -> None:
        """Count the calls of `next` that wait for it; under `lock`."""
        counts, calls = self.counts, self.calls
        while calls:  # a signal handler that raises loses one, not all
            counts.add_wait(counts.add_call(calls.pop()))

    def copied_counts(self) -> Counts:
        """A copy of all figures."""
        with self.lock:
            self.count_calls()
            return copy.deepcopy(self.counts)

    def stats(self, *, reset: bool = False) -> LoaderStats:
        """The figures since the last reset."""
        with self.lock:
            counts, before = self.copied_counts(), self._reset
            if reset:
                self._reset = counts
        return stats_of(counts.since(before))


of_process = Meter()  # the caches and epochs of all loaders of this process
if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=lambda: globals().update(of_process=Meter()))


class Clock:
    """Measures one epoch of one iterator: the consumer's steps and its waits.

    Args:
        meter: Counts them for the loader.
        num_workers: The number of workers; None: they do not report how busy they are.
        began_ns: When the epoch began, in the time of `perf_counter_ns`.
        look: Called at the end of the epoch, with True, and after each few hundred batches, with False.

    Attributes:
        meter: As given.
    """

    def __init__(
        self,
        meter: Meter,
        num_workers: int,
        began_ns: int,
        look: Callable[[bool], object] = bool,
    ) -> None:
        self.meter = meter
        self._look = look
        self._num_workers = num_workers
        # When the loader last returned to its caller, at first from iter(loader).
        self._returned_ns = time.perf_counter_ns()
        self._iter_ns = self._returned_ns - began_ns
        self._has_first = self._has_ended = False

    def count(self, called_ns: int, size: int | None, device_wait_ns: int = 0) -> None:
        """Count a call that ends now.

        Args:
            called_ns: When it began, in the time of `perf_counter_ns`.
            size: The samples of its batch; None: it ends with an error, or the end of the epoch.
            device_wait_ns: How long it waited for the device; this counts as the consumer's own work.
        """
        meter = self.meter
        with meter.lock:
            now_ns = time.perf_counter_ns()
            call = called_ns - self._returned_ns, now_ns - called_ns, device_wait_ns, self._num_workers, size
            self._returned_ns = now_ns
            if self._has_first and size is not None:
                meter.calls.append(call)
                if len(meter.calls) >= _MAX_CALLS:
                    meter.count_calls()
                    self._look(False)
                return
            counts = meter.counts
            wait_ns = counts.add_call(call)
            if size is None:  # a wait ends with a batch
                counts.other_ns += wait_ns
            else:
                self._has_first = True
                counts.num_epochs += 1
                with of_process.lock:
                    of_process.counts.num_epochs += 1
                counts.first_wait_ns += wait_ns + self._iter_ns
                counts.workers_ns += self._num_workers * self._iter_ns

    def end(self, called_ns: int, device_wait_ns: int = 0) -> None:
        """The caller receives the end of the epoch, possibly several times."""
        if self._has_ended:
            return
        self._has_ended = True
        self.count(called_ns, None, device_wait_ns)
        self._look(True)


def stats_of(counts: Counts) -> LoaderStats:
    """The figures for the user."""
    wait_s, step_s, first_s = (
        ns / _NS_PER_S for ns in (counts.wait_ns, counts.step_ns, counts.first_wait_ns)
    )
    has_waits = bool(counts.histogram)
    has_cache = bool(counts.cache_hits or counts.cache_misses)
    longest_s = counts.wait_max_ns / _NS_PER_S
    p50_s, p95_s = (min(_quantile_ns(counts.histogram, p) / _NS_PER_S, longest_s) for p in (0.5, 0.95))
    workers_s = counts.workers_ns / _NS_PER_S
    return LoaderStats(
        num_batches=counts.num_batches,
        num_samples=counts.num_samples,
        num_epochs=counts.num_epochs,
        elapsed_s=first_s + wait_s + step_s + counts.other_ns / _NS_PER_S,
        first_batch_wait_s=first_s,
        wait_p50_s=p50_s if has_waits else None,
        wait_p95_s=p95_s if has_waits else None,
        wait_max_s=longest_s if has_waits else None,
        wait_total_s=wait_s,
        step_total_s=step_s,
        device_wait_s=counts.device_wait_ns / _NS_PER_S,
        wait_share=wait_s / (wait_s + step_s) if has_waits and wait_s + step_s else None,
        worker_utilization=min(1.0, counts.busy_us / _US_PER_S / workers_s) if workers_s else None,
        cache_hits=counts.cache_hits if has_cache else None,
        cache_misses=counts.cache_misses if has_cache else None,
        miss_reasons=dict(+counts.miss_reasons),
        num_copies=counts.num_copies,
        num_restarts=counts.num_restarts,
    )


def _quantile_ns(histogram: Counter[int], share: float) -> float:
    """A quantile of the times, up to the width of its bucket; 0 without times."""
    rank = math.ceil(share * histogram.total())
    for bucket in sorted(histogram):
        rank -= histogram[bucket]
        if rank <= 0:
            return math.exp2(bucket / _BUCKETS)
    return 0.0


def _lines(stats: LoaderStats) -> list[str]:
    rate = f" ({stats.num_samples / stats.elapsed_s:,.0f} samples/s)" if stats.elapsed_s else ""
    amounts = f"{stats.num_batches:,} batches, {stats.num_samples:,} samples"
    lines = [f"{amounts} in {readable_time(stats.elapsed_s)}{rate}"]
    if stats.num_epochs:
        lines.append(
            f"first batches: {readable_time(stats.first_batch_wait_s / stats.num_epochs)} on average"
        )
    if stats.wait_share is not None:
        waits = stats.wait_p50_s, stats.wait_p95_s, stats.wait_max_s
        p50, p95, longest = (readable_time(seconds or 0.0) for seconds in waits)
        share = f"{stats.wait_share:.1%} of the time after the first batch"
        lines.append(f"waits: {p50} (p50), {p95} (p95), {longest} (max); {share}")
    rest = []
    if stats.worker_utilization is not None:
        rest.append(f"workers {stats.worker_utilization:.0%} busy")
    if stats.cache_hits is not None:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in stats.miss_reasons.items())
        why = f" ({reasons})" if reasons else ""
        rest.append(f"cache: {stats.cache_hits:,} hits, {stats.cache_misses:,} misses{why}")
    if stats.num_copies:
        rest.append(f"{stats.num_copies:,} batches copied instead of lent")
    if stats.num_restarts:
        rest.append(f"{stats.num_restarts:,} workers restarted")
    return [*lines, "; ".join(rest)] if rest else lines
