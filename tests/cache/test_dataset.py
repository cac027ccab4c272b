"""CachedDataset: decode once, the same as the dataset, whoever asks, however little fits."""

from __future__ import annotations

import copy
import itertools
import logging
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

import fastload
from fastload.cache.dataset import CachedDataset, CacheInfo
from fastload.cache.fingerprint import fingerprint_of
from fastload.cache.finished import LMDBCache
from fastload.cache.ram.shared import SharedMemoryCache
from fastload.cache.sample_cache import SampleCache
from fastload.errors import CacheMismatchError, NondeterministicDatasetError, UnsupportedSampleError
from fastload.memory import segment
from fastload.system import locks
from tests.cache.zoo import BareImages, Everything, Images, KnownImages, Made, MixedImages
from tests.kit.batches import assert_same_samples, stop_workers
from tests.kit.datasets import Stream

pytestmark = pytest.mark.usefixtures("registry_folder")


def as_it_is(sample: Any) -> Any:
    return sample


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Everything, MixedImages, Images])
def test_each_sample_is_decoded_once(kind: Any, tmp_path: Any, monkeypatch: Any) -> None:
    """In shuffled epochs of two workers; one whose worker does not get the lock, again in the next epoch."""
    real, calls, refusals = locks.flock_fd, itertools.count(), tmp_path / "refusals"
    refusals.touch()

    def flock_fd(fd: int, *, wait_s: float) -> bool:
        has_lock = next(calls) % 3 != 0 and real(fd, wait_s=wait_s)
        if not has_lock:
            with open(refusals, "ab", buffering=0) as file:  # of both workers
                file.write(b".")
        return has_lock

    dataset = kind(200, log=tmp_path / "log")
    ds = CachedDataset(dataset)
    monkeypatch.setattr(locks, "flock_fd", flock_fd)
    loader = DataLoader(ds, batch_size=8, shuffle=True, num_workers=2, collate_fn=len)
    first = 0
    for epoch in range(2):
        assert sum(loader) == 200
        stop_workers(loader._iterator)
        second = refusals.stat().st_size - first
        assert ds.cache_info().num_cached == 200 - second
        first += second * (epoch == 0)

    assert min(dataset.reads) == 1
    assert sum(dataset.reads) == 203 + first  # the constructor looks at some samples
    assert (first > 0) == (kind is MixedImages)  # rows of one size need no lock


@pytest.mark.parametrize("max_memory", ["auto", "1B"])
def test_caller_may_write(max_memory: Any) -> None:
    """Samples are private and writable, on a hit and on a miss; view() gives read-only arrays."""
    dataset = Everything(4)
    ds = CachedDataset(dataset, max_memory=max_memory)
    for index in (0, 1, 1):
        sample = ds._view(index)
        assert_same_samples(sample, dataset.sample(index))
        assert not sample["image"].flags.writeable
        sample["pair"][0][:] = 9
    for _ in range(3):
        sample = ds[0]
        assert_same_samples(sample, dataset.sample(0))
        sample["image"][:] = 9
        sample["pair"][0][:] = 9
        sample["number"][...] = 9


class OneBuffer(Images):
    """Returns the same array each time, with other pixels; the dtype of a mask can change."""

    def __init__(self, shape: Any, mask_dtypes: Any) -> None:
        super().__init__(6, shape=shape)
        self.image, self.mask_dtypes = np.empty(shape, np.uint8), mask_dtypes

    def sample(self, index: int) -> Any:
        self.image[...] = index
        dtype = self.mask_dtypes[index % len(self.mask_dtypes)]
        return {"image": self.image, "mask": np.full(20_000, index, dtype)}


@pytest.mark.parametrize("worker", [{}, {"num_workers": 1}, {"num_workers": 1, "worker_type": "thread"}])
@pytest.mark.parametrize("cache", ["ram", None])
@pytest.mark.parametrize("shape", [(8, 8, 3), (240, 240, 3)])
@pytest.mark.parametrize("mask_dtypes", [("u1",), ("u1", "i4")])
def test_a_dataset_may_reuse_its_buffer(shape: Any, mask_dtypes: Any, cache: Any, worker: Any) -> None:
    """Batches hold each sample as it was returned, as `cached[index]` does, in both epochs."""
    cached = CachedDataset(OneBuffer(shape, mask_dtypes), cache=cache, max_memory="20MB")
    with fastload.DataLoader(cached, 3, **worker) as loader:
        for _ in range(2):
            pixels = [batch["image"].amin((1, 2, 3)).tolist() for batch in loader]
            assert pixels == [[0, 1, 2], [3, 4, 5]]


