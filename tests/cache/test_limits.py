"""Caches in RAM where the system refuses: limits of a process, no memory, no locks.

tests/test_other_platforms.py has the systems that lack memfd, /proc and more.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import resource
from typing import Any
from unittest import mock

import numpy as np
import pytest

from fastload.cache.dataset import CachedDataset
from fastload.cache.ram.arena import Arena
from fastload.cache.ram.shared import SharedMemoryCache
from fastload.cache.sample_cache import NoCache
from fastload.errors import SharedMemoryError
from fastload.memory.segment import Segment
from fastload.system.logs import say_once
from tests.cache.zoo import Images, Made, MixedImages, RaggedImages
from tests.kit.batches import assert_same_samples
from tests.kit.faults import limited, mapped_bytes

MB, GB = 1 << 20, 1 << 30
pytestmark = pytest.mark.usefixtures("registry_folder")


def assert_right(ds: CachedDataset, dataset: Images) -> None:
    """Two passes over the samples bring what the dataset holds."""
    for _ in range(2):
        for index in range(len(dataset)):
            assert_same_samples(ds[index], dataset.sample(index))


def test_samples_larger_than_the_examples_are_left_out_with_a_warning(monkeypatch: Any, caplog: Any) -> None:
    """Where the examples said too little, what does not fit comes from the dataset, which is logged once."""
    monkeypatch.setattr("fastload.cache.ram.shared._MIN_SPAN_BYTES", 4096)
    dataset = Made(lambda index: np.full(8 + index if index in (0, 10, 19) else 5000, index, np.uint8))
    ds = CachedDataset(dataset, max_memory="1GB")
    with caplog.at_level(logging.WARNING, "fastload"):
        assert_right(ds, dataset)
    assert 3 < ds.cache_info().num_cached < 20
    assert ["has no room for more" in text for text in caplog.messages] == [True]


@pytest.mark.parametrize("kind", [RaggedImages, MixedImages])
@pytest.mark.parametrize(
    ("limit", "allowed", "is_shared", "said"),
    [
        (resource.RLIMIT_FSIZE, 4096, False, ["RLIMIT_FSIZE is 4,096", "lmdb:PATH"]),
        (resource.RLIMIT_NOFILE, 3, False, ["RLIMIT_NOFILE is 3", "lmdb:PATH"]),
        (resource.RLIMIT_AS, 200 * MB, True, []),
    ],
)
def test_limits_make_a_cache_smaller_or_leave_none(
    kind: Any, limit: int, allowed: int, is_shared: bool, said: list[str], caplog: Any
) -> None:
    """One warning names the limit, if there is no cache, and no sample is wrong."""
    dataset = kind(300) if kind is RaggedImages else kind(300, shape=(64, 64, 3))
    mapped, max_memory = (mapped_bytes(), "auto") if limit == resource.RLIMIT_AS else (0, "1GB")
    with limited(limit, allowed + mapped), caplog.at_level(logging.WARNING, "fastload"):
        ds = CachedDataset(dataset, max_memory=max_memory, cache_key="photos")
        assert_right(ds, dataset)

    info = ds.cache_info()
    assert isinstance(ds.cache, SharedMemoryCache if is_shared else NoCache)
    assert info.num_cached == (300 if is_shared else 0)
    if is_shared:
        assert os.fstat(ds.cache._arena.segment.fd).st_size <= allowed
    else:
        assert said[0].split()[0] in ds.cache.explain()
        assert len(caplog.messages) == 1
    for text in said:
        assert text in caplog.messages[0]
    assert said or kind is RaggedImages or caplog.text == ""


def test_a_process_that_cannot_map_the_cache_reads_the_dataset(caplog: Any) -> None:
    """In a worker with another limit nothing is cached, and one line of its own says so; no error."""
    dataset = RaggedImages(20)
    ds = CachedDataset(dataset, max_memory="10GB")
    assert os.fstat(ds.cache._arena.segment.fd).st_size > 200 * MB
    with limited(resource.RLIMIT_AS, mapped_bytes() + 100 * MB), caplog.at_level(logging.WARNING, "fastload"):
        held = ds.cache._arena
        other = SharedMemoryCache.of(Arena(Segment.attach(os.dup(held.segment.fd)), held.fields))
        assert (other.get(3), other.put(3, dataset.sample(3)), 3 in other) == (None, False, False)
        assert other.gather(np.array([0, 1]), np.empty) is None
        assert other.num_cached == 0
        assert other.missing().tolist() == []

    (line,) = caplog.messages
    assert f"process {os.getpid()} reads all samples from the dataset" in line
    assert "RLIMIT_AS" in line
    assert ds.cache_info().num_cached == 3


def test_a_job_with_little_address_space_beside_the_cache_of_another_has_its_own(
    start: Any, caplog: Any
) -> None:
    """That of the other job would leave it too little; one warning says so; all samples are right."""
    dataset = RaggedImages(20)
    open_large = functools.partial(CachedDataset, max_memory="10GB", cache_key="photos")
    start(lambda: (ds := open_large(dataset), os.fstat(ds.cache._arena.segment.fd).st_size)).answer()
    say_once.cache_clear()
    with limited(resource.RLIMIT_AS, mapped_bytes() + 300 * MB), caplog.at_level(logging.WARNING, "fastload"):
        ds = open_large(dataset)
        assert_right(ds, dataset)
    (line,) = caplog.messages
    assert "RLIMIT_AS" in line
    assert ds.cache_info().num_cached == 20
    assert ds.cache_info().max_bytes < 300 * MB


def test_a_refused_write_of_the_description_leaves_nothing(monkeypatch: Any) -> None:
    """A segment that cannot be written to is closed, and the error says what was tried."""
    monkeypatch.setattr(os, "pwrite", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(SharedMemoryError, match="cannot write to a new shared segment"):
        SharedMemoryCache(4, [1], max_memory=MB)


def test_without_locks_samples_of_several_sizes_are_not_cached(monkeypatch: Any, caplog: Any) -> None:
    """Shared space cannot be claimed, with one warning; rows of one size need no lock."""
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(38, "Function not implemented")))
    mixed, ragged = MixedImages(30), RaggedImages(30)
    shared = CachedDataset(mixed, max_memory=MB)
    assert_right(shared, mixed)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fastload"):
        uncached = CachedDataset(ragged, max_memory=MB)
        assert_right(uncached, ragged)

    odd = [index for index in range(30) if mixed.sample(index)[0].shape != (32, 24, 3)]
    assert isinstance(shared.cache, SharedMemoryCache)
    assert shared.cache.missing().tolist() == odd
    assert isinstance(uncached.cache, NoCache)
    assert ["Function not implemented" in text for text in caplog.messages] == [True]
