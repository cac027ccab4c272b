"""SharedMemoryCache: the contract, layouts, budget, faults and `retain`; test_ram_model.py has the rest."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastload
from fastload.cache.dataset import CachedDataset
from fastload.cache.fingerprint import fingerprint_of
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.cache.ram import layout, owners, registry
from fastload.cache.ram.layout import FRAME_BYTES
from fastload.cache.ram.private import PrivateCache
from fastload.cache.ram.shared import SharedMemoryCache
from fastload.cache.record import ALIGNMENT_BYTES, encode, record_parts
from fastload.errors import SegmentError
from fastload.memory.segment import Segment, round_up
from fastload.nested.spec import flatten
from fastload.nested.tree import first_difference
from fastload.system import locks
from fastload.system.logs import say_once
from tests.cache.contract import CacheContract, SharedContract
from tests.cache.zoo import Files, Images, KnownImages, Made, MixedImages, RaggedImages
from tests.kit.batches import assert_same_samples

MB = 1 << 20
# Of a cache of small images and labels: header, table, pages that are used in part, gaps between columns.
OVERHEAD = 2 * 4096 + 2 * 4096 + 128
ROW_BYTES = 32 * 24 * 3 + 8
pytestmark = pytest.mark.usefixtures("registry")


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


def some(*indices: int) -> Any:
    return np.array(sorted(indices), np.intp)


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


class TestPrivateCache(CacheContract):
    """The contract, in a process's own memory."""

    def make(self, dataset: Images, tmp_path: Any) -> PrivateCache:
        cache = PrivateCache(len(dataset), max_memory=MB)
        put_all(cache, dataset)
        return cache


def tiny(index: int) -> Any:
    """Pairs of numbers, some of which are of another kind, and too large for their row."""
    return (index, float(index)) if index % 3 or not index else (index, np.full(40, index))


def large(index: int) -> Any:
    """Rows of more than two pages; some samples are a little smaller."""
    return np.full((100, 101 - index % 2 * (index > 15)), index, np.uint8)


@pytest.mark.parametrize(
    ("dataset", "max_memory", "num_fitting"),
    [
        (Images(30), OVERHEAD + 10 * ROW_BYTES, 10),
        # A smaller odd sample takes the place that its row leaves.
        (MixedImages(30, shape=(64, 64, 3)), OVERHEAD + 30 * (64 * 64 * 3 + 8), 30),
        # Rows fill whole pages, wherever the samples lie in the dataset.
        (Made(int, 20_000), OVERHEAD - 4096 - 64 + round_up(160_000, 4096) + 16_000, 2000),
    ],
)
def test_a_budget_holds_any_subset_that_fits(dataset: Any, max_memory: int, num_fitting: int) -> None:
    """Samples of any index are stored until the budget is used up, and take no more than it."""
    cache = SharedMemoryCache(len(dataset), [dataset.sample(0)], max_memory=max_memory)
    order = random.Random(1).sample(range(len(dataset)), len(dataset))
    stored = [index for index in order if cache.put(index, dataset.sample(index))]
    assert (cache.layout, cache.capacity) == ("uniform", num_fitting)
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
    left_bytes, fitting = cache._plan.room_bytes, []
    for index in range(30):
        nbytes = round_up(FRAME_BYTES + record_parts(*flatten(dataset.sample(index)))[1], ALIGNMENT_BYTES)
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

    are_rows = [cache.gather(np.array([index]), np.empty) is not None for index in range(5)]
    assert are_rows == [True, True, False, False, True]
    assert [cache.get(index) for index in range(5)] == samples


def test_memory_in_use_is_counted_in_pages_until_the_cache_is_closed() -> None:
    """What was stored, in whole pages; a closed cache has none, lacks nothing and retains nothing."""
    cache = SharedMemoryCache(1000, [np.zeros(MB, np.uint8)], max_memory=1000 * MB)
    cache.put(500, np.ones(MB, np.uint8))
    nbytes = cache.nbytes
    cache.close()
    cache.retain(some(1))
    assert MB < nbytes < MB + 64 * 1024
    assert nbytes % 4096 == 0
    assert (cache.nbytes, cache.num_cached, cache.generation, cache.fd) == (0, 0, 0, -1)
    assert cache.missing().tolist() == []


@pytest.mark.parametrize(("where", "name"), [(os, "pwrite"), (Segment, "reopen"), (locks, "try_lock")])
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