def test_indices_as_lists_take_them() -> None:
    """Negative indices count from the end, integers of any kind are taken, and others raise as of a list."""
    ds = CachedDataset(Images(20))
    for index in (-1, -20, np.int64(7), torch.tensor(3), True):
        assert_same_samples(ds[index], Images(20).sample(range(20)[index]))  # type: ignore[index]
    for index in (20, -21, 10**6):
        with pytest.raises(IndexError, match=f"^index {index} is out of range: the dataset has 20 samples$"):
            ds[index]
    with pytest.raises(TypeError):
        ds["0"]  # type: ignore[index]
    assert [label for _, label in ds] == list(range(20))
    described = repr(CachedDataset(Images(), transform=as_it_is, cache=None))
    assert described == "CachedDataset(Images of 20 samples, no cache, transform=as_it_is)"


NAMES = '"lmdb:PATH"'


@pytest.mark.parametrize(
    ("dataset", "options", "said"),
    [
        (Stream(), {}, "map-style"),
        (
            Path("photos/val"),
            {},
            r"^dataset='photos/val' is a path, .* fastload\.ImageFolder\('photos/val'\)",
        ),
        (iter([1]), {}, "__len__ and __getitem__"),
        ({1, 2}, {}, "__getitem__"),
        *(([1], {"cache": cache}, NAMES) for cache in ("disk", "lmdb:", 5, ["ram", "lmdb:x"], ("ram",), [])),
        ([1], {"max_memory": "much"}, "max_memory='much'"),
        ([1], {"cache": __file__}, f'pass cache="lmdb:{__file__}"'),
    ],
)
def test_what_is_no_dataset_and_no_cache_is_refused(dataset: Any, options: Any, said: str) -> None:
    """The error says what is missing, or what to give: a list of caches, one of them."""
    with pytest.raises(ValueError if options else TypeError, match=said):
        CachedDataset(dataset, **options)


def test_empty_dataset(tmp_path: Any) -> None:
    """A dataset of nothing is taken, and holds nothing."""
    for cache in ("ram", f"lmdb:{tmp_path / 'cache'}"):
        ds = CachedDataset([], cache=cache)
        assert (len(ds), ds.cache_info().num_cached) == (0, 0)
        with pytest.raises(IndexError):
            ds[0]


def test_cache_object(tmp_path: Any) -> None:
    """A cache is used, if it is one and of these samples; a dataset whose source is a cache is none."""
    cache = SharedMemoryCache(20, [Images(20).sample(0)], max_memory=1 << 20)
    assert CachedDataset(Images(20), cache=cache).cache is cache
    assert isinstance(cache, SampleCache)
    assert cache.num_cached == 3
    with pytest.raises(CacheMismatchError, match="made for 20 samples, but the dataset has 21"):
        CachedDataset(Images(21), cache=cache)
    with pytest.raises(CacheMismatchError, match="sample 0 of the dataset differs at"):
        CachedDataset(Images(20, shape=(8, 8, 3)), cache=cache)
    CachedDataset(Images(20), cache=f"lmdb:{tmp_path / 'cache'}").cache.close()
    file = LMDBCache(tmp_path / "cache")
    CachedDataset(Images(20), cache=file)
    with pytest.raises(CacheMismatchError, match="sample 0 of the dataset differs"):
        CachedDataset(BareImages(20), cache=file)
    ds = CachedDataset.from_cache(tmp_path / "cache")
    assert not isinstance(ds, SampleCache)
    with pytest.raises(ValueError, match="cache should be"):
        CachedDataset(Images(4), cache=ds)  # type: ignore[arg-type]


def test_late_unsupported_sample_is_named() -> None:
    """A sample that cannot be cached raises at its access, with its index; errors of the dataset pass."""
    samples = {index: index for index in range(20)} | {7: object()}
    del samples[8]
    ds = CachedDataset(Made(samples.__getitem__))
    with pytest.raises(UnsupportedSampleError) as caught:
        ds[7]
    assert caught.value.__notes__ == ["in sample 7 of the dataset"]
    with pytest.raises(KeyError, match="8"):
        ds[8]


def test_without_shared_memory(monkeypatch: Any, caplog: Any) -> None:
    """Where there is no anonymous memory there is no cache, one warning says so, and samples are right."""
    monkeypatch.setattr(segment, "why_unsupported", lambda: "this platform has no memory")
    dataset = Images(20)
    with caplog.at_level(logging.WARNING, "fastload"):
        ds = CachedDataset(dataset)
    for _ in range(2):
        for index in range(20):
            assert_same_samples(ds[index], dataset.sample(index))

    (warning,) = caplog.messages
    assert "lmdb:PATH" in warning
    assert "this platform has no memory" in warning
    assert "this platform has no memory: every access reads the dataset" in ds.cache.explain()
    assert ds.fill(progress=False) == CacheInfo(20, 0, 0, None, "none")
    assert sum(dataset.reads) == 6 + 40  # of which the first ones show that the dataset is not random
    assert_same_samples(pickle.loads(pickle.dumps(ds))[3], dataset.sample(3))


