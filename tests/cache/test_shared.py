"""SharedMemoryCache: the contract, layouts, budget and faults; test_ram_model.py has the rest."""

from __future__ import annotations

import contextlib
import logging
import os
import random
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.cache.ram.arena import claimed_bytes
from fastload.cache.ram.shared import SharedMemoryCache
from fastload.cache.records import encode, record_parts
from fastload.memory.segment import Segment, round_up
from fastload.nested.spec import flatten
from fastload.nested.tree import first_difference
from fastload.system import locks
from fastload.system.logs import say_once
from tests.cache.contract import SharedContract
from tests.cache.zoo import Images, Made, MixedImages, RaggedImages
from tests.kit.batches import assert_same_samples

MB = 1 << 20
# Of a cache of small images and labels: header, table, pages that are used in part, gaps between columns.
OVERHEAD = 2 * 4096 + 2 * 4096 + 128
ROW_BYTES = 32 * 24 * 3 + 8
RECORD_BYTES = claimed_bytes(len(encode(Images(1).sample(0))))
pytestmark = pytest.mark.usefixtures("registry_folder")


def make(dataset: Images, max_memory: int = 64 * MB) -> SharedMemoryCache:
    """An empty cache, its layout chosen as CachedDataset chooses it."""
    last = len(dataset) - 1
    examples = [dataset.sample(index) for index in (0, len(dataset) // 2, last)]
    return SharedMemoryCache(len(dataset), examples, max_memory=max_memory)


def put_all(cache: Any, dataset: Images) -> list[int]:
    """Store all samples; the indices of those that were taken."""
    return [index for index in range(len(dataset)) if cache.put(index, dataset.sample(index))]


def filled(dataset: Images) -> SharedMemoryCache:
    """A cache of all samples."""
    cache = make(dataset)
    put_all(cache, dataset)
    return cache


def cached(cache: Any) -> list[int]:
    """The indices that are cached."""
    return [index for index in range(cache.num_samples) if index in cache]


def assert_right(cache: Any, dataset: Images) -> None:
    """Each sample that the cache gives is the dataset's."""
    for index in range(len(dataset)):
        sample = cache.get(index)
        assert (sample is not None) == (index in cache)
        assert sample is None or first_difference(sample, dataset.sample(index)) is None


class TestSharedMemoryCache(SharedContract):
    """The contract, in shared memory."""

    def make(self, dataset: Images, tmp_path: Any) -> SharedMemoryCache:
        return filled(dataset)


def tiny(index: int) -> Any:
    """Pairs of numbers, some of which are of another kind, and too large for their row."""
    return (index, float(index)) if index % 3 or not index else (index, np.full(40, index))


def large(index: int) -> Any:
    """Rows of more than two pages; some samples are a little smaller."""
    return np.full((100, 101 - index % 2 * (index > 15)), index, np.uint8)


@pytest.mark.parametrize(
    ("dataset", "max_memory", "num_fitting"),
    [
        (Images(30), OVERHEAD + 10 * RECORD_BYTES, 10),
        # Records follow one another, wherever the samples lie in the dataset.
        (Made(int, 20_000), OVERHEAD - 4096 - 128 + round_up(160_000, 4096) + 200 * 128, 200),
    ],
)
def test_a_budget_holds_any_subset_that_fits(dataset: Any, max_memory: int, num_fitting: int) -> None:
    """Samples of any index are stored until the budget is used up, and take no more than it."""
    cache = SharedMemoryCache(len(dataset), [dataset.sample(0)], max_memory=max_memory)
    order = random.Random(1).sample(range(len(dataset)), len(dataset))
    stored = [index for index in order if cache.put(index, dataset.sample(index))]
    assert cache.layout == "ragged"
    assert stored == order[:num_fitting]
    assert cache.nbytes <= cache.max_bytes == max_memory


@pytest.mark.slow
@pytest.mark.parametrize("dataset", [Made(tiny, 1000), Made(large, 30), MixedImages(60)])
@given(share=st.floats(0, 1.3), seed=st.integers(0, 9))
@settings(max_examples=15)
def test_odd_samples_and_rows_together_stay_within_the_budget(dataset: Any, share: float, seed: int) -> None:
    """Pages that both kinds touch in part count, and a page of a row counts while another row lies in it."""
    size = len(dataset)
    samples = [dataset.sample(index) for index in range(size)]
    needed = OVERHEAD + sum(len(encode(sample)) for sample in samples)
    cache = SharedMemoryCache(size, samples[:1], max_memory=8192 + int(share * needed))
    for index in random.Random(seed).sample(range(size), size):
        cache.put(index, samples[index])
    assert cache.nbytes <= max(cache.max_bytes, round_up(4096 + 8 * size, 4096))
    assert_right(cache, dataset)


@pytest.mark.parametrize("max_memory", [9000, 22_500])
def test_every_ragged_sample_that_fits_is_cached_and_no_other(max_memory: int) -> None:
    """Records lie one after another: a sample is left out only where less is left than its record takes."""
    cache = make(dataset := RaggedImages(30), max_memory)
    left_bytes, fitting = cache._arena._room_bytes, []
    for index in range(30):
        nbytes = claimed_bytes(record_parts(*flatten(dataset.sample(index)), None)[1])
        if nbytes <= left_bytes:
            left_bytes -= nbytes
            fitting.append(index)
    assert put_all(cache, dataset) == cached(cache) == fitting


def test_small_values_of_other_kinds_do_not_fit_columns() -> None:
    """A text over twice as long as the longest example, or an int beyond 64 bits, is cached all the same."""
    examples = [("a" * 50, 1)]
    samples = [*examples, ("b" * 100, 1), ("c" * 101, 1), ("d", 1 << 80), ("", -(1 << 63))]
    cache = SharedMemoryCache(5, examples, max_memory=MB)
    assert all(cache.put(index, sample) for index, sample in enumerate(samples))

    have_batches = [cache.gather(np.array([index]), np.empty) is not None for index in range(5)]
    assert have_batches == [True, True, True, False, True]
    assert [cache.get(index) for index in range(5)] == samples


def test_memory_in_use_is_counted_in_pages_until_the_cache_is_closed() -> None:
    """What was stored, in whole pages; a closed cache has none, lacks nothing and stores nothing."""
    cache = SharedMemoryCache(1000, [np.zeros(MB, np.uint8)], max_memory=1000 * MB)
    cache.put(500, np.ones(MB, np.uint8))
    nbytes = cache.nbytes
    cache.close()
    assert not cache.put(1, np.ones(MB, np.uint8))
    assert MB < nbytes < MB + 64 * 1024
    assert nbytes % 4096 == 0
    assert (cache.nbytes, cache.num_cached, cache._arena.segment.fd) == (0, 0, -1)
    assert cache.missing().tolist() == []


@pytest.mark.parametrize(("where", "name"), [(os, "pwrite"), (Segment, "reopen"), (locks, "flock_fd")])
def test_what_the_system_refuses_is_left_out(where: Any, name: str, monkeypatch: Any, caplog: Any) -> None:
    """No space is claimed without the lock; what is stored stays; without memory the cache grows no more."""
    say_once.cache_clear()
    cache = make(dataset := RaggedImages(4))
    cache.put(0, dataset.sample(0))
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "fastload"):
        patch.setattr(where, name, mock.Mock(side_effect=OSError(37, "No locks available")))
        put_all(cache, dataset)
        assert cached(cache) == [0]
    assert ["No locks available" in text for text in caplog.messages] == [True]
    put_all(cache, dataset)
    assert cached(cache) == ([0] if name == "pwrite" else [0, 1, 2, 3])
    assert_right(cache, dataset)


def test_a_half_seen_entry_is_empty() -> None:
    """What another process is still writing, or has not finished, is not followed."""
    cache = filled(dataset := RaggedImages(12))
    own, other = cache._arena.entries[3], cache._arena.entries[4]
    for entry in (other, own & 0xFF00, own + 64, 1 << 60, 77):
        cache._arena.publish(3, entry)
        assert cache.get(3) is None
    cache._arena.publish(3, own)
    assert_right(cache, dataset)
    assert cached(cache) == list(range(12))


def test_a_sample_waits_for_the_lock_of_a_busy_process_but_once_for_that_of_a_stopped_one(
    monkeypatch: Any,
) -> None:
    """A holder that is slow, as on a busy machine, costs no sample; one that never returns, one wait."""
    cache = make(dataset := RaggedImages(4))
    fd = cache._arena.segment.reopen()
    assert locks.flock_fd(fd)
    clock_s, sleeps = iter(np.arange(0.0, 60.0, 0.01).tolist()), []

    def sleep(_: float) -> None:
        sleeps.append(1)
        if len(sleeps) == 3:
            os.close(fd)

    monkeypatch.setattr(locks, "time", mock.Mock(monotonic=clock_s.__next__, sleep=sleep))
    assert put_all(cache, dataset) == [0, 1, 2, 3]
    assert len(sleeps) == 3
    cache = make(dataset)
    stopped = cache._arena.segment.reopen()
    assert locks.flock_fd(stopped)
    assert not cache.put(0, dataset.sample(0))
    num_sleeps = len(sleeps)
    assert put_all(cache, dataset) == []
    assert len(sleeps) == num_sleeps
    os.close(stopped)
    assert put_all(cache, dataset) == [0, 1, 2, 3]


def test_fork_does_not_break_the_lock(monkeypatch: Any) -> None:
    """The lock is given back explicitly: a descriptor that a fork copied meanwhile does not hold it."""
    copies: list[int] = []
    real = locks.flock_fd
    monkeypatch.setattr(locks, "flock_fd", lambda fd, **wait: copies.append(os.dup(fd)) or real(fd, **wait))
    cache = filled(RaggedImages(3))
    for fd in copies:
        os.close(fd)
    assert cache.num_cached == 3


def test_a_released_lock_file_is_free_although_a_forked_child_has_its_descriptor(tmp_path: Any) -> None:
    """A process that waits for it gets it at once, not when the child ends."""
    name = str(tmp_path / "lock")
    with locks.lock_file(name) as has_lock:
        waiting = os.open(name, os.O_RDWR)
        inherited = list(map(os.dup, [int(fd) for fd in os.listdir("/proc/self/fd") if _is_open(fd, name)]))
    is_free = locks.flock_fd(waiting)
    for fd in (waiting, *inherited):
        os.close(fd)
    assert (has_lock, len(inherited), is_free) == (True, 2, True)


def _is_open(fd: str, name: str) -> bool:
    with contextlib.suppress(OSError):  # the descriptor of the listing itself
        return os.readlink(f"/proc/self/fd/{fd}") == name
    return False


@pytest.mark.parametrize("most", [1, 1000])
def test_writes_that_the_system_cuts_short_go_on_where_they_ended(most: int, monkeypatch: Any) -> None:
    """Also in the middle of an array, and for a sample of more arrays than one call takes."""
    real = os.pwrite  # an entry, of 8 bytes, is never cut

    def cut(fd: int, data: Any, offset: int) -> int:
        return real(fd, data if len(data) == 8 else data[:most], offset)

    monkeypatch.setattr(os, "pwrite", cut)
    samples = [[np.full(1 + n % 5, n % 251, np.uint8) for n in range(count)] for count in (3, 1100)]
    cache = SharedMemoryCache(2, samples, max_memory=10 * MB)
    for index, sample in enumerate(samples):
        assert cache.put(index, sample)
        assert_same_samples(cache.get(index), sample)


def put_shuffled(cache: SharedMemoryCache, dataset: Images, seed: int) -> int:
    """Run in a job: store all samples in an order of its own, twice."""
    order = np.random.RandomState(seed).permutation(len(dataset)).tolist()
    return sum(cache.put(index, dataset.sample(index)) for index in [*order, *order])


@pytest.mark.slow
def test_processes_store_at_once(start: Any) -> None:
    """Rows and records that they store fit and are right."""
    max_memory = OVERHEAD + 80 * ROW_BYTES
    cache = make(dataset := MixedImages(80), max_memory)
    assert cache.layout == "uniform"
    jobs = [start(lambda: (cache, None)) for _ in range(3)]
    for job in jobs:
        job.answer()
    for seed, job in enumerate(jobs):
        job.begin(put_shuffled, dataset, seed)
    for job in jobs:
        job.answer()
    held = cached(cache)

    assert held
    assert cache.nbytes <= max_memory + 3 * 4096
    assert_right(cache, dataset)
