"""LMDBCache: the contract, what opening refuses, files that change while they are open, keys and values."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import lmdb
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

import fastload
from fastload.cache import finished, lmdb_store
from fastload.cache.build import build_lmdb
from fastload.cache.dataset import CachedDataset
from fastload.cache.fingerprint import Fingerprint
from fastload.cache.finished import LMDBCache
from fastload.cache.records import decode
from fastload.cache.store import index_key
from fastload.errors import CacheCorruptError, CacheError, CacheMismatchError
from tests.cache.build_zoo import BrokenImages
from tests.cache.contract import CacheContract
from tests.cache.zoo import Everything, Images, Made, RaggedImages
from tests.kit.batches import assert_same_samples

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class TestOneFile(CacheContract):
    """The contract, in one file."""

    def make(self, dataset: Images, tmp_path: Any) -> LMDBCache:
        return build_lmdb(dataset, tmp_path / "cache", num_workers=0)


def foreign(path: Path) -> None:
    """An LMDB file that another program made."""
    environment = lmdb.open(str(path), subdir=False, lock=False)
    with environment, environment.begin(write=True) as transaction:
        transaction.put(b"key", b"value")


NO_CACHES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "nothing": (lambda path: None, FileNotFoundError, "there is no cache at .*cache"),
    "link to nothing": (lambda path: path.symlink_to("x"), FileNotFoundError, "there is no cache at .*cache"),
    "pipe": (os.mkfifo, CacheMismatchError, "cache is not a file"),  # it is not waited for
    "directory": (os.mkdir, CacheMismatchError, "cache is a directory, but a cache on disk is one file"),
    "empty": (lambda path: path.touch(), CacheError, "cache is not a cache"),
    "zeros": (lambda path: path.write_bytes(b"\0" * 20_000), CacheError, "cache"),
    "foreign": (foreign, CacheMismatchError, "is an LMDB file, but no cache"),
}


@pytest.mark.parametrize(("make", "kind", "said"), NO_CACHES.values(), ids=NO_CACHES)
def test_what_is_no_cache(make: Any, kind: type[Exception], said: str, tmp_path: Path) -> None:
    """It raises, with its path."""
    make(tmp_path / "cache")
    with pytest.raises(kind, match=said):
        LMDBCache(tmp_path / "cache")


@pytest.mark.parametrize(
    "open_it",
    [
        lambda url: CachedDataset([1], cache=f"lmdb:{url}"),
        lambda url: CachedDataset([1], cache=url),
        lambda url: CachedDataset.build([1], url),
        lambda url: CachedDataset.from_cache(url),
        lambda url: CachedDataset.from_cache(f"lmdb:{url}"),
        lambda url: fastload.DataLoader([1], cache=f"lmdb:{url}"),
    ],
)
def test_a_cache_at_a_url_is_refused_with_what_to_do(open_it: Any) -> None:
    """It is copied to a local disk first; the error has the command."""
    with pytest.raises(ValueError, match=r"on this machine, but is s3://b/c: .* aws s3 cp s3://b/c DEST, "):
        open_it("s3://b/c")


def test_attributes(tmp_path: Path) -> None:
    """A cache knows its parts, classes and size, why it is in use and what it was made of."""
    dataset, path = Images(20), tmp_path / "cache"
    dataset.classes = ["cat", "dog"]  # type: ignore[attr-defined]
    known = Fingerprint({"source": "photos"})
    cache = build_lmdb(dataset, path, fingerprint=known, num_workers=0)

    assert (cache.description.parts, cache.description.classes) == ({"source": "photos"}, ["cat", "dog"])
    assert cache.nbytes == path.stat().st_size
    assert cache.stored_indices.tolist() == list(range(20))
    assert (3 in cache, 20 in cache, -1 in cache, "x" in cache) == (True, False, False, False)
    assert len(cache.missing()) == 0
    assert "opened by its path" in LMDBCache(path).explain()
    assert "20 of 20 samples" in LMDBCache(path).explain()
    assert "sample 0 match the dataset" in build_lmdb(Images(20), path).explain()


def test_gather_is_default_collate(tmp_path: Path) -> None:
    """In any order, with repeats; the batch lies in the memory of `allocate`, and outlives the cache."""
    dataset, order, given = Everything(20), [13, 2, 19, 2, 0, 7], []
    cache = build_lmdb(dataset, tmp_path / "cache", num_workers=0)

    def allocate(shape: tuple[int, ...], dtype: Any) -> Any:
        given.append(np.empty(shape, dtype))
        return given[-1]

    batch: Any = cache.gather(np.array(order), allocate)
    cache.close()

    assert_same_samples(batch, default_collate([dataset.sample(index) for index in order]))
    assert batch["image"].data_ptr() in [array.__array_interface__["data"][0] for array in given]
    other = build_lmdb(RaggedImages(4), tmp_path / "ragged", num_workers=0)  # left to samples
    assert other.gather(np.array([1, 2, 3]), None) is None  # type: ignore[arg-type]


def test_a_closed_cache_that_is_its_own_source_says_so(tmp_path: Path) -> None:
    """There is no other source to read from: a sample of None would be wrong."""
    build_lmdb(Images(3), tmp_path / "cache", num_workers=0, progress=False)
    dataset = CachedDataset.from_cache(tmp_path / "cache")
    dataset.cache.close()
    with pytest.raises(CacheError, match=r"sample 1 was requested from the cache .* after close"):
        dataset[1]


# --- files that are changed while they are open --------------------------------------------------------


OLD_NS = 10**18  # long ago: no change in a test has this time
OTHER = BrokenImages(20, shift=1)  # the same shapes, other samples


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A finished cache of 20 images."""
    return built(tmp_path / "cache", Images(20))