class Labelled(KnownImages):
    """A dataset as torchvision's are, and with all that frameworks look for."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples)
        self.classes, self.class_to_idx, self._private = ["cat", "dog"], {"cat": 0, "dog": 1}, 1

    @property
    def targets(self) -> list[int]:
        return [index % 2 for index in range(self.num_samples)]

    @property
    def broken(self) -> int:
        return self.no_such_thing

    def refuse(self, *_: Any) -> Any:
        raise AssertionError("the cache was passed by")

    # `fill` is a name that CachedDataset has too.
    __getitems__ = state_dict = load_state_dict = set_epoch = set_format = set_transform = fill = refuse


def test_attributes_of_the_dataset_inside() -> None:
    """Those like `classes` are found, also two caches below; not what is true of its samples alone."""
    inner = CachedDataset(Labelled(20), max_memory="1MB")
    ds = CachedDataset(inner, max_memory="1MB")
    assert (ds.classes, ds.class_to_idx, ds.targets) == (["cat", "dog"], {"cat": 0, "dog": 1}, [0, 1] * 10)
    own = ["fingerprint", "state_dict", "load_state_dict", "set_epoch", "set_format", "set_transform"]
    for name in (*own, "_private", "__getitems__"):
        assert hasattr(inner.dataset, name)
        assert not hasattr(inner, name)
    for name in ("__array__", "__iter__", "__next__", "__contains__", "broken", "no_such_thing"):
        assert not hasattr(inner, name)


class Sized(Images):
    """Samples that attributes decide, one of them of the class."""

    handle = None

    def __init__(self) -> None:
        super().__init__(4)
        self.epoch = 0

    def __getitem__(self, index: int) -> Any:
        return np.array([self.epoch, self.handle or 0])


def test_an_attribute_of_the_dataset_inside_cannot_be_set_where_samples_are_cached() -> None:
    """The error says when to set it; names of no attribute, and of the class itself, can be set."""
    ds = CachedDataset(CachedDataset(Sized()))
    for name in ("epoch", "handle", "num_samples"):
        with pytest.raises(AttributeError, match=rf"^{name} should not be set after"):
            setattr(ds, name, 3)
    ds.name, ds.transform, ds.set_epoch = "train", tuple, None
    assert (ds.name, ds.epoch, ds[0]) == ("train", 0, (0, 0))
    for each in (copy.copy(ds), pickle.loads(pickle.dumps(ds))):
        with pytest.raises(AttributeError):
            each.epoch = 3


def test_a_limit_in_the_name_of_the_cache_is_that_of_a_loader() -> None:
    """`cache="ram:3MB"` is `max_memory="3MB"`; one of them sets the limit."""
    limits = [CachedDataset(Sized(), **options).cache_info().max_bytes for options in LIMITS]
    assert limits[0] == limits[1] <= 3_000_000
    with pytest.raises(ValueError, match="sets a limit, and so does max_memory="):
        CachedDataset(Sized(), cache="ram:3MB", max_memory="3MB")
    with pytest.raises(ValueError, match='an amount of memory after "ram:"'):
        CachedDataset(Sized(), cache="ram:much")


LIMITS: list[Any] = [{"cache": "ram:3MB"}, {"max_memory": "3MB"}]


def test_a_random_dataset_is_sent_to_the_loader() -> None:
    """Whose cache takes random datasets, also where a framework makes it."""
    random = Made(lambda index: np.random.rand(2))
    with pytest.raises(
        NondeterministicDatasetError, match=r'DataLoader\(dataset, cache="ram"\), or fastload run --cache ram'
    ):
        CachedDataset(random)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_where_no_samples_are_stored_an_attribute_reaches_the_dataset(num_workers: int) -> None:
    """Set between epochs, in copies, and in workers by worker_init_fn, as torch's loader does it."""

    def begin(_: int) -> None:
        torch.utils.data.get_worker_info().dataset.handle = 7

    ds = CachedDataset(Sized(), cache=None)
    loader = torch.utils.data.DataLoader(ds, 4, num_workers=num_workers, worker_init_fn=begin)
    for epoch in range(2):
        ds.epoch = epoch
        assert next(iter(loader))[0].tolist() == [epoch, 7 * num_workers]
    assert (ds.dataset.epoch, "epoch" in vars(ds)) == (1, False)


