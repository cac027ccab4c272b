"""Filling a cache ahead of training, and a file that is a dataset by itself."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import multiprocessing
import os
import re
import sys
from types import SimpleNamespace
from typing import Any

import albumentations as A
import numpy as np
import pytest

import fastload
from fastload.cache.build import build_lmdb
from fastload.cache.dataset import CachedDataset
from fastload.cache.ram import registry
from fastload.errors import CacheMismatchError, ImageReadError
from fastload.system import locks, progress
from fastload.system.progress import Progress
from tests.cache.build_zoo import BrokenImages
from tests.cache.zoo import Images, KnownImages, MixedImages, RaggedImages
from tests.kit.batches import assert_same_samples

BAD = 3, 7, 8


class Terminal(io.StringIO):
    """What is written to a terminal."""

    def isatty(self) -> bool:
        return True


class Unopened(Images):
    """Can be read where it is made alone: other processes cannot open it, or read no sample."""

    def __init__(self, fails: str) -> None:
        super().__init__(100)
        self.fails, self.pid = fails, os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.fails == "to open":
            raise FileNotFoundError("no archive")

    def __getitem__(self, index: int) -> Any:
        if os.getpid() != self.pid:
            raise FileNotFoundError("no archive")
        return super().__getitem__(index)


@pytest.mark.usefixtures("registry_folder")
@pytest.mark.parametrize("fails", ["to open", "to read"])
@pytest.mark.parametrize(
    "method",
    [
        *("fork", pytest.param("forkserver", marks=pytest.mark.slow)),
        pytest.param("spawn", marks=[pytest.mark.slow, pytest.mark.thorough]),
    ],
)
def test_a_dataset_that_fails_in_workers_leaves_no_lock(method: str, fails: str, tmp_path: Any) -> None:
    """Nor a process, a descriptor or memory, as after each test; then others can do it."""
    usual, path = multiprocessing.get_start_method(), tmp_path / "cache"
    multiprocessing.set_start_method(method, force=True)
    try:
        ds = CachedDataset(Unopened(fails), cache_key="photos", max_memory="10MB")
        with pytest.raises((FileNotFoundError, RuntimeError)):
            ds.fill(num_workers=2, progress=False)
        with pytest.raises((FileNotFoundError, RuntimeError)):
            CachedDataset.build(Unopened(fails), path, num_workers=2, progress=False)
        with pytest.raises((FileNotFoundError, RuntimeError)):
            list(fastload.DataLoader(Unopened(fails), 4, num_workers=2, multiprocessing_context=method))
    finally:
        multiprocessing.set_start_method(usual, force=True)
    assert ".cache.fastload-lock" not in os.listdir(tmp_path)
    assert ds.cache_info().num_cached == 3
    with registry.creating(wait_s=0.0) as is_alone:
        assert is_alone
    assert ds.fill(num_workers=0, progress=False).num_cached == 100
    CachedDataset.build(Images(100), path, num_workers=0, progress=False, wait=False).close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Images, MixedImages])
def test_fill_with_workers_reads_each_sample_once(kind: Any, tmp_path: Any) -> None:
    """Every sample is then cached and right."""
    max_again = 10 if kind is not Images else 0  # what found the lock on ragged space held for long
    dataset = kind(200, log=tmp_path / "reads")
    ds = CachedDataset(dataset, max_memory=64 << 20)
    info = ds.fill(2, progress=False)
    reads = sum(dataset.reads)
    for index in range(200):
        assert_same_samples(ds._view(index), dataset.sample(index))
    assert info.num_cached == 200
    assert 203 <= reads <= 203 + max_again
    assert sum(dataset.reads) == reads
    assert sum(dataset._own_reads) <= 6


def test_fill_comes_back_for_what_lost_a_race(monkeypatch: Any) -> None:
    """Samples whose worker did not get the lock at once are stored in another round."""
    calls, real = itertools.count(), locks.flock_fd
    monkeypatch.setattr(locks, "flock_fd", lambda fd, **wait: next(calls) % 3 == 0 and real(fd, **wait))
    ds = CachedDataset(RaggedImages(100), max_memory=1 << 20)
    assert ds.fill(0, progress=False).num_cached == 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [(Images, 0), (RaggedImages, 2)],
)
def test_a_budget_that_is_too_small_is_one_warning(
    kind: Any, num_workers: int, tmp_path: Any, monkeypatch: Any
) -> None:
    """As soon as it is known; not once for each worker, nor for each epoch."""
    handler = logging.FileHandler(tmp_path / "log")  # forked workers append to it, too
    handler.setLevel(logging.WARNING)
    monkeypatch.setattr(logging.getLogger("fastload"), "handlers", [handler])
    with contextlib.closing(handler):
        ds = CachedDataset(kind(480), max_memory="80kB")
        for _ in range(2):
            assert sum(fastload.DataLoader(ds, 16, num_workers=num_workers, collate_fn=len)) == 480
    (line,) = [text for text in (tmp_path / "log").read_text().splitlines() if "max_memory=80.0 kB" in text]
    assert re.search(r"it holds \d+ of 480 samples in .*, and max_memory=80.0 kB has no room", line)


@pytest.mark.parametrize("is_file", [False, True])
def test_fill_of_a_full_cache_is_nothing(is_file: bool, tmp_path: Any, monkeypatch: Any, caplog: Any) -> None:
    """Nothing is read, there is no bar, and the log says what is there."""
    dataset = BrokenImages(40, bad=BAD if is_file else ())
    if is_file:
        build_lmdb(dataset, tmp_path / "x", num_workers=0, on_error="skip", max_errors=1.0)
    ds = CachedDataset.from_cache(tmp_path / "x") if is_file else CachedDataset(dataset, max_memory=1 << 20)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with caplog.at_level(logging.INFO, "fastload"):
        ds.fill(0, progress=False)
        before = sum(dataset.reads)
        stored = ds.fill(0).num_cached
    assert stored == 40 - len(dataset.bad)
    assert (terminal.getvalue(), sum(dataset.reads)) == ("", before)
    assert [f", {stored} of {stored} samples, " in text for text in caplog.messages[-2:]] == [True] * 2


@pytest.mark.parametrize("kind", [Images, RaggedImages])
def test_fill_stops_at_the_budget(kind: Any, caplog: Any) -> None:
    """It does not read all that is left to the source to find out, and a second one reads nothing."""
    dataset = kind(2000)
    ds = CachedDataset(dataset, max_memory="100kB")
    ds.fill(0, progress=False)
    before = sum(dataset.reads)
    with caplog.at_level(logging.INFO, "fastload"):
        info = ds.fill(0, progress=False)
    assert 0 < info.num_cached <= before < 1000
    if kind is Images:  # smaller ones may fit into what is left
        assert sum(dataset.reads) == before
        assert f", {info.num_cached:,} of 2,000 samples, " in caplog.text
    assert_same_samples(ds._view(1999), dataset.sample(1999))


@pytest.mark.slow
def test_a_file_alone_is_a_dataset(path: Any) -> None:
    """from_cache() gives every sample, batches included, and reads no source."""
    ds = CachedDataset.from_cache(path)
    for _ in range(2):
        for number, (images, _) in enumerate(fastload.DataLoader(ds, batch_size=5, num_workers=1)):
            for row in range(5):
                assert np.array_equal(images[row], Images().sample(number * 5 + row)[0])
    assert len(ds) == ds.cache_info().num_cached == 20


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_error_of_a_skipped_sample_names_it_and_the_way_out(num_workers: int, tmp_path: Any) -> None:
    """In training, too: the error's notes name the sample and from_cache, which leaves such samples out."""
    path, dataset = tmp_path / "x", BrokenImages(40, bad=BAD)
    build_lmdb(dataset, path, num_workers=0, progress=False, on_error="skip", max_errors=1.0)
    ds = CachedDataset(dataset, cache=f"lmdb:{path}")
    with pytest.raises(ImageReadError, match="it is broken") as caught:
        list(fastload.DataLoader(ds, batch_size=4, num_workers=num_workers))

    notes = "\n".join([str(caught.value), *caught.value.__notes__])
    assert f"sample 3 could not be read when {path} was built and was left out" in notes
    assert f"CachedDataset.from_cache({str(path)!r}, transform)" in notes
    alone = CachedDataset.from_cache(path)  # numbers the stored samples without gaps
    labels = [alone[position][1] for position in range(len(alone))]
    assert labels == [index for index in range(40) if index not in BAD]
    (_, batch) = next(iter(fastload.DataLoader(alone, batch_size=37)))
    assert batch.tolist() == labels


