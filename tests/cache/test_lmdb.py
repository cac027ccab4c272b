"""LMDBCache: the contract for a file, for shards and for encoded images, and what opening refuses."""

from __future__ import annotations

import os
import pickle
import shutil
import zlib
from typing import TYPE_CHECKING, Any

import lmdb
import numpy as np
import pytest
from torch.utils.data import default_collate

from fastload.cache.build.build import build_lmdb
from fastload.cache.dataset import CachedDataset
from fastload.cache.fingerprint import Fingerprint
from fastload.cache.lmdb import description as lmdb_description
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.errors import CacheCorruptError, CacheError, CacheMismatchError
from fastload.loader import DataLoader
from tests.cache.contract import CacheContract, SharedContract
from tests.cache.zoo import Collatable, Images, RaggedImages, Triples
from tests.kit.batches import assert_same_samples

if TYPE_CHECKING:
    from pathlib import Path


class TestLMDBCache(CacheContract):
    """The contract, in one file."""

    def make(self, dataset: Images, tmp_path: Any) -> LMDBCache:
        return build_lmdb(dataset, tmp_path / "cache", num_workers=0)


class TestShards(SharedContract):
    """The contract, in a directory of files."""

    def make(self, dataset: Images, tmp_path: Any) -> LMDBCache:
        return build_lmdb(dataset, tmp_path / "cache", num_workers=0, shards=5)


class TestPNG(CacheContract):
    """The contract, with encoded images."""

    def make(self, dataset: Images, tmp_path: Any) -> LMDBCache:
        return build_lmdb(dataset, tmp_path / "cache", num_workers=0, codec="png")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A finished cache of 20 images in 3 shards."""
    build_lmdb(Images(20), tmp_path / "shards", num_workers=0, shards=3).close()
    return tmp_path / "shards"


# --- opening ---------------------------------------------------------------------------------------------


def test_unpickled_cache_opens_late(path: Path) -> None:
    """A handle opens nothing until it is read, and notices that the file was replaced."""
    text = pickle.dumps(LMDBCache(path))
    path.unlink()
    handle = pickle.loads(text)
    with pytest.raises(FileNotFoundError):
        handle.get(0)
    build_lmdb(Images(4), path, num_workers=0).close()

    with pytest.raises(CacheMismatchError, match="was replaced by another cache while it was in use"):
        handle.get(0)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (lambda path: None, FileNotFoundError, "there is no cache at .*cache"),
        (lambda path: path.symlink_to("nowhere"), FileNotFoundError, "there is no cache at .*cache"),
        (os.mkfifo, CacheMismatchError, "cache is not a file"),  # it is not waited for
        (os.mkdir, CacheMismatchError, "neither a file nor a directory"),
        (lambda path: path.touch(), CacheError, "cache"),
        (lambda path: path.write_bytes(b"\0" * 20_000), CacheError, "cache"),
    ],
    ids=["nothing", "link to nothing", "pipe", "directory", "empty", "zeros"],
)
def test_what_is_no_cache(make: Any, kind: type[Exception], said: str, tmp_path: Path) -> None:
    """It raises, with its path."""
    make(tmp_path / "cache")

    with pytest.raises(kind, match=said):
        LMDBCache(tmp_path / "cache")


def test_foreign_lmdb_file(tmp_path: Path) -> None:
    """An LMDB file that another program made raises."""
    environment = lmdb.open(str(tmp_path / "cache"), subdir=False, lock=False)
    with environment, environment.begin(write=True) as transaction:
        transaction.put(b"key", b"value")

    with pytest.raises(CacheCorruptError, match="not a cache"):
        LMDBCache(tmp_path / "cache")


def test_other_format_version(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of another format version raises, with both versions."""
    monkeypatch.setattr(lmdb_description, "FORMAT_VERSION", 2)

    with pytest.raises(CacheMismatchError, match="format 1, but this release reads 2"):
        LMDBCache(path)


# --- what it says of itself ------------------------------------------------------------------------------


def test_attributes(tmp_path: Path) -> None:
    """A cache knows its codec, parts, classes, shards and size."""
    dataset = Images(20)
    dataset.classes = ["cat", "dog"]  # type: ignore[attr-defined]
    cache = build_lmdb(
        dataset,
        tmp_path / "cache",
        num_workers=0,
        codec="jpeg",
        quality=80,
        shards=2,
        fingerprint=Fingerprint({"source": "photos"}),
    )

    assert (cache.codec, cache.quality, cache.num_shards) == ("jpeg", 80, 2)
    assert (cache.parts, cache.classes) == ({"source": "photos"}, ["cat", "dog"])
    assert cache.nbytes == sum(file.stat().st_size for file in (tmp_path / "cache").iterdir())
    assert cache.stored_indices is None
    assert (3 in cache, 20 in cache, -1 in cache, "x" in cache) == (True, False, False, False)
    assert len(cache.missing()) == 0


