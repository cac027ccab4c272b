"""`retain`: a cache in RAM holds a part of the samples; all processes follow, and no view changes."""

from __future__ import annotations

import errno
import gc
import logging
import multiprocessing
import os
import pickle
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
import pytest
import torch
import torch.utils.data

import fastload
from fastload.cache.dataset import CachedDataset
from fastload.cache.fingerprint import fingerprint_of
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.cache.ram import layout, owners, registry, shared
from fastload.cache.ram.private import PrivateCache
from fastload.cache.ram.shared import SharedMemoryCache
from fastload.errors import SegmentError
from fastload.memory.segment import Segment
from fastload.system.locks import try_lock
from tests.cache.test_shared import OVERHEAD
from tests.cache.zoo import Images, KnownImages, MixedImages, RaggedImages
from tests.kit.batches import assert_same_samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

MB = 1 << 20
ROW_BYTES = 32 * 24 * 3 + 8
TEN_ROWS = OVERHEAD + 10 * ROW_BYTES

pytestmark = pytest.mark.usefixtures("registry")


def make(dataset: Images, max_memory: int = 64 * MB, **options: Any) -> SharedMemoryCache:
    """An empty cache, its layout chosen as CachedDataset chooses it."""
    last = len(dataset) - 1
    examples = [dataset.sample(index) for index in (0, len(dataset) // 2, last)]
    return SharedMemoryCache(len(dataset), examples, max_memory=max_memory, **options)


def filled(dataset: Images, max_memory: int = 64 * MB, **options: Any) -> SharedMemoryCache:
    """A cache of all samples that fit."""
    cache = make(dataset, max_memory, **options)
    put_all(cache, dataset)
    return cache


def put_all(cache: SharedMemoryCache, dataset: Images) -> list[int]:
    """Store all samples; the indices of those that were taken."""
    return [index for index in range(len(dataset)) if cache.put(index, dataset.sample(index))]


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
        if sample is not None:
            assert_same_samples(sample, dataset.sample(index))


def inode(cache: SharedMemoryCache) -> int:
    """The inode of the memory that a cache uses now."""
    return os.fstat(cache._now.segment.fd).st_ino


def is_held(number: int) -> bool:
    """Whether this process holds memory with this inode, by a descriptor or a mapping."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.stat(f"/proc/self/fd/{fd}").st_ino == number:
                return True
        except OSError:  # the descriptor of the listing itself
            continue
    lines = Path("/proc/self/maps").read_text().splitlines()
    return any(int(line.split()[4]) == number for line in lines if layout.SEGMENT_NAME in line)


class Child:
    """Another process with the cache; it runs functions of (cache, dataset, *args), one after another."""

    def __init__(self, cache: Any, dataset: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(cache, dataset, other))
        self.process.start()
        other.close()

    @property
    def pid(self) -> int:
        return int(self.process.pid or 0)

    def begin(self, work: Callable[..., Any], *args: Any) -> None:
        """Let it run a function."""
        self._pipe.send((work, args))

    def answer(self) -> Any:
        """What the function that began first returns."""
        return self._pipe.recv()

    def __call__(self, work: Callable[..., Any], *args: Any) -> Any:
        self.begin(work, *args)
        return self.answer()

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.process.close()
        self._pipe.close()


def _serve(cache: Any, dataset: Any, pipe: Connection) -> None:
    while True:
        try:
            work, args = pipe.recv()
        except EOFError:
            return
        pipe.send(work(cache, dataset, *args))


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    """Starts children, which are ended with the test."""
    children: list[Child] = []

    def start(*args: Any) -> Child:
        children.append(Child(*args))
        return children[-1]

    yield start
    for child in children:
        child.end()


def state(cache: SharedMemoryCache, dataset: Images) -> tuple[int, list[int]]:
    """Run in a child: the generation that it uses, and the samples that it finds, which must be right."""
    assert_right(cache, dataset)
    return cache.generation, cached(cache)


def retain(cache: SharedMemoryCache, dataset: Images, indices: list[int]) -> int:
    """Run in a child: retain some samples; gives the generation afterwards."""
    cache.retain(some(*indices))
    return cache.generation


# --- one process ------------------------------------------------------------------------------------------


def test_room_of_dropped_samples_is_used_again() -> None:
    """A cache for ten samples holds the ten of one part, and then the ten of the next part."""
    dataset = Images(30)
    cache = make(dataset, TEN_ROWS)
    held = []
    for first in (0, 10, 20, 5):
        cache.retain(some(*range(first, first + 10)))
        put_all(cache, dataset)
        held.append(cached(cache))
        assert_right(cache, dataset)
        assert cache.nbytes <= TEN_ROWS + 3 * 4096

    assert held == [list(range(first, first + 10)) for first in (0, 10, 20, 5)]


def test_a_held_sample_keeps_its_memory_and_nothing_else_does() -> None:
    """A sample of an old generation keeps that generation's memory, which goes with it."""
    dataset = Images(30, shape=(64, 64, 3))
    cache = filled(dataset)
    sample, old, before = cache.get(7), inode(cache), cache.nbytes
    cache.retain(some(8, 9))
    cache.retain(some(10, 11))
    put_all(cache, dataset)
    assert_same_samples(sample, dataset.sample(7))
    was_held = is_held(old)
    del sample
    gc.collect()

    assert was_held
    assert not is_held(old)
    assert before > 30 * 64 * 64 * 3
    assert cache.nbytes < 2 * (64 * 64 * 3 + 8) + 6 * 4096


def test_the_same_indices_again_do_nothing() -> None:
    """In any order, and repeated; so do all indices of a cache that holds any sample."""
    cache = filled(Images(30))
    cache.retain(some(*range(30)))
    first = cache.generation
    cache.retain(some(1, 2, 3))
    cache.retain(np.array([3, 1, 2, 2]))

    assert (first, cache.generation) == (1, 2)


@pytest.mark.parametrize("refusal", ["cannot create a shared segment", "another process has held its lock"])
def test_a_refusal_leaves_the_cache_as_it_is(
    refusal: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """All samples stay, a warning says so, and no descriptor or lock is left; the lock is not waited for."""
    monkeypatch.setattr(shared, "_RETAIN_WAIT_S", 0.02)
    cache = filled(Images(30))

    def refuse(*_: Any, **__: Any) -> Any:
        raise SegmentError(refusal)

    fd = cache._now.segment.reopen()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "fastload"):
        if "lock" in refusal:
            assert try_lock(fd)
        else:
            patch.setattr(Segment, "create", refuse)
        cache.retain(some(1))
    os.close(fd)
    before = cached(cache)
    cache.retain(some(1))

    assert refusal in caplog.text
    assert (before, cached(cache)) == (list(range(30)), [])


def test_threads_read_and_store_while_the_cache_moves() -> None:
    """Each thread always sees one whole generation: samples are right, with the old descriptor closed too."""
    dataset = MixedImages(30)
    cache = make(dataset, TEN_ROWS)
    stop = threading.Event()
    wrong: list[Exception | AssertionError] = []

    def use(first: int) -> None:
        try:
            while not stop.is_set():
                for index in range(30):
                    cache.put((first + index) % 30, dataset.sample((first + index) % 30))
                for index in range(30):  # other threads may drop samples meanwhile
                    if (sample := cache.get(index)) is not None:
                        assert_same_samples(sample, dataset.sample(index))
        except (Exception, AssertionError) as error:  # noqa: BLE001  # for the thread that looks
            wrong.append(error)

    threads = [threading.Thread(target=use, args=(first,)) for first in (0, 10, 20)]
    for thread in threads:
        thread.start()
    for turn in range(20):
        cache.retain(some(*((turn * 7 + step) % 30 for step in range(12))))
    stop.set()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert_right(cache, dataset)


def test_a_closed_cache_retains_nothing() -> None:
    """After close() the call does nothing."""
    cache = filled(Images(3))
    cache.close()
    cache.retain(some(1))

    assert (cache.generation, cache.fd, cache.get(1)) == (0, -1, None)
    assert not cache.put(1, Images(30).sample(1))


# --- other processes --------------------------------------------------------------------------------------


def test_the_old_memory_is_freed_once_all_processes_have_followed(start: Callable[..., Child]) -> None:
    """A process that has followed holds the old memory neither by a descriptor nor by a mapping."""
    dataset = Images(30)
    cache = filled(dataset)
    child = start(cache, dataset)
    child(state)
    old = inode(cache)
    cache.retain(some(1))
    before = is_held(old), child(holds, old)
    child(state)

    assert before == (False, True)
    assert not child(holds, old)


def test_a_generation_that_went_with_its_maker_is_told(start: Callable[..., Child], caplog: Any) -> None:
    """If nobody else holds it, all go on with the old one."""
    dataset = Images(30)
    cache = filled(dataset)
    child = start(cache, dataset)
    made = child(retain, [1, 2])
    child.process.kill()
    child.process.join()
    with caplog.at_level(logging.INFO, "fastload"):
        after = state(cache, dataset)

    assert (made, after) == (2, (1, list(range(30))))
    assert "the new one is gone" in caplog.text


def holds(cache: SharedMemoryCache, dataset: Images, number: int) -> bool:
    """Run in a child: whether it holds memory with this inode."""
    return is_held(number)


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, False])
def test_processes_that_retain_at_once(same: bool, start: Callable[..., Child]) -> None:
    """With the same indices one of them does the work; with others, one after another, and all agree."""
    dataset = Images(30)
    cache = filled(dataset)
    children = [start(cache, dataset) for _ in range(4)]
    for number, child in enumerate(children):
        child.begin(retain, [1, 2, 3] if same else [1, 2, 3, 10 + number])
    numbers = [child.answer() for child in children]
    states = [child(state) for child in children] + [state(cache, dataset)]

    assert all(one == states[0] for one in states)
    assert states[0][1] == []
    # A process may see the next generation of another one before it reads the number of its own.
    assert numbers == [2] * 4 if same else (min(numbers) >= 2 and max(numbers) == 5)


