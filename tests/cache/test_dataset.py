"""CachedDataset: decode once, the same as the dataset, whoever asks, however little fits."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from fastload.cache.dataset import CachedDataset, CacheInfo
from fastload.cache.disk.lmdb_cache import LMDBCache
from fastload.cache.protocol import SampleCache
from fastload.cache.ram.shared import SharedMemoryCache
from fastload.errors import CacheMismatchError, UnsupportedSampleError
from fastload.transport import segment
from tests.cache.zoo import BareImages, Everything, Images, MixedImages, RaggedImages, assert_same


def as_array(sample: Any) -> Any:
    """Run in workers: lists of samples of any shape are batches."""
    return sample


# --- decode once -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (Images, "fork"),
        (RaggedImages, "fork"),
        (MixedImages, "fork"),
        (Everything, "fork"),
        pytest.param(Images, "spawn", marks=pytest.mark.slow),
        pytest.param(MixedImages, "forkserver", marks=pytest.mark.slow),
    ],
)
def test_each_sample_is_decoded_once(kind: type[Images], method: str, tmp_path: Any) -> None:
    """Over three shuffled epochs with two workers of torch's loader 200 samples cost at most 202 reads."""
    dataset = kind(200, log=tmp_path / "log")
    ds = CachedDataset(dataset)
    loader = DataLoader(
        ds, batch_size=8, shuffle=True, num_workers=2, collate_fn=as_array, multiprocessing_context=method
    )
    for _ in range(3):
        batches = list(loader)
        assert sum(map(len, batches)) == 200

    assert min(dataset.reads) == 1
    # The two workers of an epoch never read the same sample; ragged space is taken under a lock that may be
    # held by the other worker just then, which costs another read.
    assert sum(dataset.reads) <= (202 if kind in (Images, Everything) else 212)
    assert ds.cache_info().num_cached == 200


def test_each_sample_is_decoded_once_for_lmdb(tmp_path: Any) -> None:
    """An LMDB build reads each sample once and two of them twice, and three epochs after it read none."""
    dataset = Images(200, log=tmp_path / "log")
    ds = CachedDataset(dataset, cache=f"lmdb:{tmp_path / 'cache'}", num_workers=2)
    for _ in range(3):
        list(DataLoader(ds, batch_size=8, shuffle=True, num_workers=2, multiprocessing_context="fork"))

    assert sum(dataset.reads) == 202


@pytest.mark.parametrize("cache", ["ram", "lmdb"])
@pytest.mark.parametrize("kind", [Images, BareImages, RaggedImages, MixedImages, Everything])
def test_same_as_the_dataset(kind: type[Images], cache: str, tmp_path: Any) -> None:
    """Without a transform every sample is what the dataset returns, at the first access and at later ones."""
    dataset = kind(20)
    ds = CachedDataset(dataset, cache="ram" if cache == "ram" else f"lmdb:{tmp_path / 'cache'}")

    assert len(ds) == 20
    for _ in range(2):
        for index in range(20):
            assert_same(ds[index], dataset.sample(index))


@pytest.mark.parametrize("kind", [Images, RaggedImages])
def test_small_budget_falls_through(kind: type[Images]) -> None:
    """Samples that do not fit are read from the dataset at every access, and are right."""
    dataset = kind(40)
    ds = CachedDataset(dataset, budget=20_000)
    for _ in range(2):
        for index in range(40):
            assert_same(ds[index], dataset.sample(index))

    assert 0 < ds.cache_info().num_cached < 40
    assert min(dataset.reads) == 1
    assert max(dataset.reads) >= 2


# --- private memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["auto", 1])
def test_caller_may_write(budget: Any) -> None:
    """Without a transform samples are private and writable: what the caller does shows nowhere."""
    dataset = Everything(4)
    ds = CachedDataset(dataset, budget=budget)
    for _ in range(3):
        sample = ds[0]
        assert_same(sample, dataset.sample(0))
        sample["image"][:] = 9
        sample["pair"].image[:] = 9
        sample["number"][...] = 9


@pytest.mark.parametrize("budget", ["auto", 1])
def test_view_is_read_only(budget: Any) -> None:
    """view() gives read-only arrays and private tensors, on a hit and on a miss alike."""
    ds = CachedDataset(Everything(4), budget=budget)
    for index in (0, 1, 1):
        sample = ds.view(index)
        assert_same(sample, Everything(4).sample(index))
        assert not sample["image"].flags.writeable
        sample["pair"].image[:] = 9


def test_views_outlive_the_dataset() -> None:
    """A view stays valid when dataset and cache are gone."""
    ds = CachedDataset(Images(4))
    ds.view(1)
    view = ds.view(1)
    del ds

    assert_same(view, Images(4).sample(1))


# --- indices ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [-1, -20, np.int64(7), torch.tensor(3), True])
def test_indices_as_lists_take_them(index: Any) -> None:
    """Negative indices count from the end, and integers of any kind are taken."""
    assert_same(CachedDataset(Images(20))[index], Images(20).sample(range(20)[index]))


@pytest.mark.parametrize("index", [20, -21, 10**6])
def test_index_out_of_range(index: int) -> None:
    """An index beyond the ends raises IndexError, as a list does."""
    with pytest.raises(IndexError, match="20 samples"):
        CachedDataset(Images(20))[index]


def test_iteration_ends() -> None:
    """A for loop over the dataset meets each sample once."""
    assert [label for _, label in CachedDataset(Images(5))] == list(range(5))


def test_index_of_another_type() -> None:
    """An index that is no integer raises TypeError."""
    with pytest.raises(TypeError):
        CachedDataset(Images(5))["0"]  # type: ignore[index]


