"""FileCache: how much of an epoch it will hold, when its loader stops storing, what it lets others have."""

from __future__ import annotations

import gc
import os
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fastload.cache import file_cache
from fastload.cache.file_cache import FileCache, Forecast
from fastload.cache.ram import file_store, file_table
from fastload.cache.ram.file_store import SharedFileStore
from fastload.readers.front import NUM_EQUAL
from tests.cache.test_file_store import MB, array_of, key_of, put, right

if TYPE_CHECKING:
    from collections.abc import Callable

GB = 1 << 30
pytestmark = pytest.mark.usefixtures("registry_folder", "small_tables")


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes note what they use, and forecasts look, at each access."""
    monkeypatch.setattr(file_table, "_TOUCH_EVERY_S", 0.0)
    monkeypatch.setattr(file_cache, "_JUDGE_EVERY_S", 0.0)


class Growing:
    """A store of which the test decides how much it holds."""

    nbytes, max_bytes = 0, 8 * GB


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How much memory is free, in one number that a test can change."""
    free_bytes = [10 * GB]
    monkeypatch.setattr(file_cache, "unused_bytes", lambda: free_bytes[0])
    return free_bytes


@pytest.fixture
def forecast(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Forecast, Any]]:
    """Makes a forecast of 1,000 batches, and its store."""

    def make(num_ahead: int = 0) -> tuple[Forecast, Any]:
        store: Any = Growing()
        return Forecast(store, 1000, num_ahead), store

    return make


def grow(forecast: Forecast, store: Any, batch_bytes: int, numbers: range) -> None:
    """The store takes what the batches hold, until the loader is to stop."""
    for number in numbers:
        forecast.look(number)
        if not forecast.is_stopped and store.nbytes + batch_bytes <= store.max_bytes:
            store.nbytes += batch_bytes