def test_explain(path: Path) -> None:
    """A cache says why it is in use and what it was made of."""
    assert "opened by its path" in LMDBCache(path).explain()
    assert "20 of 20 samples" in LMDBCache(path).explain()
    assert "sample 0 match the dataset" in build_lmdb(Images(20), path).explain()


# --- shards ----------------------------------------------------------------------------------------------


def test_shards_that_do_not_belong_together(directory: Path, tmp_path: Path) -> None:
    """A shard that is lost, there twice, of another cache, or opened by itself raises, with its name."""
    names = sorted(os.listdir(directory))
    shutil.copy(directory / names[1], directory / "copy.lmdb")
    with pytest.raises(CacheMismatchError, match=r"has 4 of the 3 shards .* there twice"):
        LMDBCache(directory)
    os.unlink(directory / "copy.lmdb")

    build_lmdb(Images(20), tmp_path / "other", num_workers=0, shards=3)
    os.rename(directory / names[1], tmp_path / "kept")
    with pytest.raises(CacheMismatchError, match=r"has 2 of the 3 shards .* shard 2 is missing"):
        LMDBCache(directory)
    shutil.copy(tmp_path / "other" / names[1], directory / names[1])
    with pytest.raises(CacheMismatchError, match="shards of two caches"):
        LMDBCache(directory)
    with pytest.raises(CacheMismatchError, match=r"has 1 of the 3 shards .* Open the directory"):
        LMDBCache(directory / names[0])

    os.replace(tmp_path / "kept", directory / names[1])
    assert_same_samples(LMDBCache(directory).get(8), Images(20).sample(8))


# --- batches ---------------------------------------------------------------------------------------------


def test_gather_of_shards_is_default_collate(tmp_path: Path) -> None:
    """A batch in any order, with repeats, is what default_collate makes of the samples."""
    dataset = Collatable(20)
    cache = build_lmdb(dataset, tmp_path / "cache", num_workers=0, shards=3)
    order = [13, 2, 19, 2, 0, 7]
    batch = cache.gather(np.array(order), np.empty)

    assert_same_samples(batch, default_collate([dataset.sample(index) for index in order]))


def test_gather_lies_where_it_was_told(path: Path) -> None:
    """A batch lies in the memory that `allocate` gives, is private, and outlives the cache."""
    given: list[Any] = []

    def allocate(shape: tuple[int, ...], dtype: Any) -> Any:
        given.append(np.empty(shape, dtype))
        return given[-1]

    cache = LMDBCache(path)
    images, _ = cache.gather(np.array([1, 2]), allocate)  # type: ignore[misc]
    cache.close()
    images[0].fill_(0)

    assert images.data_ptr() == given[0].__array_interface__["data"][0]
    assert_same_samples(LMDBCache(path).get(1), Images(20).sample(1))


@pytest.mark.parametrize(
    ("dataset", "codec"), [(RaggedImages(20), "raw"), (Images(20), "png")], ids=["ragged", "encoded"]
)
def test_gather_leaves_the_rest_to_samples(dataset: Images, codec: str, tmp_path: Path) -> None:
    """Ragged or encoded samples make no batch, and no memory is asked for."""
    cache = build_lmdb(dataset, tmp_path / "cache", num_workers=0, codec=codec)

    assert cache.gather(np.array([1, 2, 3]), None) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("is_batch", [False, True])
def test_checksum_is_checked_once(is_batch: bool, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a record's first read in a process pays for its checksum, alone or in a batch."""
    cache = LMDBCache(path)
    counted: list[int] = []
    real = zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda *args: counted.append(1) or real(*args))
    for _ in range(3):
        cache.gather(np.array([4, 5, 6]), np.empty) if is_batch else cache.get(5)
    cache.get(5)

    assert len(counted) == (3 if is_batch else 1)


def test_a_closed_cache_that_is_its_own_source_says_so(tmp_path: Path) -> None:
    """There is no other source to read from: a sample of None would be wrong."""
    build_lmdb(Images(3), tmp_path / "cache", num_workers=0, progress=False)
    dataset = CachedDataset.from_cache(tmp_path / "cache")
    dataset.cache.close()

    with pytest.raises(CacheError, match=r"sample 1 was requested from the cache .* after close"):
        dataset[1]


def test_options_of_a_store_are_refused_for_a_path(tmp_path: Path) -> None:
    """They would have no effect."""
    with pytest.raises(ValueError, match=r"storage_options= is for URLs, but path is '.*cache'"):
        CachedDataset.from_cache(tmp_path / "cache", storage_options={"anon": True})


@pytest.mark.slow
def test_a_spawned_worker_knows_the_namedtuples_of_its_parent(tmp_path: Path) -> None:
    """Nothing else takes the module of their class to a process that has no source."""
    build_lmdb(Triples(8), tmp_path / "cache", num_workers=0, progress=False)
    dataset = CachedDataset.from_cache(tmp_path / "cache", ram=True)

    batches = list(DataLoader(dataset, 4, num_workers=1, multiprocessing_context="spawn"))

    assert [type(batch).__name__ for batch in batches] == ["Triple"] * 2
    assert [batch.c.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]