# --- what is accepted --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["ram", "lmdb"])
def test_empty_dataset(cache: str, tmp_path: Any) -> None:
    """A dataset of nothing is taken, and holds nothing."""
    ds = CachedDataset([], cache="ram" if cache == "ram" else f"lmdb:{tmp_path / 'cache'}")

    assert len(ds) == 0
    assert ds.cache_info().num_cached == 0
    with pytest.raises(IndexError):
        ds[0]


def test_lists_are_datasets() -> None:
    """Anything with a length and indices will do."""
    assert CachedDataset(["a", "b"])[1] == "b"


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "message"),
    [(Stream(), "iterable-style"), (iter([1]), "no __len__ and no __getitem__"), ({1, 2}, "no __getitem__")],
)
def test_other_datasets_are_refused(dataset: Any, message: str) -> None:
    """What is not map-style raises TypeError, saying what is missing."""
    with pytest.raises(TypeError, match=message):
        CachedDataset(dataset)


@pytest.mark.parametrize("cache", ["disk", "lmdb:", "", 5, None])
def test_other_caches_are_refused(cache: Any) -> None:
    """What names no cache raises ValueError, saying what does."""
    with pytest.raises(ValueError, match='"lmdb:PATH"'):
        CachedDataset(Images(2), cache=cache)


def test_bad_budget_is_refused() -> None:
    """A budget that is none raises."""
    with pytest.raises(ValueError, match="budget='much'"):
        CachedDataset(Images(2), budget="much")


def test_cache_object() -> None:
    """A cache that was made before is used, if it is for as many samples."""
    cache = SharedMemoryCache(20, [Images(20).sample(0)], budget=1 << 20)
    ds = CachedDataset(Images(20), cache=cache)

    assert ds.cache is cache
    assert isinstance(cache, SampleCache)
    assert cache.num_cached == 3
    with pytest.raises(CacheMismatchError, match="made for 20 samples, the dataset has 21"):
        CachedDataset(Images(21), cache=cache)


def test_lmdb_cache_object(tmp_path: Any) -> None:
    """A finished file is compared with the dataset, opened by path or as an object."""
    CachedDataset(Images(20), cache=f"lmdb:{tmp_path / 'cache'}").cache.close()
    cache = LMDBCache(tmp_path / "cache")
    CachedDataset(Images(20), cache=cache)

    with pytest.raises(CacheMismatchError, match="structure of sample 0"):
        CachedDataset(BareImages(20), cache=cache)


class OddOne(Images):
    """One sample that cannot be cached."""

    def sample(self, index: int) -> Any:
        return super().sample(index) if index != 7 else object()


def test_late_unsupported_sample_is_named() -> None:
    """A sample that cannot be cached and was not examined raises at its access, with its index."""
    ds = CachedDataset(OddOne(20))
    with pytest.raises(UnsupportedSampleError) as caught:
        ds[7]

    assert caught.value.__notes__ == ["in sample 7 of the dataset"]


def test_errors_of_the_dataset_pass_through() -> None:
    """What the dataset raises reaches the caller as it is."""

    class Broken(Images):
        def sample(self, index: int) -> Any:
            if index == 7:
                raise KeyError("mine")
            return super().sample(index)

    ds = CachedDataset(Broken(20))
    with pytest.raises(KeyError, match="mine"):
        ds[7]


# --- copies and handles ------------------------------------------------------------------------------------


def test_deepcopy_shares_the_cache() -> None:
    """A deep copy has its own dataset and transform, and the same cache."""
    ds = CachedDataset(["a", ["b"]], transform=print)
    other = copy.deepcopy(ds)

    assert other.cache is ds.cache
    assert other.dataset is not ds.dataset
    assert other.dataset == ds.dataset


def test_pickles_as_a_handle() -> None:
    """A pickled dataset opens the same cache; samples do not travel."""
    ds = CachedDataset(Images(20, shape=(100, 100, 3)))
    text = pickle.dumps(ds)
    other = pickle.loads(text)
    other[5]

    assert len(text) < 4096
    assert ds.cache.get(5) is not None


def test_without_shared_memory(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Where there is no anonymous memory the cache is private, one warning says so, and samples are right."""
    monkeypatch.setattr(segment, "is_supported", lambda: False)
    dataset = Images(20)
    with caplog.at_level(logging.WARNING, "fastload"):
        ds = CachedDataset(dataset)
    for _ in range(2):
        for index in range(20):
            assert_same(ds[index], dataset.sample(index))

    assert len(caplog.records) == 1
    assert "lmdb:PATH" in caplog.text
    assert ds.cache_info().layout == "private"
    assert sum(dataset.reads) == 22
    assert_same(pickle.loads(pickle.dumps(ds))[3], dataset.sample(3))


def test_one_line_says_what_was_decided(caplog: Any) -> None:
    """Construction logs layout, how many fit, bytes and budget in one line."""
    with caplog.at_level(logging.INFO, "fastload"):
        CachedDataset(Images(2000, shape=(100, 100, 3)), budget="15MB")

    (record,) = caplog.records
    assert record.getMessage().startswith(
        "cache: uniform layout, 499 of 2,000 samples fit, about 60.3 MB needed, budget 15.0 MB; shared memory"
    )


def test_cache_info() -> None:
    """cache_info() counts what is stored."""
    ds = CachedDataset(Images(20), budget=10**6)
    for index in range(5):
        ds[index]
    info = ds.cache_info()

    assert info == CacheInfo(20, 7, info.nbytes, 10**6, "uniform")
    assert 7 * 2304 < info.nbytes < 10**6
