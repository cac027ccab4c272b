"""loader.stats(): what is counted for each kind of loader."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import os
import pickle
import signal
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Subset

import fastload
from fastload import DataLoader
from fastload.epochs import stats
from fastload.epochs.runtime import runtime_of
from fastload.epochs.stats import Counts, stats_of
from fastload.workers.messages import WorkerCounters
from tests.faults import zoo
from tests.kit import datasets, torchs_own
from tests.kit.batches import read_epoch

if TYPE_CHECKING:
    from pathlib import Path

# One of each kind of iterator.
WAYS: list[dict[str, Any]] = [
    {},
    {"num_workers": 2},
    {"num_workers": 2, "worker_type": "thread"},
    {"num_workers": 2, "in_order": False},
    {"num_workers": 2, **torchs_own.FORK},
    {"num_workers": 1, "device": "cpu", "device_transform": torch.clone},
    {"num_workers": 1, "multiprocessing_context": "forkserver"},
]
OURS = [way for way in WAYS if way.get("multiprocessing_context") not in torchs_own.FORK.values()]
S = 1_000_000_000  # ns
WAIT_NS = st.integers(0, 2**62)


def row(index: int) -> Any:
    """A sample."""
    return torch.full((3,), index)


def fails_at_5(index: int) -> Any:
    """An error in one batch."""
    if index == 5:
        raise OSError("broken")
    return row(index)


ROWS = datasets.Made(row, 22)  # batches of 4: five of them, and one of 2 samples


def _name_of(way: dict[str, Any]) -> str:
    return "-".join(f"{key}={getattr(value, '__name__', value)}" for key, value in way.items()) or "plain"


def cached() -> Any:
    """A cache that is filled."""
    dataset = fastload.CachedDataset(ROWS, cache="ram")
    dataset.fill(0, progress=False)
    return dataset


def known(loader: Any) -> set[str]:
    """The names of figures that are not zero."""
    return {name for name, value in loader.stats().as_dict().items() if value}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time of `perf_counter_ns`, which the test moves on; it stands still otherwise."""
    now = [1_000 * S]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])
    return now


# --- what is counted --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=_name_of)
def test_what_the_caller_receives_counts_once(way: dict[str, Any], clock: list[int]) -> None:
    """With its samples; not what was fetched ahead or skipped by resuming, nor calls after the end."""
    with DataLoader(ROWS, 4, **way) as loader, DataLoader(ROWS, 4, **way) as resumed:
        assert known(loader) == set()
        assert len(list(itertools.islice(loader, 2))) == 2
        first = loader.stats()
        if way in OURS and way.get("in_order", True):
            resumed.load_state_dict(loader.state_dict())
            assert len(list(resumed)) == 4
            assert (resumed.stats().num_batches, resumed.stats().num_samples) == (4, 14)
        iterator = iter(loader)
        list(iterator)
        figures = loader.stats()
        clock[0] += S  # a caller who asks again after the end is not computing
        assert next(iterator, None) is None
        assert loader.stats() == figures
    assert (first.num_epochs, first.num_batches, first.num_samples) == (1, 2, 8)
    assert (figures.num_epochs, figures.num_batches, figures.num_samples) == (2, 8, 30)
    assert figures.num_copies == figures.num_restarts == 0
    assert figures.cache_hits is figures.cache_misses is None


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "batch_size", "num_batches", "num_samples"),
    [
        (datasets.Stream(5), 4, 2, 5),
        (datasets.Stream(5), None, 5, 5),
        (ROWS, None, 22, 22),
        (datasets.Bulk(row, 22), 4, 6, 22),
    ],
    ids=["stream", "stream without batches", "without batches", "__getitems__"],
)
def test_samples_of_other_datasets(
    dataset: Any, batch_size: Any, num_batches: int, num_samples: int, num_workers: int
) -> None:
    """A short batch counts the samples that it has; what has no batches counts one each."""
    with DataLoader(dataset, batch_size, num_workers=num_workers) as loader:
        assert len(list(loader)) == num_batches
        assert (loader.stats().num_batches, loader.stats().num_samples) == (num_batches, num_samples)


@pytest.mark.parametrize("way", WAYS, ids=_name_of)
def test_an_error_in_place_of_a_batch_counts_nothing(way: dict[str, Any]) -> None:
    """The caller may go on; the other batches count, and no error and no end is a wait; workers were busy."""
    with DataLoader(datasets.Made(fails_at_5, 22), 4, **way) as loader:
        got = read_epoch(loader)
        figures, counts = loader.stats(), runtime_of(loader).meter.counts
    num_errors = sum(isinstance(item, OSError) for item in got)
    assert (len(got) - num_errors, num_errors) == (5, 1)
    assert (figures.num_batches, figures.num_samples) == (5, 18)
    assert counts.histogram.total() == 4
    if way and way in OURS:
        assert 0 < (figures.worker_utilization or 0) <= 1