@pytest.mark.parametrize("num_ahead", [0, 8])
def test_ten_times_the_memory_is_left_to_the_page_cache(
    num_ahead: int, forecast: Any, free: Any, caplog: Any
) -> None:
    """The loader stops long before the limit; one line says what is held and what to expect."""
    made, store = forecast(num_ahead)
    grow(made, store, GB // 10, range(1000))
    assert made.is_stopped
    assert store.nbytes < 0.03 * 8 * GB + num_ahead * GB
    (line,) = caplog.messages
    assert "times the speed" in line
    assert "GB" in line


def test_images_that_are_stored_whole_at_first_are_not_judged(free: Any, caplog: Any) -> None:
    """Where a fixed resize is learnt, the first images take a multiple of what the others do."""
    store: Any = Growing()
    made = Forecast(store, 1000, 0, num_learning=2)
    grow(made, store, GB // 10, range(2))
    grow(made, store, GB // 1000, range(2, 1000))
    assert not made.is_stopped
    assert not caplog.messages


def test_what_fits_to_a_fifth_is_held_beside_the_encoded_files(forecast: Any, free: Any, caplog: Any) -> None:
    """An eighth of 40 GB stays free for them; the line gives the share of the rest."""
    made, store = forecast()
    for number in range(1000):
        free[0] = 10 * GB - store.nbytes
        grow(made, store, 40 * GB // 1000, range(number, number + 1))
    assert made.is_stopped
    assert 4.8 * GB < store.nbytes < 5.2 * GB
    (line,) = caplog.messages
    assert "13% are remembered" in line
    assert "1.14 times" in line


def test_what_fits_to_a_quarter_is_stored_to_the_limit(forecast: Any, free: Any, caplog: Any) -> None:
    """Without a line; so is what a store holds from before."""
    free[0] = 0
    made, store = forecast(8)
    store.nbytes = GB
    grow(made, store, 30 * GB // 1000, range(1000))
    assert not made.is_stopped
    assert store.nbytes > 7.9 * GB
    assert caplog.messages == []


def test_only_the_first_epoch_is_judged(forecast: Any, free: Any, caplog: Any) -> None:
    """Later ones read what is stored, and store what others let go of."""
    free[0] = 0
    made, store = forecast()
    grow(made, store, 0, range(1000))
    grow(made, store, GB, range(8))
    assert not made.is_stopped
    assert caplog.messages == []


def test_an_epoch_that_is_resumed_counts_from_there(forecast: Any, free: Any) -> None:
    """900 batches that were received earlier do not make the rest look small, nor large."""
    made, store = forecast()
    grow(made, store, 20 * GB // 1000, range(900, 1000))
    assert made._all_bytes == pytest.approx(20 * GB, rel=0.05)
    assert not made.is_stopped


def test_a_loader_that_stops_storing_stops_in_all_processes_and_others_go_on(
    start: Any, free: Any, monkeypatch: Any
) -> None:
    """Its workers read what is stored; another loader of the same process stores its files."""
    store = SharedFileStore(MB)
    one, other = FileCache(store), FileCache(store)
    stores = one._decode_cache.store, other._decode_cache.store
    one.expect(1000, NUM_EQUAL, 0, 0)
    monkeypatch.setattr(file_cache, "_VAIN_SHARE", 0.0)
    job = start(lambda: (stores[0], put(stores[0], range(3))))
    assert job.answer() == [0, 1, 2]
    one.poll(1)
    assert put(stores[0], range(10)) == list(range(10))
    free[0] = 0
    one.poll(2)
    assert one.forecast is not None
    assert one.forecast.is_stopped
    assert put(stores[0], range(20)) == job.ask(put, range(20)) == list(range(10))
    assert put(stores[1], range(20)) == list(range(20))
    assert not stores[0].has_room(1)
    assert stores[1].has_room(1)
    file_store.retire_store(store._name)
    for number in range(3, 6):
        one.poll(number)
        store.poll()
    assert put(stores[0], range(10)) == []


def test_a_store_that_holds_next_to_nothing_leaves_the_memory_to_the_system(start: Any, free: Any) -> None:
    """What the loader stored goes, unless another process uses it; later loaders can store again."""
    free[0] = 0
    for other_reads in (False, True):
        store = SharedFileStore(MB)
        cache = FileCache(store)
        cache.expect(1000, NUM_EQUAL, 0, 0)
        cache.poll(1)
        stored = put(store, range(10))
        job = start(lambda held=store: (held, None))
        job.answer()
        if other_reads:
            job = start(lambda: (other := SharedFileStore(MB), right(other, range(10))))
            assert job.answer() == stored
        store._look(file_store.time.monotonic())
        cache.poll(2)
        assert right(store, range(10)) == (stored if other_reads else [])
        store.poll()
        assert put(store, range(10)) == stored
        store.close()
        job.kill()


def test_a_pickled_cache_is_of_the_same_loader() -> None:
    """A spawned worker stops with its loader."""
    cache = FileCache(SharedFileStore(MB))
    assert pickle.loads(pickle.dumps(cache))._loader == cache._loader != FileCache(cache.store)._loader


@pytest.mark.parametrize("ending", ["close", "drop"])
def test_the_last_cache_of_a_process_lets_others_have_its_tables(ending: str) -> None:
    """Not the first of two, and not a fork's copies."""
    store = file_cache.store_of_process(MB)
    assert isinstance(store, SharedFileStore)
    caches = [FileCache(store), FileCache(store)]
    put(store, range(20))
    store._look(file_store.time.monotonic())
    assert store._tables[0].users
    caches.pop().close()
    gc.collect()
    pid = os.fork()
    if pid == 0:
        caches.clear()
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)
    assert store._tables[0].users
    if ending == "close":
        caches[0].close()
    caches.clear()
    gc.collect()
    assert not any(table.users for table in store._tables)


def test_arrays_are_those_of_the_store() -> None:
    """What stands before the store changes nothing."""
    store = SharedFileStore(MB)
    found = FileCache(store)._decode_cache.store
    assert found.put(key_of(1), array_of(1), 1)
    stored = found.get(key_of(1))
    assert stored is not None
    assert np.array_equal(stored.array, array_of(1))
