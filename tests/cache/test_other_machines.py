"""Caches pickled for other machines: each machine has its own, which all processes on it share."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fastload.cache.dataset import CachedDataset
from fastload.cache.lmdb import copies
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.cache.ram import registry
from fastload.cache.ram.shared import SharedMemoryCache
from fastload.errors import SegmentError
from fastload.memory.segment import pickled_for_other_machines
from tests.cache.test_remote_caches import build
from tests.cache.zoo import Images, KnownImages, RaggedImages
from tests.kit.batches import assert_same_samples
from tests.kit.remote import FaultyFileSystem, register

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("registry")


def sent(value: Any) -> bytes:
    """Its pickle for other machines."""
    with pickled_for_other_machines():
        return pickle.dumps(value)


def from_elsewhere(dataset: CachedDataset) -> bytes:
    """The pickle of a cached dataset whose cache cannot be reached from here, as on a different machine."""
    text = sent(dataset)
    dataset.cache.close()
    return text


def test_on_the_same_machine_it_is_the_same_cache() -> None:
    """Nodes of a cluster can share a machine."""
    here = CachedDataset(Images(8))
    there = pickle.loads(sent(here))
    here.fill(num_workers=0)

    assert there.cache_info().num_cached == 8


@pytest.mark.parametrize(
    "source", [Images(8), KnownImages(8), RaggedImages(8)], ids=lambda d: type(d).__name__
)
def test_a_machine_that_cannot_reach_the_cache_makes_one(source: Any) -> None:
    """All workers of that machine share it, with the same layout; without a fingerprint, too."""
    first = CachedDataset(source)
    layout = first.cache_info().layout
    text = from_elsewhere(first)
    one, other = pickle.loads(text), pickle.loads(text)
    assert one.cache_info().num_cached == 0
    one.fill(num_workers=0)

    assert isinstance(other.cache, SharedMemoryCache)
    assert (other.cache_info().num_cached, other.cache_info().layout) == (8, layout)
    assert_same_samples([other[i] for i in range(8)], [source[i] for i in range(8)])


def test_jobs_of_that_machine_find_it_by_its_fingerprint() -> None:
    """And it finds theirs."""
    there = pickle.loads(from_elsewhere(CachedDataset(KnownImages(8))))
    there.fill(num_workers=0)

    assert CachedDataset(KnownImages(8)).cache_info().num_cached == 8


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_machine_with_less_memory_has_a_smaller_cache(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stores what fits, and all samples are right."""
    source = Images(64, shape=(64, 64, 3))  # 0.8 of a megabyte
    first = CachedDataset(source, max_memory=1 << 20)
    limit = int(share * first.cache_info().max_bytes)
    monkeypatch.setattr(registry, "parse_memory", lambda _: limit)
    there = pickle.loads(from_elsewhere(first))
    samples = [there[i] for i in range(64)]

    assert there.cache_info().max_bytes == limit
    assert 0 < there.cache_info().nbytes <= limit
    assert_same_samples(samples, [source[i] for i in range(64)])


def test_a_machine_without_shared_memory_keeps_samples_in_each_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one log line; no sample is lost."""
    text = from_elsewhere(CachedDataset(Images(8)))

    def deny(*_: Any) -> None:
        raise SegmentError("denied")

    monkeypatch.setattr("fastload.cache.ram.layout.Layout.create_segment", deny)
    there = pickle.loads(text)

    assert there.cache_info().layout == "private"
    assert np.array_equal(there[3][0], Images(8)[3][0])


@pytest.fixture
def use_copies_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Choose the machine, by its directory of copies."""
    register()
    FaultyFileSystem.reset()

    def use(machine: str) -> None:
        monkeypatch.setenv(copies.DIRECTORY_VARIABLE, str(tmp_path / machine))

    return use


def test_each_machine_copies_a_cache_at_a_url(use_copies_of: Callable[[str], None], tmp_path: Path) -> None:
    """On first use; a plain pickle has no URL, and nothing of its credentials."""
    use_copies_of("here")
    url = "faulty://bucket/caches/train"
    build(url=url)
    cache = LMDBCache(url, progress=False)
    expected = [cache.get(i) for i in range(20)]
    text, plain = sent(cache), pickle.dumps(cache)
    (tmp_path / "here").rename(tmp_path / "gone")
    use_copies_of("there")

    assert_same_samples([pickle.loads(text).get(i) for i in range(20)], expected)
    with pytest.raises(FileNotFoundError):
        pickle.loads(plain).get(0)
