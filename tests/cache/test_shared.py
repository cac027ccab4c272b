"""SharedMemoryCache: the contract, its layouts, its budget, and what happens when a writer dies or stops."""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import random
import signal
from typing import Any

import numpy as np
import pytest

from fastload.cache.ram import shared
from fastload.cache.ram.private import PrivateCache
from fastload.cache.ram.shared import SharedMemoryCache
from tests.cache.contract import CacheContract, SharedContract
from tests.cache.zoo import Everything, Images, MixedImages, RaggedImages, assert_same

MB = 1 << 20


def filled(dataset: Images, budget: int = 64 * MB) -> SharedMemoryCache:
    """A cache of all samples that fit, its layout chosen as CachedDataset chooses it."""
    last = len(dataset) - 1
    examples = [dataset.sample(index) for index in (0, len(dataset) // 2, last)]
    cache = SharedMemoryCache(len(dataset), examples, budget=budget)
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
        cache = PrivateCache(len(dataset), budget=MB)
        for index in range(len(dataset)):
            assert cache.put(index, dataset.sample(index))
        return cache


@pytest.mark.parametrize(
    ("kind", "layout"), [(Images, "uniform"), (Everything, "uniform"), (RaggedImages, "ragged")]
)
def test_layout_follows_the_examples(kind: type[Images], layout: str) -> None:
    """Examples of one spec make columns, others make records."""
    assert filled(kind(12)).layout == layout


def test_columns_lie_in_one_piece() -> None:
    """Uniform rows are neighbours: a row starts where the one before ends."""
    cache = filled(Images(12))
    starts = [cache.get(index)[0].__array_interface__["data"][0] for index in range(12)]

    assert set(np.diff(starts)) == {32 * 24 * 3}


def test_odd_samples_go_to_the_ragged_area() -> None:
    """Samples that do not match the columns are cached beside them, and come back right."""
    dataset = MixedImages(30)
    cache = filled(dataset)

    assert cache.layout == "uniform"
    assert cache.num_cached == 30
    for index in range(30):
        assert_same(cache.get(index), dataset.sample(index))
    assert cache.cached_rows(np.arange(30)).tolist() == [
        dataset.sample(i)[0].shape[0] == 32 for i in range(30)
    ]


def test_odd_samples_may_use_the_rows_they_leave_empty() -> None:
    """With a budget for the columns alone, a smaller odd sample takes the place that its row leaves."""
    dataset = MixedImages(30, shape=(64, 64, 3))
    row_bytes = 64 * 64 * 3 + 8
    cache = filled(dataset, 8192 + 128 + 30 * row_bytes)

    assert cache.capacity == 30
    assert cache.num_cached == 30


def test_small_values_of_other_kinds_do_not_fit_columns() -> None:
    """A text longer than its column and an int beyond 64 bits are cached all the same."""
    samples = [("a", 1), ("b" * 500, 1), ("c", 1 << 80), ("", -(1 << 63))]
    cache = SharedMemoryCache(4, samples[:1], budget=MB)
    for index, sample in enumerate(samples):
        assert cache.put(index, sample)

    assert cache.cached_rows(np.arange(4)).tolist() == [True, False, False, True]
    assert [cache.get(index) for index in range(4)] == samples


@pytest.mark.parametrize("kind", [Images, RaggedImages, MixedImages])
@pytest.mark.parametrize("budget", [1, 4096, 8192, 20_000, 40_000])
def test_small_budgets_hold(kind: type[Images], budget: int) -> None:
    """Memory in use stays within any budget (to a page a column), and what is cached is right."""
    dataset = kind(30)
    cache = filled(dataset, budget)
    held = [index for index in range(30) if cache.get(index) is not None]

    assert len(held) == cache.num_cached
    assert cache.nbytes <= max(budget, 8192) + 4 * 4096
    for index in held:
        assert_same(cache.get(index), dataset.sample(index))


def test_uniform_budget_keeps_the_first_rows() -> None:
    """Columns that do not fit hold a fixed subset: the first indices."""
    cache = filled(Images(30), 8192 + 128 + 10 * (32 * 24 * 3 + 8))

    assert cache.capacity == 10
    assert [cache.get(index) is not None for index in range(30)] == [True] * 10 + [False] * 20


def test_put_twice_is_safe() -> None:
    """A second put of a sample is taken as done and uses no memory."""
    for dataset in (Images(12), RaggedImages(12)):
        cache = filled(dataset)
        before = cache.nbytes, cache.num_cached

        assert cache.put(3, dataset.sample(3))
        assert (cache.nbytes, cache.num_cached) == before
        assert_same(cache.get(3), dataset.sample(3))


def test_memory_is_taken_as_samples_come() -> None:
    """A cache with a large budget and one sample takes little memory."""
    cache = SharedMemoryCache(1000, [np.zeros(MB, np.uint8)], budget=1000 * MB)
    cache.put(500, np.ones(MB, np.uint8))

    assert cache.nbytes < 3 * MB


def test_refused_memory_is_reported_once(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """When the system has no more memory samples are not cached, and one line says so."""
    cache = SharedMemoryCache(4, [1], budget=MB)
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
    own, other = cache._entries[3], cache._entries[4]
    for entry in (other, own & 0xFF00, own + 64, 1 << 60, 77):
        cache._publish(3, entry)
        assert cache.get(3) is None
    cache._publish(3, own)

    assert_same(cache.get(3), dataset.sample(3))


def write_until_killed(cache: SharedMemoryCache, dataset: Images, order: list[int], started: Any) -> None:
    """Run in a child: store samples until the parent kills it."""
    started.send(None)
    for index in order:
        cache.put(index, dataset.sample(index))
    signal.pause()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Images, RaggedImages, MixedImages])
def test_killed_writer_leaves_correct_reads(kind: type[Images]) -> None:
    """Writers killed at random points leave samples that are right or not there, and space for the others."""
    dataset = kind(400)
    examples = [dataset.sample(index) for index in (0, 200, 399)]
    cache = SharedMemoryCache(400, examples, budget=64 * MB)
    chance = random.Random(1)
    context = multiprocessing.get_context("fork")
    for _ in range(12):
        receiver, sender = context.Pipe(duplex=False)
        order = chance.sample(range(400), 400)
        child = context.Process(target=write_until_killed, args=(cache, dataset, order, sender))
        child.start()
        receiver.recv()
        child.join(chance.random() * 0.02)
        child.kill()
        child.join()
        child.close()
        receiver.close()
        sender.close()
        for index in range(400):
            sample = cache.get(index)
            if sample is not None:
                assert_same(sample, dataset.sample(index))

    for index in range(400):
        assert cache.put(index, dataset.sample(index))
        assert_same(cache.get(index), dataset.sample(index))


def hold_the_lock(cache: SharedMemoryCache, held: Any) -> None:
    """Run in a child: take the cursor's lock and stop."""
    fd = cache._segment.reopen()
    fcntl.flock(fd, fcntl.LOCK_EX)
    held.send(None)
    os.kill(os.getpid(), signal.SIGSTOP)


def test_stopped_lock_holder_delays_nobody() -> None:
    """While a stopped process holds the lock samples go uncached; once it is killed they are cached."""
    dataset = RaggedImages(4)
    cache = SharedMemoryCache(4, [dataset.sample(0), dataset.sample(1)], budget=MB)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=hold_the_lock, args=(cache, sender))
    child.start()
    receiver.recv()
    try:
        assert not cache.put(0, dataset.sample(0))
        assert cache.get(0) is None
    finally:
        child.kill()
        child.join()
        child.close()
        receiver.close()
        sender.close()

    assert cache.put(0, dataset.sample(0))