@pytest.mark.usefixtures("lends_small")
@pytest.mark.slow
def test_restarted_workers_and_copies_count(tmp_path: Any) -> None:
    """No batch counts twice; a caller who keeps more batches than there is room for gets copies."""
    make = zoo.DiesOnce(str(tmp_path / "died"), 14, signal.SIGKILL)
    with DataLoader(datasets.Made(make, 40), 4, num_workers=2, max_worker_restarts=2) as loader:
        assert len(list(loader)) == 10
        assert (loader.stats().num_restarts, loader.stats().num_batches) == (1, 10)
    with DataLoader(datasets.Made(datasets.image, 64), 4, num_workers=1, max_prefetch_memory="1B") as loader:
        held = list(loader)
        assert len(held) == 16
        assert 0 < loader.stats().num_copies <= 16


def test_a_transform_that_fails_on_the_device_counts_no_batch(fake: Any) -> None:
    """The sizes of the other batches stay with their batches."""

    def fails(batch: Any) -> Any:
        if int(batch[0, 0]) == 4:
            raise ValueError("the second batch")
        return batch

    with DataLoader(ROWS, 4, device="cuda", device_transform=fails) as loader:
        iterator = iter(loader)
        next(iterator)
        assert (loader.stats().num_batches, loader.stats().num_samples) == (1, 4)  # others were copied ahead
        with pytest.raises(ValueError, match="the second batch"):
            next(iterator)
        assert len(list(iterator)) == 4
        assert (loader.stats().num_batches, loader.stats().num_samples) == (5, 18)


def test_threads_that_share_a_loader_lose_no_count() -> None:
    """Several iterators of one loader, each in a thread, and one iterator of all."""
    loader, other = DataLoader(ROWS, 1), DataLoader(datasets.Made(row, 1001), 2)
    shared = iter(other)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: list(itertools.chain(*[loader] * 20, shared)), range(4)))
    finally:
        sys.setswitchinterval(before)
    assert loader.stats().num_batches == loader.stats().num_samples == 4 * 20 * 22
    assert (other.stats().num_batches, other.stats().num_samples) == (501, 1001)


# --- caches -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("way", OURS, ids=_name_of)
def test_hits_and_misses_of_a_cache(way: dict[str, Any]) -> None:
    """Samples of the first epoch that were not read before are misses; later epochs of this loader hit."""
    dataset = fastload.CachedDataset(ROWS, cache="ram")
    num_cached = dataset.cache_info().num_cached
    with DataLoader(dataset, 4, **way) as loader:
        list(loader)
        first = loader.stats()
        for _ in zip(loader, DataLoader(dataset, 4), strict=True):  # neither another one's accesses count
            dataset[0]  # nor the caller's
        figures = loader.stats()
    assert (first.cache_hits, first.cache_misses) == (num_cached, 22 - num_cached)
    assert (figures.cache_hits, figures.cache_misses) == (num_cached + 22, 22 - num_cached)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("wrap", ["torch's", "a user's", "a file", "a file and a transform"])
def test_every_access_to_a_cached_sample_counts(num_workers: int, wrap: str, tmp_path: Path) -> None:
    """In datasets at any depth; what a file holds is a hit."""
    dataset = inner = cached()
    if wrap == "torch's":
        dataset = ConcatDataset([Subset(inner, range(11)), Subset(inner, range(11, 22))])
    elif wrap == "a user's":
        dataset = datasets.Made(lambda index: inner[2 * index] + inner[2 * index + 1], 11)
    else:
        fastload.CachedDataset.build(ROWS, tmp_path / "rows", progress=False).close()
        transform = None if wrap == "a file" else torch.clone
        dataset = fastload.CachedDataset(ROWS, transform, cache=f"lmdb:{tmp_path}/rows")
    with DataLoader(dataset, 4, num_workers=num_workers) as loader:
        for num_epochs in (1, 2):
            list(loader)
            assert (loader.stats().cache_hits, loader.stats().cache_misses) == (22 * num_epochs, 0)
    if wrap.startswith("a file"):
        dataset.cache.close()


# --- times ------------------------------------------------------------------------------------------------


def test_waits_steps_and_first_batches_are_told_apart(clock: list[int]) -> None:
    """Samples take 1, 2, ... s, the sampler 7 s in iter(), the consumer 100 s before and 10 s a batch."""

    class LateSampler:
        def __iter__(self) -> Any:
            clock[0] += 7 * S
            return iter(range(5))

    def slow(index: int) -> Any:
        clock[0] += (1 + index) * S
        return row(index)

    loader = DataLoader(datasets.Made(slow, 5), 1, sampler=LateSampler())  # type: ignore[arg-type]
    iterator = iter(loader)
    clock[0] += 100 * S
    for _ in iterator:
        clock[0] += 10 * S
    figures = loader.stats()
    assert figures.first_batch_wait_s == 7 + 1
    assert (figures.wait_total_s, figures.wait_max_s) == (2 + 3 + 4 + 5, 5)
    assert figures.wait_p50_s == pytest.approx(3, rel=0.022)
    assert figures.wait_p95_s == pytest.approx(5, rel=0.022)
    assert figures.step_total_s == 100 + 50
    assert figures.elapsed_s == 172
    assert figures.wait_share == 14 / 164


