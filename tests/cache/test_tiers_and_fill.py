"""Filling a cache ahead of training, and a cache in RAM in front of a file."""

from __future__ import annotations

import io
import itertools
import logging
import os
import pickle
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import albumentations as A
import numpy as np
import pytest
import rich.console

import fastload
from fastload.cache import progress
from fastload.cache.build.build import build_lmdb
from fastload.cache.dataset import CachedDataset
from fastload.cache.progress import BuildProgress
from fastload.cache.ram.private import PrivateCache
from fastload.cache.stack import Stack
from fastload.errors import CacheMismatchError
from fastload.memory import segment
from fastload.system import locks
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_workers"), [(Images, 2), (RaggedImages, 0), (MixedImages, 2), (Everything, 0)]
)
def test_fill_reads_each_sample_once(kind: type[Images], num_workers: int, tmp_path: Path) -> None:
    """After fill() every sample is cached and right, read once but for the guard's two.

    A worker that finds the lock on ragged space held for long, on a busy machine, leaves its sample to
    another round, which reads it again.
    """
    max_again = 10 if num_workers and kind is not Images else 0
    dataset = kind(200, log=tmp_path / "reads")
    ds = CachedDataset(dataset, max_memory=64 << 20)
    info = ds.fill(num_workers, progress=False)
    reads = sum(dataset.reads)
    for index in range(200):
        assert_same_samples(ds._view(index), dataset.sample(index))

    assert info.num_cached == 200
    assert 202 <= reads <= 202 + max_again
    assert sum(dataset.reads) == reads


def test_fill_comes_back_for_what_lost_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples whose worker did not get the lock at once are stored in another round."""
    calls = itertools.count()
    real = locks.try_lock
    monkeypatch.setattr(
        locks, "try_lock", lambda fd, *, wait_s: next(calls) % 3 == 0 and real(fd, wait_s=wait_s)
    )
    ds = CachedDataset(RaggedImages(100), max_memory=1 << 20)

    assert ds.fill(0, progress=False).num_cached == 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cache", "num_workers"),
    [
        (Images, "ram", 0),
        (RaggedImages, "ram", 2),
        (MixedImages, "ram", 0),
        (Images, "lmdb", 2),
        (Images, "private", 2),
    ],
)
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
        ds = CachedDataset(kind(480), cache=tiers, max_memory=80_000, num_workers=0, progress=False)
        for _ in range(3):
            for _ in fastload.DataLoader(ds, 16, num_workers=num_workers, collate_fn=len):
                pass
    finally:
        logging.getLogger("fastload").removeHandler(handler)
        handler.close()
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if "max_memory=80.0 kB" in line]

    assert len(lines) == 1
    assert re.search(r"holds only \d+ of 480 samples \(\d+%\)", lines[0])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_fill_is_the_dataset_s(num_workers: int) -> None:
    """A sample that cannot be read stops fill() with the dataset's own error; what was stored stays."""
    ds = CachedDataset(Failing(20), max_memory=1 << 20)

    with pytest.raises(ZeroDivisionError, match="no such picture"):
        ds.fill(num_workers, progress=False)
    assert ds.cache_info().num_cached >= 3


