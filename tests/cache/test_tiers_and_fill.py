"""Filling a cache ahead of training, and a cache in RAM in front of a file."""

from __future__ import annotations

import io
import itertools
import logging
import os
import pickle
import re
from types import SimpleNamespace
from typing import Any

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
from fastload.errors import CacheMismatchError, ImageReadError
from fastload.memory import segment
from fastload.system import locks
from tests.cache.build_zoo import BrokenImages
from tests.cache.zoo import Images, KnownImages, MixedImages, RaggedImages
from tests.kit.batches import assert_same_samples

BAD = 3, 7, 8


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "is_shared"), [(Images, True), (MixedImages, True), (Images, False)])
def test_fill_with_workers_reads_each_sample_once(kind: Any, is_shared: bool, tmp_path: Any) -> None:
    """Every sample is then cached and right; a cache that workers cannot share is filled in this process.

    A worker that finds the lock on ragged space held for long, on a busy machine, leaves its sample to
    another round, which reads it again.
    """
    max_again = 10 if kind is not Images else 0
    dataset = kind(200, log=tmp_path / "reads")
    cache: Any = "ram" if is_shared else PrivateCache(200, max_memory=1 << 20)
    ds = CachedDataset(dataset, cache=cache, max_memory=64 << 20)
    info = ds.fill(2, progress=False)
    reads = sum(dataset.reads)
    for index in range(200):
        assert_same_samples(ds._view(index), dataset.sample(index))

    assert info.num_cached == 200
    assert 202 <= reads <= 202 + max_again
    assert sum(dataset.reads) == reads
    assert (sum(dataset._own_reads) > 5) != is_shared


def test_fill_comes_back_for_what_lost_a_race(monkeypatch: Any) -> None:
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
    kind: Any, cache: str, num_workers: int, tmp_path: Any, monkeypatch: Any
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
    ds = CachedDataset(BrokenImages(20, bad=[7]), max_memory=1 << 20)

    with pytest.raises(ImageReadError, match="it is broken"):
        ds.fill(num_workers, progress=False)
    assert ds.cache_info().num_cached >= 3


@pytest.mark.parametrize(("is_file", "num_stored"), [(False, 40), (True, 37)])
def test_fill_of_a_full_cache_does_nothing(
    is_file: bool, num_stored: int, tmp_path: Any, monkeypatch: Any, caplog: Any
) -> None:
    """Nothing is read, there is no bar, and the log says that the cache, or all that a file has, is full."""
    dataset = BrokenImages(40, bad=BAD if is_file else ())
    if is_file:
        build_lmdb(dataset, tmp_path / "x", num_workers=0, on_error="skip", max_errors=1.0)
    ds = CachedDataset.from_cache(tmp_path / "x") if is_file else CachedDataset(dataset, max_memory=1 << 20)
    terminal = io.StringIO()
    console = rich.console.Console(file=terminal, force_terminal=True)
    monkeypatch.setattr(rich.console, "Console", lambda **_: console)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # or rich would not be asked at all
    with caplog.at_level(logging.INFO, "fastload"):
        ds.fill(0, progress=False)
        before = sum(dataset.reads)
        info = ds.fill(0)

    assert info.num_cached == num_stored
    assert terminal.getvalue() == ""
    assert sum(dataset.reads) == before
    full = "cache: nothing to fill, the cache is full already"
    said = [text.partition(f": {num_stored} of {num_stored} samples")[0] for text in caplog.messages]
    assert said[-2:] == [full if is_file else "cache: filled", full]


@pytest.mark.parametrize("kind", [Images, RaggedImages])
def test_fill_stops_at_the_budget(kind: Any, caplog: Any) -> None:
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


# --- two tiers -------------------------------------------------------------------------------------------


def tiered(dataset: Images, path: Any, **options: Any) -> CachedDataset:
    return CachedDataset(dataset, cache=["ram", f"lmdb:{path}"], num_workers=0, progress=False, **options)


def test_what_ram_lacks_is_read_from_the_file(tmp_path: Any) -> None:
    """The source is read for the file alone; samples move to RAM as they are asked for, if they fit."""
    dataset = RaggedImages(40)
    ds = tiered(dataset, tmp_path / "x.lmdb", max_memory=20_000)
    for _ in range(2):
        for index in range(40):
            assert_same_samples(ds._view(index), dataset.sample(index))

    assert 3 < ds.cache_info().num_cached < 40
    assert sum(dataset.reads) == 42


