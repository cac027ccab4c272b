"""Measure and count what a loader does, always: `DataLoader.stats()` and `DataLoader.log_stats()`.

Runs in the consumer's process. The iterator that the caller has, and no iterator inside it, measures with a
`Clock`: two clock reads and one entry in a list for a batch. Rules:

1. The figures belong to the loader, and add up over its epochs and iterators. A loader that was copied,
   unpickled or forked starts at zero.
2. Threads may share a loader and its iterators, and no batch is lost or counted twice.
3. A wait ends with a batch that the caller receives. An error or the end of an epoch is no wait.
4. A user's callback runs before a batch is fetched. If it raises, the error reaches the caller, and the next
   call returns the batch that was due.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
import operator
import os
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastload.system.logs import log
from fastload.system.sizes import readable_size
from fastload.workers.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fastload.workers.auto_workers import AutoWorkers

_NS_PER_S = 1_000_000_000
_US_PER_S = 1_000_000
# A bucket of the histogram is 1/16 to 1/32 as wide as the times in it. A time in the middle of a bucket is
# therefore at most 3.2% away from all times in it.
_SHARE_BITS = 4
MOST_CALLS = 128  # that are listed before they are counted
_NUM_BUCKETS = (64 - _SHARE_BITS) << _SHARE_BITS  # for all times below 2**63 ns


@dataclass(frozen=True, kw_only=True)
class LoaderStats:
    """What a loader did, over all its iterators, since it was made or since the last reset.

    Attributes:
        num_batches: Batches that the caller received.
        num_samples: Their samples. One for each batch, if `batch_size` and `batch_sampler` are None.
        nbytes: Bytes of their tensors and arrays on the host. With worker processes, gaps of up to 63 bytes
            between them count, and tensors that are pickled (sparse ones, subclasses) do not. None without
            worker processes if some batch was of a class of its own, or had more than eight values at one
            level; fastload does not walk through such batches.
        num_epochs: Iterators or epochs that returned a batch.
        elapsed_s: Seconds in epochs: from `iter(loader)` to the last batch or the end. Iterators that are
            used at the same time add up.
        first_batch_wait_s: Seconds in `iter(loader)` and in the wait for the first batch, of all epochs. The
            start of the workers is part of them.
        wait_p50_s: Median of the seconds that the caller waited for a batch, without the first batches of
            epochs; at most 3.2% off. None if there was no such batch.
        wait_p95_s: The wait that 95% of the waits do not exceed, as above.
        wait_max_s: The longest of these waits. Exact since the loader was made, otherwise at most 3.2% off.
        wait_total_s: The sum of these waits.
        step_total_s: Seconds between a batch and the next call: the consumer's own work.
        wait_share: The share of waits in waits and steps: 0 if data was always ready, close to 1 if the
            consumer only waits. None if there was no wait.
        worker_utilisation: The share of their time in which workers were busy, 0 to 1: time of an epoch in
            which a worker does not wait for a task. Batches count when the consumer takes them from their
            worker. None without workers and with torch's own.
        cache_hits: Samples of `CachedDataset`s that were found in the cache. It includes batches that were
            fetched and that no caller received. None if no sample of one was read, and with torch's own
            iterators.
        cache_misses: Samples of `CachedDataset`s that were read from their source, as above.
        num_copies: Batches that were copied because slots were scarce: the caller holds many batches, or
            `ring_bytes` is small.
        num_restarts: Dead workers that were replaced.
    """

    num_batches: int
    num_samples: int
    nbytes: int | None
    num_epochs: int
    elapsed_s: float
    first_batch_wait_s: float
    wait_p50_s: float | None
    wait_p95_s: float | None
    wait_max_s: float | None
    wait_total_s: float
    step_total_s: float
    wait_share: float | None
    worker_utilisation: float | None
    cache_hits: int | None
    cache_misses: int | None
    num_copies: int
    num_restarts: int

    def as_dict(self) -> dict[str, float]:
        """The figures by name, without those that are None; for a logger of metrics."""
        fields = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: value for name, value in fields if value is not None}

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        return f"<code>{html.escape('; '.join(_lines(self)))}</code>"


@dataclass(slots=True)
class Counts:
    """The figures of one loader as they are counted; they only grow. Times are in nanoseconds."""

    num_batches: int = 0
    num_samples: int = 0
    nbytes: int = 0
    num_unknown: int = 0  # batches whose bytes are unknown
    num_epochs: int = 0
    first_wait_ns: int = 0
    wait_ns: int = 0
    wait_max_ns: int = 0
    step_ns: int = 0
    other_ns: int = 0  # in calls that returned no batch
    workers_ns: int = 0  # time of each epoch, for each of its workers
    busy_us: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    num_copies: int = 0
    num_restarts: int = 0
    histogram: list[int] = dataclasses.field(default_factory=lambda: [0] * _NUM_BUCKETS)

    def add_wait(self, wait_ns: int) -> None:
        """Count a wait for a batch."""
        self.wait_ns += wait_ns
        if wait_ns > self.wait_max_ns:
            self.wait_max_ns = wait_ns
        self.histogram[bucket_of(wait_ns)] += 1


_SUMS = [field.name for field in dataclasses.fields(Counts) if field.name not in ("wait_max_ns", "histogram")]


# One call for a batch: the clock of its iterator, when the caller asked, when the call ended, and the samples
# and bytes of the batch (None: unknown bytes). An error, or the end, has None in place of samples and bytes.
Call = tuple["Clock", int, int, "tuple[int, int | None] | None"]
_clock_of = operator.itemgetter(0)


class Recorder:
    """The figures of one loader, and when they are reported.

    Calls for batches are only listed while batches are delivered, and counted many at a time: between two
    batches, all that counting touches would have to come from memory again.

    Args:
        owner: The loader; not kept alive.

    Attributes:
        tally: What its workers add to.
        calls: Calls for batches that were not counted yet. Appending to a list needs no lock.
        reports: Whether `log_stats` is on.
    """

    def __init__(self, owner: Any = None) -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        self._pid = os.getpid()
        self.tally = Tally()
        self.calls: list[Call] = []
        self.reports = False
        # Reentrant: a signal handler may ask for the figures while its thread counts.
        self._lock = threading.RLock()
        self._counts = Counts()  # without the tally's figures
        self._since: Counts | None = None  # the figures at the last reset
        self._every_ns = 0
        self._due_ns = 0
        self._callback: Callable[[LoaderStats], Any] | None = None
        self._reported = Counts()  # the figures at the last report

    def belongs_to(self, loader: Any) -> bool:
        """Whether it was made for this object in this process; not for one that this was copied from."""
        return self._owner is not None and self._owner() is loader and self._pid == os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        return Recorder, ()  # it belongs to no loader: the loader that was copied with it makes its own

    def count(self) -> None:
        """Count the calls that were listed."""
        with self._lock:
            num_calls = len(self.calls)
            calls = self.calls[:num_calls]
            del self.calls[:num_calls]  # other threads append meanwhile
            for clock, own in itertools.groupby(calls, _clock_of):
                clock.count(self._counts, own)

    def counts(self) -> Counts:
        """A copy of all figures."""
        with self._lock:
            self.count()
            histogram = self._counts.histogram.copy()
            return dataclasses.replace(self._counts, histogram=histogram, **self.tally.totals()._asdict())

    def stats(self, *, reset: bool = False) -> LoaderStats:
        """The figures since the last reset."""
        with self._lock:
            counts, since = self.counts(), self._since
            if reset:
                self._since = counts
        return stats_of(counts, since)

    def report_every(self, every_s: float | None, callback: Callable[[LoaderStats], Any] | None) -> None:
        """Report the figures of each interval; None ends it."""
        with self._lock:
            self.reports = every_s is not None
            self._callback = callback
            self._every_ns = round((every_s or 0) * _NS_PER_S)
            self._due_ns = time.perf_counter_ns() + self._every_ns
            self._reported = self.counts()

    def report_if_due(self) -> None:
        """Report the figures since the last report, if the time has come.

        Raises:
            Exception: The error of the user's callback.
        """
        now_ns = time.perf_counter_ns()
        if now_ns < self._due_ns:
            return
        with self._lock:
            if now_ns < self._due_ns or not self.reports:
                return  # another thread reports
            self._due_ns = now_ns + self._every_ns  # first: the callback may iterate over the loader itself
            before, self._reported = self._reported, self.counts()
            stats, callback = stats_of(self._reported, before), self._callback
        if callback is not None:
            callback(stats)
        else:
            log.info("loader: %s", "; ".join(_lines(stats)))


def recorder_of(loader: Any) -> Recorder:
    """The recorder of this loader in this process."""
    recorder: Recorder | None = vars(loader).get("_recorder")
    if recorder is None:
        recorder = vars(loader).setdefault("_recorder", Recorder(loader))
    if not recorder.belongs_to(loader):  # a copy's, an unpickled loader's, or the parent process's
        recorder = vars(loader)["_recorder"] = Recorder(loader)
    return recorder


class Clock:
    """Measures one epoch of one iterator: the consumer's steps and its waits.

    Args:
        recorder: Counts them for the loader.
        num_workers: The number of workers; None: they do not report how busy they are.
        auto_workers: Is told the times of the epoch; None if the number of workers was not measured.
        began_ns: When the epoch began, in the time of `perf_counter_ns`.

    Attributes:
        recorder: As given.
    """

    __slots__ = (
        "_auto_workers",
        "_epoch_ns",
        "_has_ended",
        "_iter_ns",
        "_num_steps",
        "_num_workers",
        "_returned_ns",
        "_step_ns",
        "_wait_ns",
        "recorder",
    )

    def __init__(
        self, recorder: Recorder, num_workers: int | None, auto_workers: AutoWorkers | None, began_ns: int
    ) -> None:
        self.recorder = recorder
        self._num_workers = num_workers or 0
        self._auto_workers = None if num_workers is None else auto_workers
        # When the loader last returned to its caller, at first from iter(loader).
        self._returned_ns = time.perf_counter_ns()
        self._iter_ns: int | None = self._returned_ns - began_ns  # None once the first batch was counted
        self._has_ended = False
        self._epoch_ns = 0
        self._num_steps = self._step_ns = self._wait_ns = 0  # of this epoch, without its first batch

    def count(self, counts: Counts, calls: Iterable[Call]) -> None:
        """Count calls of this epoch, in their order; see `Call`."""
        returned_before_ns = self._returned_ns
        epoch_ns = 0
        for _, called_ns, returned_ns, size in calls:
            # Threads that share an iterator wait at the same time.
            step_ns = called_ns - returned_before_ns if called_ns > returned_before_ns else 0
            wait_ns = returned_ns - called_ns
            returned_before_ns = returned_ns
            counts.step_ns += step_ns
            epoch_ns += step_ns + wait_ns
            if size is None:
                counts.other_ns += wait_ns
                continue
            num_samples, nbytes = size
            counts.num_batches += 1
            counts.num_samples += num_samples
            if nbytes is None:
                counts.num_unknown += 1
            else:
                counts.nbytes += nbytes
            if self._iter_ns is None:
                counts.add_wait(wait_ns)
                self._num_steps += 1
                self._step_ns += step_ns
                self._wait_ns += wait_ns
            else:
                counts.num_epochs += 1
                counts.first_wait_ns += wait_ns + self._iter_ns
                epoch_ns += self._iter_ns
                self._iter_ns = None
        self._returned_ns = returned_before_ns
        self._epoch_ns += epoch_ns
        counts.workers_ns += self._num_workers * epoch_ns

    def failed(self, called_ns: int) -> None:
        """The caller receives an error instead of a batch."""
        self.recorder.calls.append((self, called_ns, time.perf_counter_ns(), None))

    def ended(self, called_ns: int) -> None:
        """The caller receives the end of the epoch; it may ask again and again."""
        if self._has_ended:
            return
        self._has_ended = True
        self.failed(called_ns)
        self.recorder.count()
        if self._auto_workers is not None and self._num_steps:
            per_step_s = _NS_PER_S * self._num_steps
            means_s = self._step_ns / per_step_s, self._wait_ns / per_step_s
            self._auto_workers.note_epoch(self._num_workers, *means_s, self._epoch_ns / _NS_PER_S)


class MeasuredIterator:
    """The base of all iterators. `_next` returns a batch and puts its size into `sizes`.

    Attributes:
        clock: Measures the epoch; None: an iterator around this one measures.
        sizes: For each batch that `_next` returned and that was not counted yet: its samples, and its bytes
            (None: unknown).
        num_measured_workers: The number of workers; None: they do not report how busy they are.
    """

    num_measured_workers: int | None = None
    clock: Clock | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sizes: list[tuple[int, int | None]] = []

    def _next(self) -> Any:
        raise NotImplementedError

    def __next__(self) -> Any:
        clock = self.clock
        if clock is None:
            return self._next()
        recorder = clock.recorder
        if recorder.reports:
            recorder.report_if_due()
        called_ns = time.perf_counter_ns()
        try:
            batch = self._next()
        except StopIteration:
            clock.ended(called_ns)
            raise
        except BaseException:
            clock.failed(called_ns)
            raise
        calls = recorder.calls
        # The newest size: an interrupted call may have left an older one.
        calls.append((clock, called_ns, time.perf_counter_ns(), self.sizes.pop()))
        if len(calls) >= MOST_CALLS:
            recorder.count()
        return batch


def stats_of(counts: Counts, since: Counts | None) -> LoaderStats:
    """The figures between two moments; ``since`` is None for all figures."""
    sums = {name: getattr(counts, name) for name in _SUMS}
    histogram, longest_ns = counts.histogram, float(counts.wait_max_ns)
    if since is not None:
        sums = {name: number - getattr(since, name) for name, number in sums.items()}
        histogram = [number - before for number, before in zip(histogram, since.histogram, strict=True)]
        longest_ns = min(longest_ns, _quantile_ns(histogram, 1.0) or 0)
    wait_s, step_s, first_s = (sums[name] / _NS_PER_S for name in ("wait_ns", "step_ns", "first_wait_ns"))
    num_waits = sum(histogram)
    accesses = sums["cache_hits"] + sums["cache_misses"]
    workers_s = sums["workers_ns"] / _NS_PER_S
    return LoaderStats(
        num_batches=sums["num_batches"],
        num_samples=sums["num_samples"],
        nbytes=None if sums["num_unknown"] else sums["nbytes"],
        num_epochs=sums["num_epochs"],
        elapsed_s=first_s + wait_s + step_s + sums["other_ns"] / _NS_PER_S,
        first_batch_wait_s=first_s,
        wait_p50_s=_quantile_s(histogram, 0.5, longest_ns),
        wait_p95_s=_quantile_s(histogram, 0.95, longest_ns),
        wait_max_s=longest_ns / _NS_PER_S if num_waits else None,
        wait_total_s=wait_s,
        step_total_s=step_s,
        wait_share=wait_s / (wait_s + step_s) if num_waits and wait_s + step_s else None,
        worker_utilisation=min(1.0, sums["busy_us"] / _US_PER_S / workers_s) if workers_s else None,
        cache_hits=sums["cache_hits"] if accesses else None,
        cache_misses=sums["cache_misses"] if accesses else None,
        num_copies=sums["num_copies"],
        num_restarts=sums["num_restarts"],
    )


def bucket_of(time_ns: int) -> int:
    """The bucket of a time in a histogram: one for each ns below 32 ns, then 16 for each doubling."""
    shift = max(0, time_ns.bit_length() - _SHARE_BITS - 1)
    return (shift << _SHARE_BITS) + (time_ns >> shift)


def middle_ns(bucket: int) -> float:
    """The middle of the times in a bucket."""
    shift = max(0, (bucket >> _SHARE_BITS) - 1)
    least = (bucket - (shift << _SHARE_BITS)) << shift
    return least + ((1 << shift) - 1) / 2


def _quantile_ns(histogram: list[int], share: float) -> float | None:
    """A time that ``share`` of the times do not exceed, up to the width of its bucket; None without times."""
    rank = math.ceil(share * sum(histogram))
    for bucket, number in enumerate(histogram):
        rank -= number
        if number and rank <= 0:
            return middle_ns(bucket)
    return None


def _quantile_s(histogram: list[int], share: float, longest_ns: float) -> float | None:
    found_ns = _quantile_ns(histogram, share)
    return None if found_ns is None else min(found_ns, longest_ns) / _NS_PER_S


# --- as text ----------------------------------------------------------------------------------------------


def _lines(stats: LoaderStats) -> list[str]:
    lines = [_amounts(stats)]
    if stats.num_epochs:
        lines.append(f"first batches: {_duration(stats.first_batch_wait_s / stats.num_epochs)} on average")
    if stats.wait_share is not None:
        quantiles = (stats.wait_p50_s, stats.wait_p95_s, stats.wait_max_s)
        p50, p95, longest = (_duration(seconds or 0.0) for seconds in quantiles)
        lines.append(
            f"waits: {p50} (p50), {p95} (p95), {longest} (max); {stats.wait_share:.1%} of the time after the "
            "first batch"
        )
    rest = []
    if stats.worker_utilisation is not None:
        rest.append(f"workers {stats.worker_utilisation:.0%} busy")
    if stats.cache_hits is not None and stats.cache_misses is not None:
        rest.append(f"cache: {stats.cache_hits:,} hits, {stats.cache_misses:,} misses")
    if stats.num_copies:
        rest.append(f"{stats.num_copies:,} batches copied because slots were scarce")
    if stats.num_restarts:
        rest.append(f"{stats.num_restarts:,} workers restarted")
    return [*lines, "; ".join(rest)] if rest else lines


def _amounts(stats: LoaderStats) -> str:
    nbytes = "" if stats.nbytes is None else f", {readable_size(stats.nbytes)}"
    rate = f" ({stats.num_samples / stats.elapsed_s:,.0f} samples/s)" if stats.elapsed_s else ""
    return (
        f"{stats.num_batches:,} batches, {stats.num_samples:,} samples{nbytes} "
        f"in {_duration(stats.elapsed_s)}{rate}"
    )


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