def test_a_second_fill_draws_nothing(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """When nothing is missing nothing is read, there is no bar, and the log says that the cache is full."""
    dataset = Images(30)
    ds = CachedDataset(dataset, max_memory=1 << 20)
    terminal = io.StringIO()
    console = rich.console.Console(file=terminal, force_terminal=True)
    monkeypatch.setattr(rich.console, "Console", lambda **_: console)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # or rich would not be asked at all
    with caplog.at_level(logging.INFO, "fastload"):
        ds.fill(0, progress=False)
        before = sum(dataset.reads)
        info = ds.fill(0)

    assert info.num_cached == 30
    assert terminal.getvalue() == ""
    assert sum(dataset.reads) == before
    assert [record.getMessage().partition(": 30 of 30 samples")[0] for record in caplog.records[-2:]] == [
        "cache: filled",
        "cache: nothing to fill, the cache is full already",
    ]


@pytest.mark.parametrize("kind", [Images, RaggedImages])
def test_fill_stops_at_the_budget(kind: type[Images], caplog: Any) -> None:
    """It does not read all that is left to the source to find out, and a second one reads nothing."""
    dataset = kind(2000)
    ds = CachedDataset(dataset, max_memory=100_000)
    ds.fill(0, progress=False)
    before = sum(dataset.reads)
    with caplog.at_level(logging.INFO, "fastload"):
        info = ds.fill(0, progress=False)

    assert 0 < info.num_cached < 1000
    assert before < 1000
    if kind is Images:  # smaller ones may fit into what is left
        assert sum(dataset.reads) == before
        assert f"takes no more samples: {info.num_cached:,} of 2,000 samples" in caplog.text
    assert_same_samples(ds._view(1999), dataset.sample(1999))


def test_fill_of_a_finished_file_has_nothing_to_do(tmp_path: Path, caplog: Any) -> None:
    """A file takes nothing more, and the log says so in place of a bar of 0 samples."""
    build_lmdb(Unreadable(40), tmp_path / "x", num_workers=0, progress=False, on_error="skip", max_errors=1.0)
    ds = CachedDataset.from_cache(tmp_path / "x")
    with caplog.at_level(logging.INFO, "fastload"):
        ds.fill(0)

    assert "the cache is full already: 37 of 37 samples" in caplog.text


@pytest.mark.slow
def test_fill_of_a_private_cache_stays_here() -> None:
    """Workers fill a cache that they share; one that they could not share is filled in this process."""
    images = Images(100)
    private = CachedDataset(images, cache=PrivateCache(100, max_memory=1 << 20))
    shared_reads = Images(100)
    CachedDataset(shared_reads, max_memory=1 << 20).fill(2, progress=False)

    assert private.fill(2, progress=False).num_cached == 100
    assert sum(map(bool, images.reads)) == 100
    assert sum(map(bool, shared_reads.reads)) == 3


# --- two tiers -------------------------------------------------------------------------------------------


def tiered(dataset: Images, path: Path, **options: Any) -> CachedDataset:
    return CachedDataset(dataset, cache=["ram", f"lmdb:{path}"], num_workers=0, progress=False, **options)


@pytest.mark.parametrize(("kind", "max_memory"), [(Everything, 1 << 20), (RaggedImages, 8192)])
def test_what_ram_lacks_is_read_from_the_file(kind: type[Images], max_memory: int, tmp_path: Path) -> None:
    """The source is read for the file alone; samples move to RAM as they are asked for, if they fit."""
    dataset = kind(40)
    ds = tiered(dataset, tmp_path / "x.lmdb", max_memory=max_memory)
    reads = sum(dataset.reads)
    first = ds.cache_info().num_cached
    for _ in range(2):
        for index in range(40):
            assert_same_samples(ds._view(index), dataset.sample(index))

    assert first <= 3
    assert (ds.cache_info().num_cached == 40) == (max_memory > 8192)
    assert sum(dataset.reads) == reads == 42


def test_fill_moves_the_file_to_ram(tmp_path: Path) -> None:
    """fill() of two tiers reads the file, not the source."""
    dataset = Images(40)
    ds = tiered(dataset, tmp_path / "x.lmdb", max_memory=1 << 20)
    reads = sum(dataset.reads)

    assert ds.fill(2, progress=False).num_cached == 40
    assert sum(dataset.reads) == reads


def test_tiers_explain_both_and_pickle_as_handles(tmp_path: Path) -> None:
    """explain() says why each tier is in use, and the layout names both; a pickle fills the same memory."""
    ds = tiered(Images(4), tmp_path / "x.lmdb")
    other = pickle.loads(pickle.dumps(ds))
    other._view(1)

    assert 1 in ds.cache
    assert isinstance(ds.cache, Stack)
    assert ds.cache.layout == "uniform over lmdb"
    assert "shared memory" in ds.cache.explain()
    assert os.fspath(tmp_path / "x.lmdb") in ds.cache.explain()


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


@pytest.mark.slow
@pytest.mark.parametrize("ram", [False, True])
def test_a_file_alone_is_a_dataset(tmp_path: Path, *, ram: bool) -> None:
    """from_cache() gives every sample and the classes, batches included, and reads no source."""
    path = tmp_path / "x"
    build_lmdb(Known(40), path, num_workers=0, progress=False, shards=3 if ram else 1)
    ds = CachedDataset.from_cache(path, ram=ram, max_memory=1 << 20)
    loader = fastload.DataLoader(ds, batch_size=8, num_workers=1)
    for _ in range(2):
        for number, (images, _) in enumerate(loader):
            for row in range(8):
                assert np.array_equal(images[row], Known(40).sample(number * 8 + row)[0])

    assert len(ds) == 40
    assert ds.dataset.classes == ["cat", "dog"]
    assert ds.cache_info().num_cached == 40


@pytest.mark.slow
@pytest.mark.parametrize(("tier", "num_workers"), [("lmdb", 2), ("ram, lmdb", 0)])
def test_the_error_of_a_skipped_sample_names_it_and_the_way_out(
    tier: str, num_workers: int, tmp_path: Path
) -> None:
    """In training, too: the error's notes name the sample and from_cache, which leaves such samples out."""
    path = tmp_path / "x"
    build_lmdb(Unreadable(40), path, num_workers=0, progress=False, on_error="skip", max_errors=1.0)
    cache: Any = f"lmdb:{path}" if tier == "lmdb" else ["ram", f"lmdb:{path}"]
    ds = CachedDataset(Unreadable(40), cache=cache, max_memory=1 << 20)

    with pytest.raises(OSError, match="no such picture") as caught:
        list(fastload.DataLoader(ds, batch_size=4, num_workers=num_workers))

    notes = "\n".join([str(caught.value), *caught.value.__notes__])
    assert f"sample 3 could not be read when {path} was built and was left out" in notes
    assert f"CachedDataset.from_cache({str(path)!r}, transform)" in notes
    alone = CachedDataset.from_cache(path, ram=tier != "lmdb")  # numbers the stored samples without gaps
    labels = [alone[position][1] for position in range(len(alone))]
    assert labels == [index for index in range(40) if index not in (3, 7, 8)]
    (_, batch) = next(iter(fastload.DataLoader(alone, batch_size=37)))
    assert batch.tolist() == labels


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


# --- the bar -------------------------------------------------------------------------------------------


LONG_TITLE = "building /home/someone/projects/photographs-of-animals/caches/2026/train-256.lmdb"
Draw = Callable[..., str]


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Draw:
    """Draws one bar on a terminal of some columns, and gives its last line."""
    real = rich.console.Console
    seconds = itertools.count(0, 10)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setenv("FORCE_COLOR", "1")  # or standard error, which is no terminal, is asked

    def draw_bar(columns: int, title: str, total: int, done: int, nbytes: int = 0) -> str:
        file = io.StringIO()
        console = real(file=file, width=columns, force_terminal=True, color_system=None, legacy_windows=False)
        monkeypatch.setattr(rich.console, "Console", lambda **_: console)
        with BuildProgress(title, total, shown=True) as progress:
            progress.advance(nbytes, done)
        lines = file.getvalue().replace("\r", "\n").splitlines()
        return [line.split("\x1b[2K")[-1].rstrip() for line in lines if f"/{total:,} " in line][-1]

    return draw_bar


@pytest.mark.parametrize("columns", [80, 100, 160])
def test_the_counter_the_rate_and_the_time_are_whole(columns: int, draw: Draw) -> None:
    """A long path takes no place from the counter, the rate and the time left."""
    line = draw(columns, LONG_TITLE, 1_281_167, 640_000, nbytes=10 << 30)

    assert len(line) <= columns
    assert " 640,000/1,281,167 " in line
    assert " samples/s, 10.7 GB" in line
    assert ":" in line.split()[-1]
    assert line.startswith("building ")


def test_a_path_is_no_markup(draw: Draw) -> None:
    """Brackets in a path are drawn as they are."""
    assert draw(100, "building /data/[bold]/x.lmdb", 10, 5).startswith("building /data/[bold]/x.lmdb ")