def put_some(cache: SharedMemoryCache, dataset: Images, first: int) -> None:
    """Run in a child: store every sample, beginning somewhere."""
    for index in range(len(dataset)):
        position = (first + index) % len(dataset)
        cache.put(position, dataset.sample(position))


@pytest.mark.parametrize("kind", [Images, RaggedImages, MixedImages])
def test_writers_at_once(kind: type[Images]) -> None:
    """Processes that store the same samples at once leave each of them right."""
    dataset = kind(200)
    cache = SharedMemoryCache(200, [dataset.sample(i) for i in (0, 100, 199)], budget=64 * MB)
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=put_some, args=(cache, dataset, first)) for first in (0, 0, 100)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
        child.close()

    put_some(cache, dataset, 0)  # what lost the race for the lock
    for index in range(200):
        assert_same(cache.get(index), dataset.sample(index))


def test_segment_is_sealed() -> None:
    """Nobody can change the size of the memory under the readers."""
    cache = filled(Images(3))

    with pytest.raises(PermissionError):
        os.ftruncate(cache._segment.fd, 0)


def test_fork_does_not_break_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is given back explicitly: a descriptor that a fork copied meanwhile does not hold it."""
    copies: list[int] = []
    real = shared.try_lock

    def lock_and_copy(fd: int, *, attempts: int) -> bool:
        copies.append(os.dup(fd))
        return real(fd, attempts=attempts)

    monkeypatch.setattr(shared, "try_lock", lock_and_copy)
    dataset = RaggedImages(3)
    cache = filled(dataset)
    for fd in copies:
        os.close(fd)

    assert cache.num_cached == 3