def open_and_follow(cache: Any, dataset: Images) -> tuple[int, int]:
    """Run in a child: open the cache of this name, as another rank does."""
    global opened
    opened = registry.find(fingerprint_of(dataset), len(dataset))  # type: ignore[arg-type]
    assert opened is not None
    return opened.generation, opened.num_cached


def follow(cache: Any, dataset: Images) -> tuple[int, int]:
    """Run in a child: what the cache that it opened holds now."""
    return opened.generation, opened.num_cached  # type: ignore[union-attr]


def retain_opened(cache: Any, dataset: Images, indices: list[int]) -> int:
    """Run in a child: retain in the cache that it opened."""
    opened.retain(some(*indices))  # type: ignore[union-attr]
    return opened.generation  # type: ignore[union-attr]


opened: SharedMemoryCache | None = None


def named(dataset: KnownImages) -> SharedMemoryCache:
    """A registered cache of all samples."""
    fingerprint = fingerprint_of(dataset)
    assert fingerprint is not None
    examples = [dataset.sample(index) for index in (0, 1)]
    cache = registry.create(fingerprint, len(dataset), examples, 64 * MB)
    put_all(cache, dataset)
    return cache


def test_a_generation_whose_maker_has_died_is_found_through_another_rank(start: Callable[..., Child]) -> None:
    """A rank that follows late asks the other ranks of this cache."""
    dataset = KnownImages(30)
    cache = named(dataset)
    maker, other = start(None, dataset), start(None, dataset)
    maker(open_and_follow)
    other(open_and_follow)
    maker(retain_opened, [1, 2, 3])
    followed = other(follow)
    maker.process.kill()
    maker.process.join()

    assert followed == (2, 0)
    assert state(cache, dataset) == (2, [])


