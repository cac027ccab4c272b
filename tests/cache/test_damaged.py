"""Samples that cannot be read: what `on_error` allows holds at any place, for probes, builds and `fill`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from torch.utils.data import Subset

import fastload
from fastload.cache.build import build_lmdb
from fastload.cache.dataset import CachedDataset
from fastload.cache.random_check import probe
from fastload.errors import (
    CacheMismatchError,
    ImageReadError,
    NondeterministicDatasetError,
    TooManyFailuresError,
    UnsupportedSampleError,
)
from tests.cache.build_zoo import BrokenImages
from tests.cache.zoo import Images, Made, RandomImages
from tests.kit.batches import assert_same_samples

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.kit.jobs import Job

pytestmark = pytest.mark.usefixtures("registry_folder")

PLACES = [[0], [3], [0, 1, 9, 10, 11, 18, 19]]
SKIP: dict[str, Any] = {"on_error": "skip", "max_errors": 9}


def none_at_first(index: int) -> Any:
    """Samples of which the first is None."""
    return None if index == 0 else np.full((4, 4, 3), index, np.uint8)


class BrokenRandom(RandomImages):
    """Random samples, of which some cannot be read."""

    def sample(self, index: int) -> Any:
        if index in (0, 10, 19):
            raise ImageReadError(f"{index}.jpg", "it is broken")
        return super().sample(index)


@pytest.mark.parametrize("bad", PLACES, ids=str)
@pytest.mark.parametrize("key", [None, "photos"])
def test_a_cache_in_ram_opens_whichever_sample_is_damaged(bad: list[int], key: Any, caplog: Any) -> None:
    """Other samples are probed; the loader's policy replaces what is damaged."""
    with caplog.at_level(logging.DEBUG, "fastload"):
        ds = CachedDataset(BrokenImages(bad=bad), cache_key=key)
    with fastload.DataLoader(ds, 5, on_error="replace", max_errors=9) as loader:
        batches = [batch[1].tolist() for batch in loader]

    # A handler keeps its records, and a record with an error would keep the cache.
    assert not any(isinstance(part, Exception) for record in caplog.records for part in record.args or ())
    assert ds.cache_info().layout == "uniform"
    assert [len(batch) for batch in batches] == [5] * 4
    assert [failed.index for failed in loader.failed_samples] == bad
    assert ("cannot be read, so another one is probed" in caplog.text) == bool({0, 10, 19} & set(bad))


@pytest.mark.parametrize("num_samples", [1, 2, 3, 40])
def test_if_no_probed_sample_can_be_read_the_error_says_so(num_samples: int) -> None:
    """The dataset's own error, with what was tried; not after every sample of it."""
    source = BrokenImages(num_samples, bad=range(num_samples))
    with pytest.raises(ImageReadError, match="it is broken") as caught:
        CachedDataset(source)

    (note,) = caught.value.__notes__
    assert note.startswith(f"none of the {min(10, num_samples)} samples that were probed can be read")
    assert sum(source.reads) == min(10, num_samples)


def test_an_error_that_no_policy_allows_is_raised_at_once() -> None:
    """A random dataset and a value that cannot be cached, also behind damaged samples."""
    with pytest.raises(NondeterministicDatasetError):
        CachedDataset(BrokenRandom("numpy"))
    with pytest.raises(NondeterministicDatasetError):
        probe(BrokenRandom("torch"))
    with pytest.raises(UnsupportedSampleError):
        CachedDataset(Made(lambda index: object()))


def opened(source: Any) -> tuple[Any, int]:
    ds = CachedDataset(source, cache_key="photos")
    ds.fill(0, progress=False, on_error="skip", max_errors=9)
    return ds, ds.cache_info().num_cached


def test_a_cache_of_another_job_opens_if_sample_0_is_damaged_now(start: Callable[..., Job]) -> None:
    """Another sample is compared, and other samples are still an error."""
    assert start(opened, BrokenImages()).answer() == 20
    ds = CachedDataset(BrokenImages(bad=[0]), cache_key="photos")
    assert_same_samples(ds[0], Images().sample(0))
    with pytest.raises(CacheMismatchError, match="sample 10 of the dataset differs"):
        CachedDataset(BrokenImages(bad=[0], shift=1), cache_key="photos")


# --- fill -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("bad", PLACES, ids=str)
def test_fill_leaves_out_what_cannot_be_read(bad: list[int], num_workers: int, caplog: Any) -> None:
    """Each is read once and named once; the rest is stored."""
    ds = CachedDataset(source := BrokenImages(bad=bad))
    before = np.array(source.reads)
    info = ds.fill(num_workers, progress=False, **SKIP)

    assert info.num_cached == 20 - len(bad)
    assert [index for index in range(20) if index not in ds.cache] == bad
    assert f"{len(bad)} of 20 samples could not be read" in caplog.text
    assert f"{bad[0]} ({bad[0]}.jpg): ImageReadError: it is broken" in caplog.text
    if num_workers == 0:
        assert (np.array(source.reads) - before)[bad].tolist() == [1] * len(bad)