def test_a_half_seen_entry_is_empty_and_a_torn_pointer_leads_nowhere() -> None:
    """What another process is still writing, or has not finished, is not followed."""
    cache = filled(dataset := RaggedImages(12))
    own, other = cache._now.entries[3], cache._now.entries[4]
    for entry in (other, own & 0xFF00, own + 64, 1 << 60, 77):
        cache._now.publish(3, entry)
        assert cache.get(3) is None
    cache._now.publish(3, own)
    segment = cache._now.segment
    os.pwrite(segment.fd, os.urandom(44), layout.SUCCESSOR_AT + 8)
    os.pwrite(segment.fd, (9).to_bytes(8, "little"), layout.SUCCESSOR_AT)
    assert state(cache, dataset) == (1, list(range(12)))


def test_fork_does_not_break_the_lock(monkeypatch: Any) -> None:
    """The lock is given back explicitly: a descriptor that a fork copied meanwhile does not hold it."""
    copies: list[int] = []
    real = locks.try_lock
    monkeypatch.setattr(locks, "try_lock", lambda fd, **wait: copies.append(os.dup(fd)) or real(fd, **wait))
    cache = filled(RaggedImages(3))
    for fd in copies:
        os.close(fd)
    assert cache.num_cached == 3


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


def state(cache: SharedMemoryCache, dataset: Images) -> tuple[int, list[int]]:
    """The generation that a process uses, and the samples that it finds, which must be right."""
    assert_right(cache, dataset)
    return cache.generation, cached(cache)


def retain(cache: SharedMemoryCache, indices: list[int]) -> int:
    """Run in a job: retain some samples; gives the generation afterwards."""
    cache.retain(some(*indices))
    return cache.generation


