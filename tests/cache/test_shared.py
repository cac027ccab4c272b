"""SharedMemoryCache: the contract, its layouts, its budget, and what happens when a writer dies or stops."""

from __future__ import annotations

import dataclasses
import fcntl
import logging
import os
import random
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.cache.ram.layout import FRAME_BYTES
from fastload.cache.ram.private import PrivateCache
from fastload.cache.ram.shared import SharedMemoryCache
from fastload.cache.record import ALIGNMENT_BYTES, encode, record_parts
from fastload.memory.segment import Segment, round_up
from fastload.nested.spec import flatten
from fastload.nested.tree import first_difference
from fastload.system import locks
from fastload.system.logs import say_once
from tests.cache.contract import CacheContract, SharedContract
from tests.cache.zoo import Images, MixedImages, RaggedImages
from tests.kit.batches import assert_same_samples

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kit.jobs import Job

MB = 1 << 20
# Of a cache of small images and labels: header, table, pages that are used in part, gaps between columns.
OVERHEAD = 2 * 4096 + 2 * 4096 + 128


def filled(dataset: Images, max_memory: int = 64 * MB) -> SharedMemoryCache:
    """A cache of all samples that fit, its layout chosen as CachedDataset chooses it."""
    last = len(dataset) - 1
    examples = [dataset.sample(index) for index in (0, len(dataset) // 2, last)]
    cache = SharedMemoryCache(len(dataset), examples, max_memory=max_memory)
    for index in range(len(dataset)):
        cache.put(index, dataset.sample(index))
    return cache


class TestSharedMemoryCache(SharedContract):
    """The contract, in shared memory."""

    def make(self, dataset: Images, tmp_path: Any) -> SharedMemoryCache:
        return filled(dataset)


class TestPrivateCache(CacheContract):
    """The contract, in a process's own memory."""

    def make(self, dataset: Images, tmp_path: Any) -> PrivateCache:
        cache = PrivateCache(len(dataset), max_memory=MB)
        for index in range(len(dataset)):
            assert cache.put(index, dataset.sample(index))
        return cache


def test_odd_samples_go_to_the_ragged_area() -> None:
    """Samples that do not match the columns are cached beside them, and come back right."""
    dataset = MixedImages(30)
    cache = filled(dataset)

    assert cache.layout == "uniform"
    assert filled(RaggedImages(12)).layout == "ragged"
    assert cache.num_cached == 30
    for index in range(30):
        assert_same_samples(cache.get(index), dataset.sample(index))
    for index in range(30):
        is_row = cache.gather(np.array([index]), np.empty) is not None
        assert is_row == (dataset.sample(index)[0].shape[0] == 32)


def test_odd_samples_may_use_the_rows_they_leave_empty() -> None:
    """With a budget for the columns alone, a smaller odd sample takes the place that its row leaves."""
    dataset = MixedImages(30, shape=(64, 64, 3))
    row_bytes = 64 * 64 * 3 + 8
    cache = filled(dataset, OVERHEAD + 30 * row_bytes)

    assert cache.capacity == 30
    assert cache.num_cached == 30


def test_small_values_of_other_kinds_do_not_fit_columns() -> None:
    """A text longer than its column and an int beyond 64 bits are cached all the same."""
    samples = [("a", 1), ("b" * 500, 1), ("c", 1 << 80), ("", -(1 << 63))]
    cache = SharedMemoryCache(4, samples[:1], max_memory=MB)
    for index, sample in enumerate(samples):
        assert cache.put(index, sample)

    are_rows = [cache.gather(np.array([index]), np.empty) is not None for index in range(4)]
    assert are_rows == [True, False, False, True]
    assert [cache.get(index) for index in range(4)] == samples


TEN_ROWS = OVERHEAD + 10 * (32 * 24 * 3 + 8)
"""A budget for ten of `Images`."""


def test_rows_hold_any_subset_that_fits() -> None:
    """Samples of any index are stored until the budget is used up; each is read and gathered right."""
    dataset = Images(30)
    cache = SharedMemoryCache(30, [dataset.sample(0)], max_memory=TEN_ROWS)
    order = random.Random(1).sample(range(30), 30)
    stored = [cache.put(index, dataset.sample(index)) for index in order]
    images, labels = cache.gather(np.array(order[:10]), np.empty)  # type: ignore[misc]

    assert cache.capacity == 10
    assert stored == [True] * 10 + [False] * 20
    assert [index for index in range(30) if index in cache] == sorted(order[:10])
    assert labels.tolist() == order[:10]
    for place, index in enumerate(order[:10]):
        assert_same_samples(cache.get(index), dataset.sample(index))
        assert np.array_equal(images[place].numpy(), dataset.sample(index)[0])
    assert cache.nbytes <= TEN_ROWS


def test_small_rows_of_a_random_subset_take_no_more_memory_than_the_budget() -> None:
    """Rows fill whole pages: a tenth of 20,000 numbers takes a tenth of the memory, wherever they lie."""
    cache = SharedMemoryCache(20_000, [0], max_memory=OVERHEAD - 4096 - 64 + round_up(160_000, 4096) + 16_000)
    order = random.Random(1).sample(range(20_000), 20_000)
    stored = [index for index in order if cache.put(index, index)]

    assert stored == order[: cache.capacity]
    assert len(stored) == 2000
    assert cache.nbytes <= cache.max_bytes


class Tiny(Images):
    """Pairs of numbers, some of which are of another kind, and too large for their row."""

    def sample(self, index: int) -> Any:
        return (index, float(index)) if index % 3 or not index else (index, np.full(40, index))


class Large(Images):
    """Rows of more than two pages; some samples are a little smaller."""

    def sample(self, index: int) -> Any:
        return np.full((100, 101 - index % 2 * (index > 15)), index, np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Tiny, Large, MixedImages])
@given(share=st.floats(0, 1.3), seed=st.integers(0, 9))
@settings(max_examples=15)
def test_odd_samples_and_rows_together_stay_within_the_budget(
    kind: type[Images], share: float, seed: int
) -> None:
    """Pages that both kinds touch in part count, and a page of a row counts while another row lies in it."""
    size = {Tiny: 1000, Large: 30, MixedImages: 60}[kind]
    dataset = kind(size)
    samples = [dataset.sample(index) for index in range(size)]
    needed = OVERHEAD + sum(len(encode(sample)) for sample in samples)
    cache = SharedMemoryCache(size, samples[:1], max_memory=8192 + int(share * needed))
    for index in random.Random(seed).sample(range(size), size):
        cache.put(index, samples[index])

    assert cache.nbytes <= max(cache.max_bytes, round_up(4096 + 8 * size, 4096))
    for index in range(size):
        assert index not in cache or first_difference(cache.get(index), samples[index]) is None


def test_put_twice_is_safe() -> None:
    """A second put of a sample is taken as done and uses no memory."""
    for dataset in (Images(12), RaggedImages(12)):
        cache = filled(dataset)
        before = cache.nbytes, cache.num_cached

        assert cache.put(3, dataset.sample(3))
        assert (cache.nbytes, cache.num_cached) == before
        assert_same_samples(cache.get(3), dataset.sample(3))


def test_refused_memory_is_reported_once(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """When the system has no more memory samples are not cached, and one line says so."""
    cache = SharedMemoryCache(4, [1], max_memory=MB)
    cache.put(0, 1)

    def refuse(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    with caplog.at_level(logging.WARNING, "fastload"):
        assert not cache.put(1, 2)
        assert not cache.put(2, 3)

    assert len(caplog.records) == 1
    assert cache.get(0) == 1
    assert cache.get(1) is None


def test_half_seen_entry_is_empty() -> None:
    """An entry that leads elsewhere than to its own record, as one seen half-written would, is empty."""
    dataset = RaggedImages(12)
    cache = filled(dataset)
    own, other = cache._now.entries[3], cache._now.entries[4]
    for entry in (other, own & 0xFF00, own + 64, 1 << 60, 77):
        cache._now.publish(3, entry)
        assert cache.get(3) is None
    cache._now.publish(3, own)

    assert_same_samples(cache.get(3), dataset.sample(3))


def test_stopped_lock_holder_delays_nobody(start: Callable[..., Job]) -> None:
    """While a stopped process holds the lock samples go uncached; once it is killed they are cached."""
    dataset = RaggedImages(4)
    cache = SharedMemoryCache(4, [dataset.sample(0), dataset.sample(1)], max_memory=MB)

    def hold_the_lock() -> Any:
        fcntl.flock(cache._now.segment.reopen(), fcntl.LOCK_EX)
        os.kill(os.getpid(), signal.SIGSTOP)

    job = start(hold_the_lock)
    os.waitid(os.P_PID, job.pid, os.WSTOPPED)
    assert not cache.put(0, dataset.sample(0))
    assert cache.get(0) is None
    job.kill()

    assert cache.put(0, dataset.sample(0))


def test_fork_does_not_break_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is given back explicitly: a descriptor that a fork copied meanwhile does not hold it."""
    copies: list[int] = []
    real = locks.try_lock

    def lock_and_copy(fd: int, *, wait_s: float) -> bool:
        copies.append(os.dup(fd))
        return real(fd, wait_s=wait_s)

    monkeypatch.setattr(locks, "try_lock", lock_and_copy)
    dataset = RaggedImages(3)
    cache = filled(dataset)
    for fd in copies:
        os.close(fd)

    assert cache.num_cached == 3


@pytest.mark.parametrize("max_memory", [9000, 16_500, 22_500])
def test_every_ragged_sample_that_fits_is_cached_and_no_other(max_memory: int) -> None:
    """Records lie one after another: a sample is left out only where less is left than its record takes."""
    dataset = RaggedImages(30)
    cache = filled(dataset, max_memory)
    left_bytes = cache._plan.room_bytes
    fitting = []
    for index in range(30):
        nbytes = round_up(FRAME_BYTES + record_parts(*flatten(dataset.sample(index)))[1], ALIGNMENT_BYTES)
        if nbytes <= left_bytes:
            left_bytes -= nbytes
            fitting.append(index)

    assert [index for index in range(30) if index in cache] == fitting


@pytest.mark.parametrize("num_fitting", [1, 4])
def test_samples_beyond_the_planned_area_are_left_out_though_the_budget_has_room(
    num_fitting: int, caplog: Any
) -> None:
    """Nothing is written behind the ragged area, where the description of the cache lies."""
    samples = [np.full(1000, n, np.uint8) for n in range(8)]
    cache = SharedMemoryCache(8, [samples[0], np.zeros(5, np.uint8)], max_memory=MB)
    record_bytes = round_up(FRAME_BYTES + record_parts(*flatten(samples[0]))[1], ALIGNMENT_BYTES)
    cache._now.plan = dataclasses.replace(cache._plan, ragged_bytes=num_fitting * record_bytes + 64)
    with caplog.at_level(logging.WARNING, "fastload"):
        cached = [cache.put(index, sample) for index, sample in enumerate(samples)]

    assert cached == [index < num_fitting for index in range(8)]
    assert len(caplog.records) == 1
    for index in range(num_fitting):
        assert_same_samples(cache.get(index), samples[index])


@pytest.mark.parametrize("where", ["open", "lock"])
def test_a_refused_lock_leaves_ragged_samples_out_and_is_reported_once(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """No space is claimed without the lock, and no descriptor stays open."""
    say_once.cache_clear()

    def refuse(*_: Any, **__: Any) -> int:
        raise OSError(37, "No locks available")

    dataset = RaggedImages(4)
    cache = SharedMemoryCache(4, [dataset.sample(0), dataset.sample(1)], max_memory=MB)
    if where == "open":
        monkeypatch.setattr(Segment, "reopen", refuse)
    else:
        monkeypatch.setattr(locks, "try_lock", refuse)
    with caplog.at_level(logging.WARNING, "fastload"):
        assert not any(cache.put(index, dataset.sample(index)) for index in range(4))

    assert ["No locks available" in record.getMessage() for record in caplog.records] == [True]
    assert cache.num_cached == 0


def test_memory_in_use_is_counted_in_pages_until_the_cache_is_closed() -> None:
    """At least what was stored, in whole pages; none after close()."""
    cache = SharedMemoryCache(1000, [np.zeros(MB, np.uint8)], max_memory=1000 * MB)
    cache.put(500, np.ones(MB, np.uint8))
    nbytes = cache.nbytes
    cache.close()

    assert MB < nbytes < MB + 64 * 1024
    assert nbytes % 4096 == 0
    assert (cache.nbytes, cache.num_cached) == (0, 0)


def test_missing_samples_are_those_that_are_not_stored_and_have_room() -> None:
    """In a uniform cache as many as rows are left, the first ones; in a closed one, none."""
    images = Images(30)
    small = SharedMemoryCache(30, [images.sample(0)], max_memory=TEN_ROWS)
    for index in (0, 3, 20):
        small.put(index, images.sample(index))
    ragged = RaggedImages(5)
    large = SharedMemoryCache(5, [ragged.sample(0), ragged.sample(1)], max_memory=MB)
    large.put(2, ragged.sample(2))
    found = small.missing().tolist(), large.missing().tolist()
    small.close()

    assert found == ([1, 2, 4, 5, 6, 7, 8], [0, 1, 3, 4])
    assert small.missing().tolist() == []


@pytest.mark.parametrize("max_bytes", [1, 1000])
def test_writes_that_the_system_cuts_short_go_on_where_they_ended(
    max_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the middle of an array, and for a sample of more arrays than one call takes."""
    real = os.pwrite

    def cut(fd: int, data: Any, offset: int) -> int:
        return real(fd, data if len(data) == 8 else data[:max_bytes], offset)  # an entry is never cut

    monkeypatch.setattr(os, "pwrite", cut)
    samples = [[np.full(1 + n % 5, n % 251, np.uint8) for n in range(count)] for count in (3, 1100)]
    cache = SharedMemoryCache(2, samples, max_memory=10 * MB)
    for index, sample in enumerate(samples):
        assert cache.put(index, sample)

    for index, sample in enumerate(samples):
        assert_same_samples(cache.get(index), sample)
