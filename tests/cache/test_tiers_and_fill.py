"""Filling a cache ahead of training, and a cache in RAM in front of a file."""

from __future__ import annotations

import io
import itertools
import logging
import os
import pickle
import re
from typing import TYPE_CHECKING, Any, ClassVar

import albumentations as A
import numpy as np
import pytest
import rich.console
from torch.utils.data import default_collate

import fastload
from fastload.cache import locks
from fastload.cache.build.build import build_lmdb
from fastload.cache.dataset import CachedDataset
from fastload.cache.fingerprint import fingerprint_of
from fastload.cache.ram.private import PrivateCache
from fastload.cache.stack import Stack
from fastload.errors import CacheMismatchError
from fastload.memory import segment
from tests.cache.zoo import Everything, Images, KnownImages, MixedImages, RaggedImages
from tests.kit.batches import assert_same_samples

if TYPE_CHECKING:
    from pathlib import Path


class Failing(Images):
    """Raises at one sample."""

    def sample(self, index: int) -> Any:
        if index == 7:
            raise ZeroDivisionError("no such picture")
        return super().sample(index)


@pytest.mark.parametrize("kind", [Images, RaggedImages, MixedImages, Everything])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_fill_reads_each_sample_once(kind: type[Images], num_workers: int, tmp_path: Path) -> None:
    """After fill() every sample is cached and right, read once but for the guard's two.

    A worker that finds the lock on ragged space held for long, on a busy machine, leaves its sample to
    another round, which reads it again.
    """
    most_again = 10 if num_workers and kind is not Images else 0
    dataset = kind(200, log=tmp_path / "reads")
    ds = CachedDataset(dataset, budget=64 << 20)
    info = ds.fill(num_workers, progress=False)
    reads = sum(dataset.reads)
    for index in range(200):
        assert_same_samples(ds.view(index), dataset.sample(index))

    assert info.num_cached == 200
    assert 202 <= reads <= 202 + most_again
    assert sum(dataset.reads) == reads


class Readers(Images):
    """Each sample is the number of the process that read it."""

    def sample(self, index: int) -> Any:
        return os.getpid()


def test_workers_fill_a_cache_in_shared_memory() -> None:
    """This process reads the three examples alone."""
    ds = CachedDataset(Readers(40), budget=1 << 20)
    ds.fill(2, progress=False)
    readers = [ds[index] for index in range(40)]

    assert readers.count(os.getpid()) == 3


def test_fill_comes_back_for_what_lost_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples whose worker did not get the lock at once are stored in another round."""
    calls = itertools.count()
    real = locks.try_lock
    monkeypatch.setattr(
        locks, "try_lock", lambda fd, *, wait_s: next(calls) % 3 == 0 and real(fd, wait_s=wait_s)
    )
    ds = CachedDataset(RaggedImages(100), budget=1 << 20)

    assert ds.fill(0, progress=False).num_cached == 100


@pytest.mark.parametrize("kind", [Images, RaggedImages])
def test_fill_stops_at_the_budget(kind: type[Images]) -> None:
    """What does not fit is left to the source, and fill() does not read all of it to find out."""
    dataset = kind(2000)
    ds = CachedDataset(dataset, budget=100_000)
    info = ds.fill(0, progress=False)

    assert 0 < info.num_cached < 1000
    assert sum(dataset.reads) < 1000
    assert_same_samples(ds.view(1999), dataset.sample(1999))


@pytest.mark.parametrize("kind", [Images, RaggedImages, MixedImages, Everything])
@pytest.mark.parametrize("budget", ["10kB", "50kB", "200kB"])
def test_a_budget_in_words_is_kept(kind: type[Images], budget: str) -> None:
    """Headers, tables and partly used pages count, too."""
    ds = CachedDataset(kind(480), budget=budget)
    info = ds.fill(0, progress=False)

    assert info.budget_bytes is not None
    assert info.nbytes <= info.budget_bytes
    assert info.num_cached > 0 or budget != "200kB"


@pytest.mark.parametrize(
    ("kind", "cache"),
    [
        (Images, "ram"),
        (RaggedImages, "ram"),
        (MixedImages, "ram"),
        (Images, "lmdb"),
        (RaggedImages, "lmdb"),
        (Images, "private"),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_budget_that_is_too_small_is_one_warning(
    kind: type[Images], cache: str, num_workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as it is known; not once for each worker, nor for each epoch."""
    if cache == "private":
        monkeypatch.setattr(segment, "why_unsupported", lambda: "a test")
    handler = logging.FileHandler(tmp_path / "log")  # forked workers append to it, too
    logging.getLogger("fastload").addHandler(handler)
    handler.setLevel(logging.WARNING)
    try:
        tiers = ["ram", f"lmdb:{tmp_path / 'x'}"] if cache == "lmdb" else "ram"
        ds = CachedDataset(kind(480), cache=tiers, budget=80_000, num_workers=0, progress=False)
        for _ in range(3):
            for _ in fastload.DataLoader(ds, 16, num_workers=num_workers, collate_fn=len):
                pass
    finally:
        logging.getLogger("fastload").removeHandler(handler)
        handler.close()
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if "budget of 80.0 kB" in line]

    assert len(lines) == 1
    assert re.search(r"holds only \d+ of 480 samples \(\d+%\)", lines[0])


