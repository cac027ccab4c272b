"""What every cache promises, as one suite: a subclass says how a cache is made and inherits the tests."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
from abc import ABC, abstractmethod
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from fastload.cache.records import decode, encode
from tests.cache.zoo import Everything, Images, RaggedImages
from tests.kit.batches import assert_same_samples

_held: list[Any] = []


def hold(cache: Any) -> None:
    """Run in a child, which inherits the cache or opens it by its pickle."""
    _held.append(cache)


def read(index: int) -> bytes:
    """Run in the child: a sample as a record."""
    return encode(_held[0].get(index))


class CacheContract(ABC):
    """Tests of a cache that holds all samples of a dataset."""

    @abstractmethod
    def make(self, dataset: Images, tmp_path: Any) -> Any:
        """A cache that holds every sample of the dataset."""

    @pytest.fixture(params=[RaggedImages, Everything])
    def dataset(self, request: Any) -> Images:
        return request.param(12)

    def test_gives_back_what_was_stored(self, dataset: Images, tmp_path: Any) -> None:
        """Every sample comes back with its types, dtypes, shapes and values; a full cache says that it is."""
        cache = self.make(dataset, tmp_path)
        for index in range(12):
            assert_same_samples(cache.get(index), dataset.sample(index))
        assert cache.num_samples == cache.num_cached == 12
        assert np.int64(3) in cache
        assert np.int64(12) not in cache
        assert cache.nbytes > 0

    def test_nobody_changes_what_is_stored(self, dataset: Images, tmp_path: Any) -> None:
        """What get() returns cannot be written to, and its tensors are private."""
        cache = self.make(dataset, tmp_path)
        sample = cache.get(3)
        image = sample["image"] if isinstance(sample, dict) else sample[0]
        if isinstance(sample, dict):
            sample["pair"][0].fill_(-1)

        with pytest.raises(ValueError, match="read-only"):
            image[0] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            image.flags.writeable = True
        assert_same_samples(cache.get(3), dataset.sample(3))

    def test_samples_outlive_the_cache(self, dataset: Images, tmp_path: Any) -> None:
        """A sample stays valid after close(), repeated or not; nothing is cached and nothing taken then."""
        cache = self.make(dataset, tmp_path)
        assert copy.deepcopy(cache) is cache
        sample = cache.get(5)
        cache.close()
        cache.close()

        assert cache.get(0) is None
        assert not cache.put(0, dataset.sample(0))
        assert cache.gather(np.array([0]), np.empty) is None
        del cache
        gc.collect()
        assert_same_samples(sample, dataset.sample(5))

    def test_threads_read_at_once(self, dataset: Images, tmp_path: Any) -> None:
        """Many threads that meet an unopened cache all read what is right."""
        original = self.make(dataset, tmp_path)
        cache = pickle.loads(pickle.dumps(original))
        with ThreadPoolExecutor(4) as pool:
            samples = list(pool.map(cache.get, list(range(12)) * 8))
        for position, sample in enumerate(samples):
            assert_same_samples(sample, dataset.sample(position % 12))


class SharedContract(CacheContract):
    """Tests of a cache that other processes see."""

    @pytest.mark.parametrize(
        "method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.thorough)]
    )
    def test_children_read(self, method: str, tmp_path: Any) -> None:
        """A child process reads every sample, read before by the parent or not; a pickle is small."""
        dataset = Everything(12)
        cache = self.make(dataset, tmp_path)
        cache.get(0)
        context = multiprocessing.get_context(method)
        with ProcessPoolExecutor(1, context, initializer=hold, initargs=(cache,)) as pool:
            for index, record in enumerate(pool.map(read, range(12))):
                assert_same_samples(decode(record), dataset.sample(index))
        assert_same_samples(cache.get(1), dataset.sample(1))
        assert len(pickle.dumps(cache)) < 2048  # a handle