def test_a_rank_that_joins_later_gets_the_newest_generation(start: Callable[..., Child]) -> None:
    """Also through the entry of a rank that has not followed yet."""
    dataset = KnownImages(30)
    cache = named(dataset)
    idle, late = start(None, dataset), start(None, dataset)
    idle(open_and_follow)
    cache.retain(some(1, 2, 3))
    cache.retain(some(1, 2))
    entries = {entry.pid: entry for entry in owners.entries()}
    owners.unregister(entries[os.getpid()])

    assert late(open_and_follow) == (3, 0)


def test_entries_stay_valid_from_generation_to_generation() -> None:
    """The registry names the anchor, whose number does not change."""
    dataset = KnownImages(30)
    cache = named(dataset)
    before = owners.entries()
    cache.retain(some(1, 2, 3))
    (live,) = registry.live_caches()

    assert owners.entries() == before
    assert (live.num_cached, live.nbytes) == (0, cache.nbytes)


def test_a_generation_that_cannot_be_reached_is_followed_by_retain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without descriptors stays with its generation, which is right, until it retains itself."""
    dataset = KnownImages(30)
    one = named(dataset)
    two = registry.find(fingerprint_of(dataset), 30)  # type: ignore[arg-type]
    assert two is not None
    assert state(two, dataset) == (1, list(range(30)))
    one.retain(some(1, 2, 3))
    with monkeypatch.context() as patch:
        patch.setattr(
            "fastload.cache.ram.owners.open_in_process",
            lambda *_: (_ for _ in ()).throw(OSError(errno.EMFILE, "Too many open files")),
        )
        stuck = state(two, dataset)
    still = state(two, dataset)
    two.retain(some(1, 2, 3))

    assert stuck == still == (1, list(range(30)))
    assert state(two, dataset) == (2, [])


def test_a_torn_pointer_is_not_followed() -> None:
    """A pointer that is no entry leads nowhere; the process goes on as it is."""
    dataset = Images(30)
    cache = filled(dataset)
    cache.retain(some(*range(20)))
    put_all(cache, dataset)
    segment = cache._now.segment
    os.pwrite(segment.fd, os.urandom(44), layout.SUCCESSOR_AT + 8)
    os.pwrite(segment.fd, (9).to_bytes(8, "little"), layout.SUCCESSOR_AT)

    assert state(cache, dataset) == (2, list(range(20)))


def test_a_pickle_of_a_cache_that_is_gone_is_an_error() -> None:
    """The error names the process and the descriptor."""
    cache = filled(Images(30))
    text = pickle.dumps(cache)
    cache.close()

    with pytest.raises(SegmentError, match=f"the descriptor of process {os.getpid()} cannot be opened"):
        pickle.loads(text)


def put_shuffled(cache: SharedMemoryCache, dataset: Images, seed: int) -> int:
    """Run in a child: store all samples in an order of its own, twice."""
    order = np.random.RandomState(seed).permutation(len(dataset)).tolist()
    return sum(cache.put(index, dataset.sample(index)) for index in [*order, *order])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Images, RaggedImages, MixedImages])
def test_processes_that_store_at_once_stay_within_the_budget(
    kind: type[Images], start: Callable[..., Child]
) -> None:
    """Before and after retain(), what they store together is right, and is no more than fits."""
    dataset = kind(80)
    max_memory = OVERHEAD + 20 * ROW_BYTES
    cache = make(dataset, max_memory)
    children = [start(cache, dataset) for _ in range(3)]
    for part in (None, range(0, 80, 2), range(40, 80)):
        cache.retain(None if part is None else some(*part))
        for seed, child in enumerate(children):
            child.begin(put_shuffled, seed)
        for child in children:
            child.answer()
        held = cached(cache)

        assert held
        assert cache.nbytes <= max_memory + 3 * 4096
        assert part is None or set(held) <= set(part)
        assert kind is not Images or len(held) <= 20
        assert_right(cache, dataset)


# --- through datasets and loaders -------------------------------------------------------------------------


def test_indices_come_in_many_forms() -> None:
    """Lists, tuples, ranges, arrays and tensors of ints, in any order; duplicates count once."""
    ds = CachedDataset(Images(20), max_memory=MB)
    same = (3, 4, 5), range(3, 6), np.array([3, 4, 5], np.uint8), torch.tensor([3, 4, 5]), [np.int64(5), 4, 3]
    for indices in ([5, 3, 3, 4], *same):
        ds.retain(None)
        ds.fill(num_workers=0)
        ds.retain(indices)
        ds.fill(num_workers=0)
        assert cached(ds.cache) == [3, 4, 5]


def test_what_is_no_list_of_indices_is_refused() -> None:
    """A TypeError, or an IndexError that names the index, and nothing changes."""
    ds = CachedDataset(Images(20), max_memory=MB)
    ds.fill(num_workers=0)
    odd = (
        [0.5],
        np.zeros(3),
        torch.zeros(3),
        [True, False],
        3,
        "abc",
        {1, 2},
        [[1], [2]],
        [[1], [2, 3]],
        [1 << 80],
    )
    for indices in odd:
        with pytest.raises(TypeError, match=r"retain\(\) needs a one-dimensional.*but got "):
            ds.retain(indices)
    for index in (-1, 20, 1 << 62):
        with pytest.raises(IndexError, match=f"index {index}, but the dataset has 20 samples"):
            ds.retain([3, index])
    assert ds.cache_info().num_cached == 20


def test_other_samples_are_read_from_the_source() -> None:
    """Each access reads them, and they are right; fill() stores the retained ones only."""
    dataset = Images(20)
    ds = CachedDataset(dataset, max_memory=MB)
    ds.retain(range(10))
    info = ds.fill(num_workers=0)
    before = list(dataset.reads)
    for _ in range(2):
        for index in range(20):
            assert_same_samples(ds[index], dataset.sample(index))
    reads = np.subtract(dataset.reads, before).tolist()

    assert info.num_cached == 10
    assert reads == [0] * 10 + [2] * 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_loader", "method"), [(fastload.DataLoader, "forkserver"), (torch.utils.data.DataLoader, "fork")]
)
def test_workers_that_live_on_follow(make_loader: Any, method: str, tmp_path: Path) -> None:
    """They drop and store samples as the parts change, and all batches are right."""
    dataset = Images(40, log=tmp_path / "reads")
    ds = CachedDataset(dataset, max_memory=OVERHEAD + 20 * ROW_BYTES)
    loader = make_loader(
        ds,
        4,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context=method,
        shuffle=True,
    )
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
    dataset = Images(20)
    cache = PrivateCache(20, max_memory=MB)
    for index in range(20):
        cache.put(index, dataset.sample(index))
    before = cache.nbytes
    cache.retain(some(3, 4))
    again = pickle.loads(pickle.dumps(cache))
    found = cached(cache), cache.missing().tolist(), cache.nbytes
    cache.retain(None)

    assert found == ([3, 4], [], before // 10)
    assert [index for index in range(20) if again.put(index, dataset.sample(index))] == [3, 4]
    assert all(cache.put(index, dataset.sample(index)) for index in range(20))
    assert_right(cache, dataset)


def test_without_ram_there_is_nothing_to_do(path: Path) -> None:
    """A file takes no memory that could be given back; without a cache the dataset is read as ever."""
    for cache in (LMDBCache(path), None):
        ds = CachedDataset(Images(20), cache=cache)
        ds.retain([1])
        assert_same_samples(ds[2], Images(20).sample(2))
        assert ds.cache_info().num_cached == (0 if cache is None else 20)


def test_tiers_retain_in_ram(path: Path) -> None:
    """Samples that are not retained come from the file at every access, and stay out of RAM."""
    dataset = Images(20)
    ds = CachedDataset(dataset, cache=["ram", LMDBCache(path)], max_memory=MB)
    ds.retain([1, 2])
    before = list(dataset.reads)
    for index in range(20):
        assert_same_samples(ds[index], dataset.sample(index))

    assert dataset.reads == before
    assert ds.cache_info().num_cached == 2


def test_both_parts_of_decoded_and_encoded_ram_retain(tmp_path: Path) -> None:
    """Samples that are not retained take room in neither; a full first cache is tried again later."""
    paths = [tmp_path / f"{index:02}.png" for index in range(40)]
    for index, path in enumerate(paths):
        PIL.Image.new("RGB", (64, 64), (index, 2 * index, 3 * index)).save(path)
    ds = CachedDataset(Files(paths), cache=["ram", "ram-encoded"], max_memory=240_000)
    fast, slow = ds.cache.stores  # type: ignore[union-attr]
    for index in range(40):
        _ = ds[index]
    parts = range(20), range(20, 40)
    found = []
    for part in parts:
        ds.retain(part)
        for index in range(40):
            assert np.array_equal(ds[index], fastload.read_image(paths[index]))
        found.append((cached(fast), cached(slow)))

    for (decoded, encoded), part in zip(found, parts, strict=True):
        assert 10 < len(decoded) < 20
        assert sorted([*decoded, *encoded]) == list(part)


class Files(torch.utils.data.Dataset[Any]):
    """Undecoded images."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return fastload.EncodedImage(self.paths[index])


class OtherCache(PrivateCache):
    """A cache of the user's, without `retain`."""

    retain: Any = None


def test_a_cache_without_the_method_is_refused() -> None:
    """The error names the class and the method that it needs."""
    ds = CachedDataset(Images(20), cache=OtherCache(20, max_memory=MB))

    with pytest.raises(TypeError, match=r"OtherCache has no method retain\(indices\)"):
        ds.retain([1])