def is_held(cache: Any, inode: int) -> bool:
    """Whether a process holds memory with this inode, by a descriptor or a mapping."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the descriptor of the listing itself
            if os.stat(f"/proc/self/fd/{fd}").st_ino == inode:
                return True
    lines = Path("/proc/self/maps").read_text().splitlines()
    return any(int(line.split()[4]) == inode for line in lines if layout.SEGMENT_NAME in line)


def put_shuffled(cache: SharedMemoryCache, dataset: Images, seed: int) -> int:
    """Run in a job: store all samples in an order of its own, twice."""
    order = np.random.RandomState(seed).permutation(len(dataset)).tolist()
    return sum(cache.put(index, dataset.sample(index)) for index in [*order, *order])


def test_old_memory_goes_once_all_have_followed_and_nobody_holds_a_sample(start: Any) -> None:
    """A process that has followed holds the old memory neither by a descriptor nor by a mapping."""
    cache = filled(dataset := Images(30, shape=(64, 64, 3)))
    job = start(lambda: (cache, None))
    job.answer()
    sample, before = cache.get(7), cache.nbytes
    old = os.fstat(cache.fd).st_ino
    cache.retain(some(8, 9))
    cache.retain(some(10, 11))
    put_all(cache, dataset)
    were_held = is_held(cache, old), job.ask(is_held, old)
    assert_same_samples(sample, dataset.sample(7))
    del sample
    gc.collect()
    assert were_held == (True, True)
    assert not is_held(cache, old)
    assert job.ask(state, dataset) == (3, [10, 11])
    assert not job.ask(is_held, old)
    assert before > 30 * 64 * 64 * 3
    assert cache.nbytes < 2 * (64 * 64 * 3 + 8) + 6 * 4096


def test_a_generation_that_went_with_its_maker_is_told(start: Any, caplog: Any) -> None:
    """If nobody else holds it, all go on with the old one; a pickle of it says where it was looked for."""
    cache = filled(dataset := Images(30))
    job = start(lambda: (cache, retain(cache, [1, 2])))
    made = job.answer()
    job.kill()
    with caplog.at_level(logging.INFO, "fastload"):
        after = state(cache, dataset)
    text = pickle.dumps(cache)
    cache.close()
    assert (made, after) == (2, (1, list(range(30))))
    assert "the new one is gone" in caplog.text
    with pytest.raises(SegmentError, match=f"the descriptor of process {os.getpid()} cannot be opened"):
        pickle.loads(text)


def test_threads_read_and_store_while_the_cache_moves() -> None:
    """Each thread always sees one whole generation: samples are right, with the old descriptor closed too."""
    cache = make(dataset := MixedImages(30), OVERHEAD + 10 * ROW_BYTES)
    stop = threading.Event()

    def use(first: int) -> None:
        while not stop.is_set():
            for index in range(30):
                cache.put((first + index) % 30, dataset.sample((first + index) % 30))
            for index in range(30):  # other threads may drop samples meanwhile
                if (sample := cache.get(index)) is not None:
                    assert_same_samples(sample, dataset.sample(index))

    with ThreadPoolExecutor(3) as pool:
        threads = [pool.submit(use, first) for first in (0, 10, 20)]
        for turn in range(20):
            cache.retain(some(*((turn * 7 + step) % 30 for step in range(12))))
        stop.set()
        for thread in threads:
            thread.result()
    assert_right(cache, dataset)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Images, RaggedImages, MixedImages])
def test_processes_that_store_and_retain_at_once(kind: Any, start: Any) -> None:
    """What they store fits and is right; one of equal calls of retain() does the work; all agree."""
    max_memory = OVERHEAD + 20 * ROW_BYTES
    cache = make(dataset := kind(80), max_memory)
    jobs = [start(lambda: (cache, None)) for _ in range(3)]
    for job in jobs:
        job.answer()
    for part in (None, range(0, 80, 2), range(40, 80)):
        cache.retain(None if part is None else some(*part))
        for seed, job in enumerate(jobs):
            job.begin(put_shuffled, dataset, seed)
        for job in jobs:
            job.answer()
        held = cached(cache)

        assert held
        assert cache.nbytes <= max_memory + 3 * 4096
        assert part is None or set(held) <= set(part)
        assert kind is not Images or len(held) <= 20
        assert_right(cache, dataset)
    for are_equal in (True, False):
        before = cache.generation
        for number, job in enumerate(jobs):
            job.begin(retain, [1, 2] if are_equal else [1, 2, 10 + number])
        numbers = [job.answer() for job in jobs]
        states = [job.ask(state, dataset) for job in jobs]
        after = before + (1 if are_equal else 3)

        assert states == [(after, [])] * 3
        assert state(cache, dataset) == (after, [])
        # A process may see the next generation of another one before it reads the number of its own.
        assert max(numbers) == after
        assert min(numbers) > before


def found(dataset: Images) -> Any:
    """The registered cache of these samples."""
    return registry.find(fingerprint_of(dataset), len(dataset))


def named(dataset: KnownImages) -> Any:
    """A registered cache of all samples."""
    examples = [dataset.sample(0), dataset.sample(1)]
    cache = registry.create(fingerprint_of(dataset), len(dataset), examples, 64 * MB)
    put_all(cache, dataset)
    return cache


def test_ranks_find_generations_through_each_other(start: Any) -> None:
    """A late one asks the others if the maker has died, a new one finds the newest; entries stay valid."""
    dataset = KnownImages(30)
    cache = named(dataset)
    maker, other = (start(lambda: (found(dataset), None)) for _ in range(2))
    maker.answer(), other.answer()
    before = owners.entries()
    maker.ask(retain, [1, 2, 3])
    followed = other.ask(state, dataset)
    maker.kill()
    reached = state(cache, dataset)
    cache.retain(some(1, 2))
    entries = {entry.pid: entry for entry in owners.entries()}
    (live,) = registry.live_caches()
    owners.unregister(entries[os.getpid()])
    late = start(lambda: ((cache := found(dataset)), state(cache, dataset)))
    assert followed == reached == (2, [])
    assert set(entries.values()) == {entry for entry in before if entry.pid != maker.pid}
    assert (live.num_cached, live.nbytes) == (0, cache.nbytes)
    assert late.answer() == (3, [])


def test_a_generation_that_cannot_be_reached_is_followed_by_retain(monkeypatch: Any) -> None:
    """A process without descriptors stays with its generation, which is right, until it retains itself."""
    refuse = mock.Mock(side_effect=OSError(errno.EMFILE, "Too many open files"))
    dataset = KnownImages(30)
    one, two = named(dataset), found(dataset)
    states = [state(two, dataset)]
    one.retain(some(1, 2, 3))
    with monkeypatch.context() as patch:
        patch.setattr("fastload.cache.ram.owners.open_in_process", refuse)
        states.append(state(two, dataset))
    states.append(state(two, dataset))
    two.retain(some(1, 2, 3))
    assert states == [(1, list(range(30)))] * 3
    assert state(two, dataset) == (2, [])


def test_indices_come_in_many_forms() -> None:
    """Lists, tuples, ranges, arrays and tensors of ints, in any order; fill() then stores those alone."""
    forms: Any = [5, 3, 3, 4], (3, 4, 5), range(3, 6), np.array([3, 4, 5], np.uint8), torch.tensor([3, 4, 5])
    for indices in (*forms, [np.int64(5), 4, 3]):
        ds = CachedDataset(Images(20), max_memory=MB)
        ds.retain(indices)
        ds.fill(num_workers=0)
        assert cached(ds.cache) == [3, 4, 5]


class OtherCache(PrivateCache):
    """A cache of the user's, without `retain`."""

    retain: Any = None