def test_fill_twice_reads_nothing() -> None:
    """A full cache is left as it is."""
    dataset = Images(30)
    ds = CachedDataset(dataset, budget=1 << 20)
    ds.fill(0, progress=False)
    before = sum(dataset.reads)
    ds.fill(0, progress=False)

    assert sum(dataset.reads) == before


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_fill_is_the_dataset_s(num_workers: int) -> None:
    """A sample that cannot be read stops fill() with the dataset's own error; what was stored stays."""
    ds = CachedDataset(Failing(20), budget=1 << 20)

    with pytest.raises(ZeroDivisionError, match="no such picture"):
        ds.fill(num_workers, progress=False)
    assert ds.cache_info().num_cached >= 3


def test_fill_reports(caplog: Any) -> None:
    """The end of fill() is one line with samples and bytes."""
    ds = CachedDataset(Images(30), budget=1 << 20)
    with caplog.at_level(logging.INFO, "fastload"):
        ds.fill(0, progress=False)

    assert "cache: filled: 30 of 30 samples" in caplog.text


def test_a_second_fill_draws_nothing(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """When nothing is missing there is no bar of 0 samples, and the log says that the cache is full."""
    ds = CachedDataset(Images(30), budget=1 << 20)
    ds.fill(0, progress=False)
    terminal = io.StringIO()
    console = rich.console.Console(file=terminal, force_terminal=True)
    monkeypatch.setattr(rich.console, "Console", lambda **_: console)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # or rich would not be asked at all
    with caplog.at_level(logging.INFO, "fastload"):
        info = ds.fill(0)

    assert info.num_cached == 30
    assert terminal.getvalue() == ""
    assert [record.getMessage().partition(": 30 of 30 samples in ")[0] for record in caplog.records] == [
        "cache: nothing to fill, the cache is full already"
    ]


def test_a_fill_beyond_the_budget_says_that_nothing_more_fits(caplog: Any) -> None:
    """A second fill() of a cache that is too small neither reads nor claims that all samples are there."""
    dataset = Images(2000)
    ds = CachedDataset(dataset, budget=100_000)
    ds.fill(0, progress=False)
    before = sum(dataset.reads)
    caplog.clear()
    with caplog.at_level(logging.INFO, "fastload"):
        info = ds.fill(0, progress=False)

    assert sum(dataset.reads) == before
    assert f"takes no more samples: {info.num_cached:,} of 2,000 samples" in caplog.text


def test_fill_of_a_finished_file_has_nothing_to_do(tmp_path: Path, caplog: Any) -> None:
    """A file takes nothing more, and the log says so in place of a bar of 0 samples."""
    build_lmdb(Unreadable(40), tmp_path / "x", num_workers=0, progress=False, on_error="skip")
    ds = CachedDataset.from_cache(tmp_path / "x")
    with caplog.at_level(logging.INFO, "fastload"):
        ds.fill(0)

    assert "the cache is full already: 37 of 37 samples" in caplog.text


def test_fill_of_a_private_cache_stays_here() -> None:
    """A cache that workers could not share is filled in this process."""
    ds = CachedDataset(Images(100), cache=PrivateCache(100, budget=1 << 20))

    assert ds.fill(2, progress=False).num_cached == 100


# --- two tiers -------------------------------------------------------------------------------------------


def tiered(dataset: Images, path: Path, **options: Any) -> CachedDataset:
    return CachedDataset(dataset, cache=["ram", f"lmdb:{path}"], num_workers=0, progress=False, **options)


@pytest.mark.parametrize("kind", [Images, RaggedImages, Everything])
def test_what_ram_lacks_is_read_from_the_file(kind: type[Images], tmp_path: Path) -> None:
    """The source is read for the file alone; samples move to RAM as they are asked for."""
    dataset = kind(40)
    ds = tiered(dataset, tmp_path / "x.lmdb", budget=1 << 20)
    reads = sum(dataset.reads)
    first = ds.cache_info().num_cached
    for _ in range(2):
        for index in range(40):
            assert_same_samples(ds.view(index), dataset.sample(index))

    assert first <= 3
    assert ds.cache_info().num_cached == 40
    assert sum(dataset.reads) == reads == 42


def test_a_small_budget_leaves_the_rest_to_the_file(tmp_path: Path) -> None:
    """Samples that do not fit in RAM come from the file at every access."""
    dataset = RaggedImages(40)
    ds = tiered(dataset, tmp_path / "x.lmdb", budget=8192)
    reads = sum(dataset.reads)
    for index in range(40):
        assert_same_samples(ds.view(index), dataset.sample(index))

    assert ds.cache_info().num_cached < 40
    assert sum(dataset.reads) == reads


def test_tiers_work_in_a_loader(tmp_path: Path) -> None:
    """Workers share the tier in RAM, and batches are right before and after it is full."""
    dataset = Images(40)
    ds = tiered(dataset, tmp_path / "x.lmdb", budget=1 << 20)
    loader = fastload.DataLoader(ds, batch_size=8, num_workers=2)
    for _ in range(2):
        for number, (images, labels) in enumerate(loader):
            expected = default_collate([dataset.sample(i) for i in range(number * 8, number * 8 + 8)])
            assert images.equal(expected[0])
            assert labels.equal(expected[1])

    assert ds.cache_info().num_cached == 40


def test_fill_moves_the_file_to_ram(tmp_path: Path) -> None:
    """fill() of two tiers reads the file, not the source."""
    dataset = Images(40)
    ds = tiered(dataset, tmp_path / "x.lmdb", budget=1 << 20)
    reads = sum(dataset.reads)

    assert ds.fill(2, progress=False).num_cached == 40
    assert sum(dataset.reads) == reads


def test_tiers_explain_both(tmp_path: Path) -> None:
    """explain() says why each tier is in use, and the layout names both."""
    ds = tiered(Images(4), tmp_path / "x.lmdb")

    assert isinstance(ds.cache, Stack)
    assert ds.cache.layout == "uniform over lmdb"
    assert "shared memory" in ds.cache.explain()
    assert os.fspath(tmp_path / "x.lmdb") in ds.cache.explain()


def test_tiers_pickle_as_handles(tmp_path: Path) -> None:
    """A pickled dataset of two tiers reads and fills the same memory."""
    ds = tiered(Images(4), tmp_path / "x.lmdb")
    other = pickle.loads(pickle.dumps(ds))
    other.view(1)

    assert 1 in ds.cache


class Known(Images):
    """Says what it is, and has names for its classes."""

    classes: ClassVar = ["cat", "dog"]

    def fingerprint(self) -> str:
        return "1"


class Unreadable(Known):
    """Some samples cannot be read."""

    def sample(self, index: int) -> Any:
        if index in (3, 7, 8):
            raise OSError("no such picture")
        return super().sample(index)


@pytest.mark.parametrize("ram", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_file_alone_is_a_dataset(tmp_path: Path, shards: int, *, ram: bool) -> None:
    """from_cache() gives every sample and the classes, batches included, and reads no source."""
    path = tmp_path / "x"
    build_lmdb(Known(40), path, num_workers=0, progress=False, shards=shards)
    ds = CachedDataset.from_cache(path, ram=ram, budget=1 << 20)
    loader = fastload.DataLoader(ds, batch_size=8, num_workers=1)
    for _ in range(2):
        for number, (images, _) in enumerate(loader):
            for row in range(8):
                assert np.array_equal(images[row], Known(40).sample(number * 8 + row)[0])

    assert len(ds) == 40
    assert ds.dataset.classes == ["cat", "dog"]
    assert ds.cache_info().num_cached == 40


@pytest.mark.parametrize("ram", [False, True])
def test_skipped_samples_are_left_out(tmp_path: Path, *, ram: bool) -> None:
    """A dataset from a file numbers the stored samples without gaps."""
    path = tmp_path / "x"
    build_lmdb(Unreadable(40), path, num_workers=0, progress=False, on_error="skip")
    ds = CachedDataset.from_cache(path, ram=ram, budget=1 << 20)
    stored = [index for index in range(40) if index not in (3, 7, 8)]

    assert [ds[position][1] for position in range(len(ds))] == stored
    (_, labels) = next(iter(fastload.DataLoader(ds, batch_size=37)))
    assert labels.tolist() == stored


def test_a_skipped_sample_is_asked_of_the_source(tmp_path: Path) -> None:
    """With the source at hand a sample that was skipped raises the source's own error."""
    path = tmp_path / "x"
    build_lmdb(
        Unreadable(40),
        path,
        num_workers=0,
        progress=False,
        on_error="skip",
        fingerprint=fingerprint_of(Unreadable(40)),
    )
    ds = CachedDataset(Unreadable(40), cache=f"lmdb:{path}")

    assert ds[4][1] == 4
    with pytest.raises(OSError, match="no such picture"):
        ds[7]


@pytest.mark.parametrize("tier", ["lmdb", "ram, lmdb"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_error_of_a_skipped_sample_names_it_and_the_way_out(
    tier: str, num_workers: int, tmp_path: Path
) -> None:
    """In training, too: the error's notes name the sample and from_cache, which leaves such samples out."""
    path = tmp_path / "x"
    build_lmdb(Unreadable(40), path, num_workers=0, progress=False, on_error="skip")
    cache: Any = f"lmdb:{path}" if tier == "lmdb" else ["ram", f"lmdb:{path}"]
    ds = CachedDataset(Unreadable(40), cache=cache, budget=1 << 20)

    with pytest.raises(OSError, match="no such picture") as caught:
        list(fastload.DataLoader(ds, batch_size=4, num_workers=num_workers))

    notes = "\n".join([str(caught.value), *caught.value.__notes__])
    assert f"sample 3 could not be read when {path} was built and was left out" in notes
    assert f"CachedDataset.from_cache({str(path)!r}, transform)" in notes


def test_an_error_that_is_not_of_a_skipped_sample_has_no_such_note() -> None:
    """A cache in RAM leaves nothing out: the dataset's error is raised as it is."""
    ds = CachedDataset(Unreadable(40), budget=1 << 20)

    with pytest.raises(OSError, match="no such picture") as caught:
        ds[7]

    assert not hasattr(caught.value, "__notes__")


def test_the_same_parts_are_opened_without_reading(tmp_path: Path) -> None:
    """A file of the same fingerprint is opened without reading the source; another one is refused."""
    path = tmp_path / "x"
    CachedDataset(KnownImages(40), cache=f"lmdb:{path}", num_workers=0, progress=False)
    dataset = KnownImages(40)
    ds = CachedDataset(dataset, cache=f"lmdb:{path}")

    assert sum(dataset.reads) == 0
    assert "its fingerprint matches" in ds.cache.explain()
    with pytest.raises(CacheMismatchError, match='fingerprint is "2" here and "1" there'):
        CachedDataset(KnownImages(40, version="2"), cache=f"lmdb:{path}")
    with pytest.raises(CacheMismatchError, match=r"prepare is .* here and nothing there"):
        CachedDataset(KnownImages(40), cache=f"lmdb:{path}", prepare=A.Resize(8, 8))


@pytest.mark.parametrize("tiers", [[], ["ram"], ["ram", "ram"], ["lmdb:x", "ram"], ["ram", "lmdb:x", "ram"]])
def test_odd_tiers_are_refused(tiers: list[str]) -> None:
    """Tiers are a cache in RAM followed by one on disk, and nothing else."""
    with pytest.raises(ValueError, match="is not a valid pair of caches: give"):
        CachedDataset(Images(4), cache=tiers)