def test_tiers_explain_both_and_pickle_as_handles(tmp_path: Any) -> None:
    """explain() says why each tier is in use, and the layout names both; a pickle fills the same memory."""
    ds = tiered(Images(4), tmp_path / "x.lmdb")
    other = pickle.loads(pickle.dumps(ds))
    other._view(1)

    assert 1 in ds.cache
    assert isinstance(ds.cache, Stack)
    assert ds.cache.layout == "uniform over lmdb"
    assert "shared memory" in ds.cache.explain()
    assert os.fspath(tmp_path / "x.lmdb") in ds.cache.explain()


@pytest.mark.slow
@pytest.mark.parametrize("ram", [False, True])
def test_a_file_alone_is_a_dataset(tmp_path: Any, *, ram: bool) -> None:
    """from_cache() gives every sample and the classes, batches included, and reads no source."""
    path = tmp_path / "x"
    dataset = Images(40)
    dataset.classes = ["cat", "dog"]  # type: ignore[attr-defined]
    build_lmdb(dataset, path, num_workers=0, progress=False, shards=3 if ram else 1)
    ds = CachedDataset.from_cache(path, ram=ram, max_memory=1 << 20)
    loader = fastload.DataLoader(ds, batch_size=8, num_workers=1)
    for _ in range(2):
        for number, (images, _) in enumerate(loader):
            for row in range(8):
                assert np.array_equal(images[row], dataset.sample(number * 8 + row)[0])

    assert len(ds) == 40
    assert ds.dataset.classes == ["cat", "dog"]
    assert ds.cache_info().num_cached == 40


@pytest.mark.slow
@pytest.mark.parametrize(("tier", "num_workers"), [("lmdb", 2), ("ram, lmdb", 0)])
def test_the_error_of_a_skipped_sample_names_it_and_the_way_out(
    tier: str, num_workers: int, tmp_path: Any
) -> None:
    """In training, too: the error's notes name the sample and from_cache, which leaves such samples out."""
    path = tmp_path / "x"
    dataset = BrokenImages(40, bad=BAD)
    build_lmdb(dataset, path, num_workers=0, progress=False, on_error="skip", max_errors=1.0)
    cache: Any = f"lmdb:{path}" if tier == "lmdb" else ["ram", f"lmdb:{path}"]
    ds = CachedDataset(dataset, cache=cache, max_memory=1 << 20)

    with pytest.raises(ImageReadError, match="it is broken") as caught:
        list(fastload.DataLoader(ds, batch_size=4, num_workers=num_workers))

    notes = "\n".join([str(caught.value), *caught.value.__notes__])
    assert f"sample 3 could not be read when {path} was built and was left out" in notes
    assert f"CachedDataset.from_cache({str(path)!r}, transform)" in notes
    alone = CachedDataset.from_cache(path, ram=tier != "lmdb")  # numbers the stored samples without gaps
    labels = [alone[position][1] for position in range(len(alone))]
    assert labels == [index for index in range(40) if index not in BAD]
    (_, batch) = next(iter(fastload.DataLoader(alone, batch_size=37)))
    assert batch.tolist() == labels


def test_the_same_parts_are_opened_without_reading(tmp_path: Any) -> None:
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


LONG_TITLE = "building /home/someone/projects/photographs-of-animals/caches/2026/[bold]/train-256.lmdb"


def draw_bar(columns: int, monkeypatch: Any) -> str:
    """One bar on a terminal of some columns; gives its last line."""
    seconds = itertools.count(0, 10)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setenv("FORCE_COLOR", "1")  # or standard error, which is no terminal, is asked
    file = io.StringIO()
    options: dict[str, Any] = {"force_terminal": True, "color_system": None, "legacy_windows": False}
    console = rich.console.Console(file=file, width=columns, **options)
    monkeypatch.setattr(rich.console, "Console", lambda **_: console)
    with BuildProgress(LONG_TITLE, 1_281_167, shown=True) as bar:
        bar.advance(10 << 30, 640_000)
    lines = file.getvalue().replace("\r", "\n").splitlines()
    return [line.split("\x1b[2K")[-1].rstrip() for line in lines if "/1,281,167 " in line][-1]


@pytest.mark.parametrize("columns", [80, 160])
def test_the_counter_the_rate_and_the_time_are_whole(columns: int, monkeypatch: Any) -> None:
    """A long path takes no place from the counter, the rate and the time left; its brackets are no markup."""
    line = draw_bar(columns, monkeypatch)

    assert len(line) <= columns
    assert " 640,000/1,281,167 " in line
    assert " samples/s, 10.7 GB" in line
    assert ":" in line.split()[-1]
    assert line.startswith("building ")
    assert columns < 160 or line.startswith(LONG_TITLE)