ODD = [0.5], np.zeros(3), torch.zeros(3), [True, False], 3, "abc", {1, 2}, [[1], [2, 3]], [1 << 80]


@pytest.mark.parametrize(
    ("indices", "error", "said"),
    [
        *((indices, TypeError, r"retain\(\) needs a one-dimensional.*but got ") for indices in ODD),
        *(([3, i], IndexError, f"index {i}, but the dataset has 20 samples") for i in (-1, 20, 1 << 62)),
        ("no method", TypeError, r"OtherCache has no method retain\(indices\)"),
    ],
)
def test_what_cannot_be_retained_is_an_error(indices: Any, error: Any, said: str) -> None:
    """Anything but a list of indices, and a cache without the method; and nothing changes."""
    cache = OtherCache(20, max_memory=MB) if "method" in said else "ram"
    ds = CachedDataset(Images(20), cache=cache, max_memory=MB)
    ds.fill(num_workers=0)
    with pytest.raises(error, match=said):
        ds.retain(indices)
    assert ds.cache_info().num_cached == 20


@pytest.mark.slow
def test_workers_that_live_on_follow(tmp_path: Any) -> None:
    """They drop and store samples as the parts change; others are read at each access; batches are right."""
    dataset = Images(40, log=tmp_path / "reads")
    ds = CachedDataset(dataset, max_memory=OVERHEAD + 20 * ROW_BYTES)
    options: Any = {"persistent_workers": True, "multiprocessing_context": "forkserver"}
    loader = fastload.DataLoader(ds, 4, shuffle=True, num_workers=2, **options)
    for part in (range(20), range(20, 40), range(10, 30)):
        ds.retain(part)
        for _ in range(4):  # a sample whose worker did not get the lock is stored in a later epoch
            for images, labels in loader:
                for image, label in zip(images, labels.tolist(), strict=True):
                    assert np.array_equal(image.numpy(), dataset.sample(label)[0])
        before = dataset.reads
        for _ in loader:
            pass
        reads = np.subtract(dataset.reads, before)
        assert cached(ds.cache) == list(part)
        assert reads.tolist() == [0 if index in part else 1 for index in range(40)]
    del loader


def test_a_private_cache_drops_its_own_samples() -> None:
    """Its pickle, which is empty, retains the same ones."""
    dataset, cache = Images(20), PrivateCache(20, max_memory=MB)
    put_all(cache, dataset)
    before = cache.nbytes
    cache.retain(some(3, 4))
    again = pickle.loads(pickle.dumps(cache))
    left = cached(cache), cache.missing().tolist(), cache.nbytes
    cache.retain(None)
    assert left == ([3, 4], [], before // 10)
    assert put_all(again, dataset) == [3, 4]
    assert put_all(cache, dataset) == list(range(20))
    assert_right(cache, dataset)


def test_samples_that_are_not_in_ram_come_from_where_they_are(path: Any) -> None:
    """Only RAM retains: a file takes no memory that could be given back, and is read at every access."""
    for cache, num_cached in ((LMDBCache(path), 20), (None, 0), (["ram", LMDBCache(path)], 2)):
        dataset = Images(20)
        ds = CachedDataset(dataset, cache=cache, max_memory=MB)
        ds.retain([1, 2])
        before = sum(dataset.reads)
        for index in range(20):
            assert_same_samples(ds[index], dataset.sample(index))
        assert ds.cache_info().num_cached == num_cached
        assert sum(dataset.reads) - before == (0 if cache else 20)


def test_both_parts_of_decoded_and_encoded_ram_retain(tmp_path: Any) -> None:
    """Samples that are not retained take room in neither; a full first cache is tried again later."""
    for index in range(40):
        PIL.Image.new("RGB", (64, 64), (index, 2 * index, 3 * index)).save(tmp_path / f"{index:02}.png")
    decoded = Files(tmp_path, is_decoded=True)
    ds = CachedDataset(Files(tmp_path), cache=["ram", "ram-encoded"], max_memory=240_000)
    fast, slow = ds.cache.stores  # type: ignore[union-attr]
    for index in range(40):
        _ = ds[index]
    for part in (range(20), range(20, 40)):
        ds.retain(part)
        for index in range(40):
            assert_same_samples(ds[index], decoded[index])
        assert 10 < len(cached(fast)) < 20
        assert sorted([*cached(fast), *cached(slow)]) == list(part)