def test_utilization_is_busy_time_by_the_time_of_all_workers(clock: list[int]) -> None:
    """Two workers that were busy for 3 s together, in an epoch of 2 s."""
    loader = DataLoader(ROWS, 4)
    meter = runtime_of(loader).meter
    measured = stats.Clock(meter, 2, clock[0])
    clock[0] += 2 * S
    measured.count(clock[0] - 2 * S, 4)
    meter.add(WorkerCounters(1_000_000))
    meter.add(WorkerCounters(2_000_000))
    assert loader.stats().worker_utilization == 0.75


def test_threads_lose_no_hits_of_the_process() -> None:
    """Loaders of several threads count for `fastload run` together."""
    before, interval = stats.of_process.copied_counts(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def count(meter: stats.Meter) -> None:
        for _ in range(2000):
            meter.add(WorkerCounters(0, 1, 2, {"new": 2}))

    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(count, [stats.Meter() for _ in range(4)]))
    finally:
        sys.setswitchinterval(interval)
    counts = stats.of_process.copied_counts().since(before)
    assert (counts.cache_hits, counts.cache_misses, counts.miss_reasons) == (8000, 16000, {"new": 16000})


@given(st.lists(WAIT_NS, max_size=50), st.lists(WAIT_NS, min_size=1, max_size=300))
def test_quantiles_are_those_of_the_sorted_waits_between_two_moments(earlier_ns: Any, later_ns: Any) -> None:
    """Within the width of a bucket, whatever the waits are; the longest of all is exact."""
    counts = Counts()
    for wait_ns in earlier_ns:
        counts.add_wait(wait_ns)
    since = copy.deepcopy(counts)
    for wait_ns in later_ns:
        counts.add_wait(wait_ns)
    figures = stats_of(counts.since(since))
    assert figures.wait_total_s == pytest.approx(sum(later_ns) / S)
    for found, share in ((figures.wait_p50_s, 0.5), (figures.wait_p95_s, 0.95), (figures.wait_max_s, 1.0)):
        exact_s = sorted(later_ns)[math.ceil(share * len(later_ns)) - 1] / S
        assert found == pytest.approx(exact_s, abs=0.022 * exact_s + 1e-9)
    longest_ns = max(earlier_ns + later_ns)  # 2**53 ns and more are rounded
    assert stats_of(counts).wait_max_s == pytest.approx(longest_ns / S, rel=1e-15)


# --- whose figures they are -------------------------------------------------------------------------------


def test_a_copied_loader_starts_at_zero() -> None:
    """It counts for itself, as that of a forked process does, and the loader that it was made of goes on."""
    loader = DataLoader(ROWS, 4)
    list(loader)
    for other in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert other.stats().num_batches == 0
        list(other), list(other)
        assert (loader.stats().num_batches, other.stats().num_batches) == (6, 12)
    pid = os.fork()
    if pid == 0:
        before = loader.stats().num_batches
        list(loader)
        os._exit(0 if (before, loader.stats().num_batches) == (0, 6) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert loader.stats().num_batches == 6


def test_a_state_that_knows_its_loader_keeps_it_no_longer_than_a_variable_would() -> None:
    """The garbage collector finds the circle."""
    loader: Any = DataLoader(ROWS, 4)
    runtime_of(loader).failed_samples.append(loader)
    reference = weakref.ref(loader)
    del loader
    gc.collect()
    assert reference() is None


def test_a_reset_starts_over_and_returns_what_was() -> None:
    """Only what comes after it counts."""
    loader = DataLoader(cached(), 4)
    list(loader)
    assert loader.stats(reset=True).num_batches == 6
    assert known(loader) == set()
    assert loader.stats().wait_max_s is loader.stats().wait_p95_s is None
    list(itertools.islice(loader, 2))
    assert (loader.stats().num_batches, loader.stats().cache_hits) == (2, 8)


# --- text -------------------------------------------------------------------------------------------------


def test_figures_as_text() -> None:
    """A few plain lines; what is unknown is left out."""
    counts = Counts(num_batches=3, num_samples=12, num_epochs=1, first_wait_ns=S // 2)
    counts.step_ns, counts.workers_ns = S, 2 * S
    for wait_ns in (S // 4, S // 4):
        counts.add_wait(wait_ns)
    counts.busy_us, counts.cache_hits, counts.cache_misses = 500_000, 1000, 2
    counts.num_copies, counts.num_restarts = 3, 4
    assert str(stats_of(counts)) == (
        "3 batches, 12 samples in 2 s (6 samples/s)\n"
        "first batches: 500 ms on average\n"
        "waits: 246 ms (p50), 246 ms (p95), 250 ms (max); 33.3% of the time after the first batch\n"
        "workers 25% busy; cache: 1,000 hits, 2 misses; 3 batches copied instead of lent; "
        "4 workers restarted"
    )
    assert str(stats_of(Counts())) == "0 batches, 0 samples in 0 us"
