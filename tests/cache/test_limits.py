"""Caches in RAM where the system refuses: limits of a process, no memory, no locks.

tests/test_other_platforms.py has the systems that lack memfd, /proc and more.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import pickle
import resource
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.cache.dataset import CachedDataset
from fastload.cache.no_cache import NoCache
from fastload.cache.ram.arena import TABLE_AT
from fastload.cache.ram.layout import Layout, Origin
from fastload.cache.ram.shared import SharedMemoryCache
from fastload.errors import SharedMemoryError
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


@given(
    num_samples=st.integers(0, 10**7),
    max_bytes=st.integers(1, 1 << 42),
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=3),
    segment_limit=st.just(0) | st.integers(1, 1 << 42),
)
def test_a_segment_fits_its_examples(
    num_samples: int, max_bytes: int, sizes: Any, segment_limit: int
) -> None:
    """If the budget is enough for samples like the largest example the segment is too; it has a bound."""
    examples = [np.zeros(size, np.uint8) for size in sizes]
    plan = Layout.plan(num_samples, max_bytes, examples, Origin("id", 1, 0.0, None), segment_limit)
    table_bytes = -(-num_samples * 8 // 4096) * 4096
    record_bytes = max(sizes) + 1024  # at most, with frame, header and spec
    granted = max(1, min(max_bytes, segment_limit - TABLE_AT)) if segment_limit else max_bytes

    assert plan.max_bytes == granted
    if sizes[0] != sizes[-1] and granted > 256 * MB + table_bytes and not segment_limit:
        assert plan.ragged_bytes >= 256 * MB  # a few examples say little about the rest
    columns_at = TABLE_AT + table_bytes
    assert plan.ragged_at + plan.ragged_bytes <= columns_at + 2 * max(0, granted - table_bytes) + 2 * 4096
    assert plan.ragged_bytes <= max(256 * MB, 8 * num_samples * record_bytes) + 4096
    if granted > TABLE_AT + table_bytes + num_samples * record_bytes + 4 * 4096:
        assert plan.columns or plan.ragged_bytes >= num_samples * max(sizes)
    if segment_limit:
        assert plan.ragged_at + plan.ragged_bytes <= max(segment_limit, columns_at) + 2 * 4096


def test_samples_larger_than_the_examples_are_left_out_with_a_warning(monkeypatch: Any, caplog: Any) -> None:
    """Where the examples said too little, what does not fit comes from the dataset, which is logged once."""
    monkeypatch.setattr("fastload.cache.ram.layout._MIN_RAGGED_BYTES", 4096)
    dataset = Made(lambda index: np.full(8 + index if index in (0, 10, 19) else 5000, index, np.uint8))
    ds = CachedDataset(dataset, max_memory="1GB")
    with caplog.at_level(logging.WARNING, "fastload"):
        assert_right(ds, dataset)
    assert 3 < ds.cache_info().num_cached < 20
    assert ["of several sizes" in text for text in caplog.messages] == [True]


@pytest.mark.parametrize("kind", [Images, RaggedImages, MixedImages])
@pytest.mark.parametrize(
    ("limit", "allowed", "is_shared", "is_whole", "said"),
    [
        (resource.RLIMIT_FSIZE, 8 * MB, True, True, []),
        (resource.RLIMIT_FSIZE, TABLE_AT + 200_000, True, False, ["RLIMIT_FSIZE is 1,248,576", "segment of"]),
        (resource.RLIMIT_FSIZE, 4096, False, False, ["RLIMIT_FSIZE is 4,096", "lmdb:PATH"]),
        (resource.RLIMIT_NOFILE, 3, False, False, ["RLIMIT_NOFILE is 3", "lmdb:PATH"]),
        (resource.RLIMIT_AS, 200 * MB, True, True, []),
    ],
)
def test_limits_make_a_cache_smaller_or_leave_none(
    kind: Any, limit: int, allowed: int, is_shared: bool, is_whole: bool, said: list[str], caplog: Any
) -> None:
    """It holds as much as the limit grants; one warning names sizes and limit, and no sample is wrong."""
    dataset = kind(300) if kind is RaggedImages else kind(300, shape=(64, 64, 3))
    mapped, max_memory = (mapped_bytes(), "auto") if limit == resource.RLIMIT_AS else (0, "1GB")
    with limited(limit, allowed + mapped), caplog.at_level(logging.WARNING, "fastload"):
        ds = CachedDataset(dataset, max_memory=max_memory, cache_key="photos")
        assert_right(ds, dataset)

    info = ds.cache_info()
    assert isinstance(ds.cache, SharedMemoryCache if is_shared else NoCache)
    assert (3 < info.num_cached <= 300) == is_shared
    assert (info.num_cached == 300) == is_whole
    if is_shared:
        assert os.fstat(ds.cache._fd).st_size <= allowed
        assert is_whole or info.max_bytes < allowed
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
    assert os.fstat(ds.cache._fd).st_size > 200 * MB
    with limited(resource.RLIMIT_AS, mapped_bytes() + 100 * MB), caplog.at_level(logging.WARNING, "fastload"):
        other = pickle.loads(pickle.dumps(ds))
        assert_right(other, dataset)
        assert other.gather([0, 1], np.empty) is None
        assert other.cache_info().num_cached == 0
        assert 3 not in other.cache
        assert other.cache.missing().tolist() == []

    (line,) = caplog.messages
    assert f"process {os.getpid()} reads all samples from the dataset" in line
    assert "RLIMIT_AS" in line
    assert ds.cache_info().num_cached == 3


def test_a_job_with_little_address_space_beside_the_cache_of_another_has_none(
    start: Any, caplog: Any
) -> None:
    """The cache of the other job would leave it too little; one warning says so; all samples are right."""
    dataset = RaggedImages(20)
    open_large = functools.partial(CachedDataset, max_memory="10GB", cache_key="photos")
    start(lambda: (ds := open_large(dataset), os.fstat(ds.cache._fd).st_size)).answer()
    say_once.cache_clear()
    with limited(resource.RLIMIT_AS, mapped_bytes() + 300 * MB), caplog.at_level(logging.WARNING, "fastload"):
        ds = open_large(dataset)
        assert_right(ds, dataset)
    (line,) = caplog.messages
    assert "RLIMIT_AS" in line
    assert isinstance(ds.cache, NoCache)


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