def built(path: Path, dataset: Images, **options: Any) -> Path:
    build_lmdb(dataset, path, num_workers=0, **options).close()
    for file in [path] if path.is_file() else path.iterdir():
        os.utime(file, ns=(OLD_NS, OLD_NS))
    return path


def gather(cache: LMDBCache) -> Any:
    return cache.gather(np.arange(20), np.empty)


READS: dict[str, Any] = {"get": lambda cache: cache.get(3), "gather": gather, "verify": LMDBCache.verify}
CHANGED = "was changed while it was open.* open the cache again"


def overwrite(path: Path, dataset: Images = OTHER) -> None:
    shutil.copyfile(built(path.with_name("other"), dataset), path)


CHANGES: dict[str, tuple[Callable[[Path], Any], bool]] = {  # and whether what is open can be read on
    "another cache is copied over it": (overwrite, False),
    "cut to nothing": (lambda path: os.truncate(path, 0), False),
    "cut late": (lambda path: os.truncate(path, 50_000), False),
    "longer": (lambda path: os.truncate(path, path.stat().st_size + 4), False),
    "another description": (lambda path: overwrite(path, Images(20)), False),
    "touched": (os.utime, True),
    "the same bytes again": (lambda path: path.write_bytes(path.read_bytes()), True),
    "another cache is moved over it": (lambda path: built(path.with_name("x"), OTHER).replace(path), True),
    "removed": (lambda path: path.unlink(), True),
}


@pytest.mark.parametrize("was_read", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_is_changed_while_it_is_open(change: str, was_read: bool, path: Path) -> None:
    """Each way to read gives the samples that were there, or says that the file was changed, and names it."""
    make, is_read_on = CHANGES[change]
    caches = {way: LMDBCache(path) for way in READS}
    before = {way: READS[way](cache) for way, cache in caches.items() if was_read or is_read_on}
    make(path)
    for way, cache in caches.items():
        for _ in range(2):
            if is_read_on:
                assert_same_samples(READS[way](cache), before[way])
            else:
                with pytest.raises(CacheMismatchError, match=f"{path} {CHANGED}"):
                    READS[way](cache)
    if change.startswith("another cache"):  # whoever opens it later reads the new file
        assert_same_samples(LMDBCache(path).get(3), OTHER.sample(3))
        assert_same_samples(LMDBCache(path).get(4), OTHER.sample(4))


@pytest.mark.parametrize("is_set_back", [False, True])
def test_one_byte_of_the_same_file(is_set_back: bool, path: Path) -> None:
    """A record that is changed in place is compared with its checksum again, also if the time is set back."""
    cache = LMDBCache(path)
    opened_ns = path.stat().st_ctime_ns
    gather(cache)
    content = path.read_bytes()
    at = content.rindex(Images(20).sample(5)[0].tobytes())
    with open(path, "r+b") as file:
        file.seek(at + 100)
        file.write(bytes([content[at + 100] ^ 1]))
    while is_set_back:  # the time of that change itself may be some milliseconds coarse
        os.utime(path, ns=(OLD_NS, OLD_NS))
        is_set_back = path.stat().st_ctime_ns == opened_ns

    for read in (lambda: cache.get(5), lambda: gather(cache)):
        with pytest.raises(CacheCorruptError, match=f"{path}: sample 5: its checksum is wrong"):
            read()
    assert cache.verify() == [5]
    assert_same_samples(cache.get(4), Images(20).sample(4))


def test_threads_that_read_a_touched_file(path: Path) -> None:
    """Threads that notice a touched file together read the right samples."""
    cache = LMDBCache(path)
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(cache.get, [*range(20)] * 80)
        for number in range(50):
            os.utime(path, ns=(OLD_NS, OLD_NS + number))
    for position, sample in enumerate(found):
        assert_same_samples(sample, Images(20).sample(position % 20))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_notice_too(method: str, path: Path, tmp_path: Path) -> None:
    """A batch from a file that was overwritten is an error in the parent; a fork has what is open."""
    dataset = fastload.CachedDataset.from_cache(path)
    loader = fastload.DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context=method)
    handle = pickle.loads(pickle.dumps(LMDBCache(path)))  # it opens nothing until it is read
    if method == "fork":
        os.replace(path, tmp_path / "kept")
        with pytest.raises(FileNotFoundError):
            handle.get(0)
        built(path, OTHER)
        assert_same_samples(next(iter(loader))[0][3].numpy(), Images(20).sample(3)[0])
        with pytest.raises(CacheMismatchError, match="was replaced by a different cache while it was in use"):
            handle.get(0)
        os.replace(tmp_path / "kept", path)
    assert len(list(loader)) == 5
    overwrite(path)

    with pytest.raises(CacheMismatchError, match=r"was changed while|was replaced"):
        list(loader)