def test_a_subclass_can_have_an_attribute_of_the_same_name() -> None:
    """Its constructor sets it after the one of CachedDataset."""

    class Photos(CachedDataset):
        def __init__(self, epoch: int) -> None:
            super().__init__(Sized())
            self.epoch = epoch

    assert Photos(5).epoch == 5


@pytest.mark.parametrize("name", ["dataset", "pre_transform", "cache_key", "cache"])
def test_what_decides_on_the_stored_samples_cannot_be_set_later(name: str) -> None:
    """It would have no effect on them; a copy, also an unpickled one, refuses it, too."""
    ds = CachedDataset(Images(3), pre_transform=list, cache_key="x")
    for each in (ds, copy.copy(ds), pickle.loads(pickle.dumps(ds))):
        before = getattr(each, name)
        with pytest.raises(
            AttributeError, match=f"^{name} should not be set after CachedDataset is initialized"
        ):
            setattr(each, name, None)
        assert getattr(each, name) is before
        each.transform = tuple
        assert type(each[0]) is tuple


def test_a_cache_over_a_cached_dataset_is_not_shared_as_the_one_inside() -> None:
    """A second cache holds samples after pre_transform, which the source's fingerprint does not cover."""
    inner = CachedDataset(
        Labelled(20), pre_transform=lambda sample: (sample[0] + 1, sample[1]), cache_key="inner"
    )
    outer = CachedDataset(inner, max_memory="1MB")
    plain = CachedDataset(Labelled(20), max_memory="1MB")
    assert fingerprint_of(inner) is None
    assert fingerprint_of(Subset(inner, [1, 2])) is None
    assert "private to this process" in outer.cache.explain()
    assert_same_samples(outer[3][0], Images(20).sample(3)[0] + 1)
    assert_same_samples(plain[3], Images(20).sample(3))


def test_the_loader_calls_nothing_of_the_dataset_inside() -> None:
    """Epochs, states and batches of a loader are those of the cached dataset."""
    loader, other = (fastload.DataLoader(CachedDataset(Labelled(20)), batch_size=5) for _ in range(2))
    loader.set_epoch(3)
    for _ in range(2):
        labels = [label for _, batch in loader for label in batch.tolist()]
    other.load_state_dict(loader.state_dict())
    assert labels == list(range(20))


def test_copies_and_pickles_share_the_cache() -> None:
    """With a dataset and a transform of their own; samples do not travel, and no question goes in circles."""
    ds = CachedDataset(Labelled(4), transform=print, max_memory="1MB")
    bare = CachedDataset.__new__(CachedDataset)
    with pytest.raises(AttributeError, match="no attribute 'dataset'"):
        bare.dataset  # noqa: B018
    deep, pickled = copy.deepcopy(ds), pickle.dumps(ds)
    assert deep.cache is ds.cache
    assert deep.dataset is not ds.dataset
    assert len(pickled) < 4096
    for number, other in enumerate((copy.copy(ds), deep, pickle.loads(pickled))):
        other._view(number)
        assert other.classes == ["cat", "dog"]
        assert ds.cache.get(number) is not None


@pytest.mark.parametrize("pre_transform", [None, as_it_is])
def test_a_dataset_from_a_file(pre_transform: Any, tmp_path: Any, monkeypatch: Any) -> None:
    """By the argument of `cache`, with its prefix, or by a name; it has the names of its source's classes."""
    monkeypatch.chdir(tmp_path)
    CachedDataset.build(Labelled(4), "cache", pre_transform=pre_transform, num_workers=0).close()
    assert CachedDataset.from_cache("lmdb:cache").classes == ["cat", "dog"]
    (tmp_path / "cache").rename("lmdb:cache")
    assert len(CachedDataset.from_cache("lmdb:cache")) == 4


def test_one_line_says_what_was_decided(caplog: Any) -> None:
    """Construction logs how many are there, why this cache, and the bytes that all need, in one line."""
    with caplog.at_level(logging.INFO, "fastload"):
        CachedDataset(Images(2000, shape=(100, 100, 3)), max_memory="15MB")
    (line,) = caplog.messages
    assert line.startswith("cache: shared memory, 3 of 2,000 samples, ")
    assert "private to this process and its workers, because" in line
    assert re.search(r"; all take about 60\.\d MB of at most 15\.0 MB$", line)
    ds = CachedDataset(Images(20), max_memory=10**6)
    for index in range(5):
        ds[index]
    info = ds.cache_info()
    assert info == CacheInfo(20, 7, info.nbytes, 10**6, "uniform")
    assert 7 * 2304 < info.nbytes < 10**6
