"""How fast epochs fill a cache: the account of `RateLimit`, with a clock that tests move."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload import CachedDataset
from fastload.cache import rate_limit
from fastload.cache.rate_limit import RateLimit
from fastload.cache.stack import Stack
from tests.cache.zoo import Made

NUM_SAMPLES = 40
CHEAP_S = 0.0001
MS = st.floats(0.0, 0.05)
CLOCK = SimpleNamespace(now_s=0.0)


class SlowCache:
    """Storing takes as long as it is told to."""

    def __init__(self, store_s: list[float]) -> None:
        self.store_s = store_s
        self.stored: set[int] = set()

    def put(self, index: int, sample: Any) -> bool:
        CLOCK.now_s += self.store_s[index % len(self.store_s)]
        self.stored.add(index)
        return True

    def get(self, index: int) -> Any:
        return index if index in self.stored else None

    def gather(self, indices: Any, allocate: Any) -> Any:
        return indices


def slowly(given: Any) -> Any:
    """Takes its time to give it back."""
    CLOCK.now_s += 0.05
    return given


@pytest.fixture(autouse=True)
def clock(monkeypatch: Any, unpaced_caches: None) -> None:
    """Time is still, and caches keep their rate limit."""
    monkeypatch.setattr(rate_limit, "CHEAP_S", CHEAP_S)
    monkeypatch.setattr(time, "perf_counter", lambda: CLOCK.now_s)


def run_epoch(keeper: RateLimit, cache: SlowCache, read_s: float) -> float:
    """Access each sample once; gives the seconds that took."""
    began_s = CLOCK.now_s
    for index in range(NUM_SAMPLES):
        if index in cache.stored:
            keeper.hits += 1
        else:
            CLOCK.now_s += read_s
            keeper.put(cache, index, None, read_s=read_s)
    return CLOCK.now_s - began_s


@given(read_s=MS, store_s=st.lists(MS, min_size=1), epochs=st.integers(1, 6))
def test_no_epoch_takes_much_longer_than_without_a_cache(read_s: float, store_s: Any, epochs: int) -> None:
    """A fifth, what is cheap, what was saved up, and the last sample: no epoch takes more than these."""
    keeper, cache = RateLimit(), SlowCache(store_s)
    saved_s = max(rate_limit._BEGIN_S, rate_limit._MAX_S)
    for _ in range(epochs):
        elapsed_s = run_epoch(keeper, cache, read_s)
        without_s = NUM_SAMPLES * read_s
        max_s = (1 + rate_limit.SHARE) * without_s + NUM_SAMPLES * CHEAP_S + saved_s + max(store_s)
        assert elapsed_s <= max_s + 1e-6


@pytest.mark.parametrize(
    ("read_s", "store_s", "epochs"), [(0.05, 0.05, 3), (0.0, CHEAP_S, 1), (1e-5, CHEAP_S, 1)]
)
def test_few_epochs_store_everything(read_s: float, store_s: float, epochs: int) -> None:
    """Hits pay for what takes long to store; what is stored within 0.1 ms is never put off."""
    keeper, cache = RateLimit(), SlowCache([store_s])
    if store_s == CHEAP_S:
        keeper._budget_s = 0.0  # a larger dataset, of which these are the last samples
    for _ in range(epochs):
        run_epoch(keeper, cache, read_s)
    assert len(cache.stored) == NUM_SAMPLES


@pytest.mark.parametrize("in_batches", [False, True])
def test_hits_of_a_tier_pay_for_samples_of_the_next_one(in_batches: bool) -> None:
    """One by one and in batches: without them, few of the samples of a slow file would be in RAM by now."""
    store, file = SlowCache([0.05]), SimpleNamespace(get=slowly)
    stack: Any = Stack(NUM_SAMPLES, [store], behind=file)
    for _ in range(3):
        stored = set(store.stored) if in_batches else set()
        stack.gather(np.array(sorted(stored), np.intp), np.empty)
        assert [stack.get(index) for index in range(NUM_SAMPLES) if index not in stored]
    assert len(store.stored) == NUM_SAMPLES


def test_the_log_says_once_why_a_cache_is_not_full(caplog: Any) -> None:
    """It gives both times, and the way to fill the cache at once."""
    caplog.set_level(logging.INFO, "fastload")
    run_epoch(RateLimit(), SlowCache([0.5]), read_s=0.001)
    (line,) = caplog.messages
    assert "1.00 ms to read and 500.00 ms to store" in line
    assert "CachedDataset.fill()" in line


@pytest.mark.parametrize("way", ["one by one", "in batches", "filled"])
def test_samples_that_are_put_off_are_right_and_stored_later(way: str, monkeypatch: Any) -> None:
    """Each access gives the sample, stored or not, until hits have paid for all; fill() needs one pass."""
    photos = Made(slowly, NUM_SAMPLES)
    dataset = CachedDataset(photos, cache="ram")
    put = dataset.cache.put
    monkeypatch.setattr(dataset.cache, "put", lambda index, sample: put(index, slowly(sample)))
    reads, stored = sum(photos.reads), [dataset.cache_info().num_cached]
    while stored[-1] < NUM_SAMPLES:
        if way == "filled":
            dataset.fill(num_workers=0, progress=False)
        else:
            cached = [index for index in range(NUM_SAMPLES) if way == "in batches" and index in dataset.cache]
            assert not cached or dataset._gather(cached, np.empty).tolist() == cached
            left = sorted({*range(NUM_SAMPLES)} - {*cached})
            assert [dataset[index] for index in left] == left
        stored.append(dataset.cache_info().num_cached)
    assert len(stored) == (2 if way == "filled" else 3)
    assert (sum(photos.reads) - reads == NUM_SAMPLES - stored[0]) == (way == "filled")