# --- where records lie ---------------------------------------------------------------------------------


SIZES = (-1, 200), (1800, 2100), (3900, 4200), (0, 30_000)


def texts(sizes: list[int]) -> Made:
    """Samples of given sizes; -1 for one that cannot be read."""

    def make(index: int) -> bytes:
        if sizes[index] < 0:
            raise OSError(f"no sample {index}")
        return index.to_bytes(2, "little") * (sizes[index] // 2)

    return Made(make, len(sizes))


def check_as_lmdb(path: Path, num_samples: int) -> None:
    """Under the key of each sample, LMDB finds its record, and nothing else beside `meta`."""
    cache = LMDBCache(path)
    stored = cache.stored_indices.tolist()
    samples = [cache.get(index) for index in range(num_samples)]
    assert (cache.num_cached, cache.verify()) == (len(stored), [])
    assert [index for index in range(num_samples) if index in cache] == stored
    cache.close()
    environment = lmdb.open(str(path), subdir=False, readonly=True, lock=False)
    with environment, environment.begin() as transaction:
        found = {bytes(key): bytes(value) for key, value in transaction.cursor()}
    assert json.loads(found.pop(b"meta").splitlines()[0])["finished"]
    assert list(found) == [index_key(index) for index in stored]
    assert [decode(value) for value in found.values()] == [samples[index] for index in stored]


@pytest.mark.slow
@given(st.lists(st.one_of(*(st.integers(*ends) for ends in SIZES)), max_size=60), st.integers(1, 30_000))
@example([20] * 8_000, 1 << 20)  # branches over branches
@example([-1] * 50, 1)
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
def test_lmdb_finds_each_record(tmp_path_factory: Any, sizes: Any, commit_bytes: int) -> None:
    """Values in leaf pages and in overflow pages of any length, after any number of commits."""
    path = tmp_path_factory.mktemp("places") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lmdb_store, "_BATCH_BYTES", commit_bytes)
        build_lmdb(texts(sizes), path, num_workers=0, on_error="skip", max_errors=1.0).close()
    check_as_lmdb(path, len(sizes))


def test_files_give_their_descriptors_back(tmp_path: Path) -> None:
    """An open file takes two, and a file that is refused none, while its error is held, too."""
    build_lmdb(texts([9] * 9), tmp_path / "cache", num_workers=0).close()
    foreign(tmp_path / "other")
    before = len(os.listdir("/proc/self/fd"))
    cache = LMDBCache(tmp_path / "cache")
    assert len(os.listdir("/proc/self/fd")) == before + 2
    cache.close()
    os.truncate(tmp_path / "cache", 5000)
    for name in ("cache", "other"):
        with pytest.raises(CacheError, match=name) as caught:
            LMDBCache(tmp_path / name)
        assert caught.value.__traceback__ is not None
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_is_indexed_as_a_list_is(tmp_path: Path) -> None:
    """By NumPy's integers, from the end, in a loop; an index beyond it raises IndexError."""
    cache = build_lmdb(Images(3), tmp_path / "cache", num_workers=0, progress=False)
    assert [label for _, label in cache] == [0, 1, 2]
    assert (cache[np.int64(1)][1], cache[-1][1]) == (1, 2)
    for index in (3, -4):
        with pytest.raises(IndexError, match=f"{index} is out of range"):
            cache[index]


def test_a_thread_that_opens_a_file_keeps_no_fork_from_it(tmp_path: Path, monkeypatch: Any) -> None:
    """A fork in the middle of that reads the cache, too."""
    build_lmdb(Images(3), tmp_path / "cache", num_workers=0, progress=False).close()
    cache = pickle.loads(pickle.dumps(LMDBCache(tmp_path / "cache")))
    opens, pids = finished.open_finished, list[int]()

    def forked(path: str) -> Any:
        if not pids:
            pids.append(os.fork())
            if not pids[0]:
                signal.alarm(10)
                os._exit(cache[2][1] != 2)
            assert os.waitpid(pids[0], 0)[1] == 0
        return opens(path)

    monkeypatch.setattr(finished, "open_finished", forked)
    assert cache[1][1] == 1