def test_fill_ends_if_more_fail_than_max_errors_allows() -> None:
    """As a build does; what was stored stays."""
    ds = CachedDataset(BrokenImages(bad=[5, 6, 7]))
    with pytest.raises(TooManyFailuresError, match=r"3 of 20 samples could not be read, and .* allows 2"):
        ds.fill(0, progress=False, on_error="skip", max_errors=2)
    assert ds.cache_info().num_cached >= 3
    for wrong in ({"on_error": "replace"}, {"max_errors": 2.0}, {"max_errors": 9}):
        with pytest.raises(ValueError, match=r"on_error|max_errors"):
            ds.fill(0, progress=False, **wrong)
    unsupported = CachedDataset(Made(lambda index: object() if index == 5 else np.zeros(3)))
    with pytest.raises(UnsupportedSampleError):
        unsupported.fill(0, progress=False, **SKIP)


def test_a_whole_chunk_of_damaged_samples_does_not_end_fill() -> None:
    """Only a cache that is full does."""
    ds = CachedDataset(BrokenImages(400, bad=range(20, 220)))
    assert ds.fill(0, progress=False, on_error="skip", max_errors=200).num_cached == 200


# --- files ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("needs_lmdb")
@pytest.mark.parametrize("version", [None, "1"])
@pytest.mark.parametrize("bad", PLACES, ids=str)
def test_a_cache_on_disk_is_built_and_opened_whichever_sample_is_damaged(
    bad: list[int], version: Any, tmp_path: Path
) -> None:
    """By either way to build, and again from the dataset and from the file alone."""
    source = BrokenImages(bad=bad, version=version)
    CachedDataset.build(source, tmp_path / "a", num_workers=0, progress=False, **SKIP).close()
    build_lmdb(source, tmp_path / "b", num_workers=0, **SKIP).close()
    for name in "ab":
        assert build_lmdb(source, tmp_path / name, **SKIP).num_cached == 20 - len(bad)
        ds = CachedDataset(source, cache=f"lmdb:{tmp_path / name}")
        assert_same_samples(ds[4], Images().sample(4))
        assert len(CachedDataset.from_cache(tmp_path / name)) == 20 - len(bad)
        repaired = CachedDataset(BrokenImages(version=version), cache=f"lmdb:{tmp_path / name}")
        assert_same_samples(repaired[bad[0]], Images().sample(bad[0]))


@pytest.mark.usefixtures("needs_lmdb")
def test_a_finished_cache_opens_if_its_samples_are_damaged_now(tmp_path: Path) -> None:
    """What it holds needs no source; what another dataset of the same length holds is an error."""
    CachedDataset.build(Images(), tmp_path / "a", num_workers=0, progress=False).close()
    ds = CachedDataset(BrokenImages(bad=[0, 10, 19]), cache=f"lmdb:{tmp_path}/a")
    assert_same_samples(ds[0], Images().sample(0))
    for options in ({}, SKIP):
        assert build_lmdb(BrokenImages(bad=[0]), tmp_path / "a", **options).num_cached == 20


@pytest.mark.usefixtures("needs_lmdb")
@pytest.mark.parametrize(
    "dataset", [Made(none_at_first), Subset(Made(none_at_first), range(5))], ids=["all", "subset"]
)
def test_a_cache_whose_first_sample_is_none_opens_again(dataset: Any, tmp_path: Path) -> None:
    """None is a sample, and not one that was not read."""
    path = tmp_path / "cache"
    build_lmdb(dataset, path, num_workers=0).close()
    assert build_lmdb(dataset, path).num_cached == len(dataset)
    ds = CachedDataset(dataset, cache=f"lmdb:{path}")
    assert ds[0] is None
    assert_same_samples(ds[4], none_at_first(4))


class RandomAtSeven(Images):
    """One sample that is random, and that no probe reads."""

    def sample(self, index: int) -> Any:
        image, label = super().sample(index)
        return (np.random.randint(0, 9, image.shape).astype(np.uint8) if index == 7 else image), label


@pytest.mark.parametrize("num_workers", [0, 2])
def test_fill_names_the_sample_and_how_to_go_on(num_workers: int) -> None:
    """With the error's type and text, also from a worker process; what it advises works."""
    ds = CachedDataset(BrokenImages(bad=[3]))
    with pytest.raises(ImageReadError) as caught:
        ds.fill(num_workers, progress=False)
    assert "Caught" not in str(caught.value)
    notes = caught.value.__notes__
    assert 'on_error="skip" (in a command, --on-error skip) leaves out samples that cannot be read' in notes
    assert "in sample 3 of the dataset, 3.jpg" in notes
    assert any("raised in a worker process" in note for note in notes) == (num_workers > 0)
    assert ds.fill(num_workers, progress=False, **SKIP).num_cached == len(ds) - 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_random_sample_is_never_left_out_of_a_build(num_workers: int, tmp_path: Path) -> None:
    """Nothing is damaged: training without it would be wrong, and no advice says to leave it out."""
    options: Any
    for options in ({}, SKIP):
        with pytest.raises(NondeterministicDatasetError) as caught:
            build_lmdb(RandomAtSeven(20), tmp_path / "x", num_workers=num_workers, **options)
        notes = caught.value.__notes__
        assert any("in sample 7 of the dataset" in note for note in notes)
        assert not any("leaves out" in note for note in notes)