def test_the_same_parts_are_opened_without_reading(tmp_path: Any) -> None:
    """A file of the same fingerprint is opened without reading the source; another one is refused."""
    cache, dataset = f"lmdb:{tmp_path / 'x'}", KnownImages(40)
    CachedDataset.build(KnownImages(40), tmp_path / "x", num_workers=0, progress=False)
    assert "its fingerprint matches" in CachedDataset(dataset, cache=cache).cache.explain()
    assert sum(dataset.reads) == 0
    with pytest.raises(CacheMismatchError, match='fingerprint is "2" here and "1" there'):
        CachedDataset(KnownImages(40, version="2"), cache=cache)
    with pytest.raises(CacheMismatchError, match=r"pre_transform is .* here and nothing there"):
        CachedDataset(KnownImages(40), cache=cache, pre_transform=A.Resize(8, 8))


@pytest.mark.parametrize("columns", [80, 160])
def test_the_counter_the_rate_and_the_time_are_whole(columns: int, monkeypatch: Any) -> None:
    """A long path takes no place from the counter, the rate and the time left; it controls no terminal."""
    title = "building /home/someone/projects/photographs-of-animals/caches/2026/\x1b[1m/train-256.lmdb"
    seconds = itertools.count(0, 10)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with Progress(title, 1_281_167, shown=True) as bar:
        bar.advance(10 << 30, 640_000)
    _, first, *_, line = terminal.getvalue().rstrip().split("\r\x1b[2K")
    assert first.endswith(" 0/1,281,167 0.0 samples/s")  # no time: nothing is known of it
    assert len(line) < columns
    assert " 640,000/1,281,167 " in line
    assert " samples/s, 10.7 GB" in line
    assert ":" in line.split()[-1]
    assert line.startswith(title.replace("\x1b", "?") if columns == 160 else "building ")
