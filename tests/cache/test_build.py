"""build_lmdb: what it reads, writes, opens and refuses."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from fastload.cache.build import writer as lmdb_writer
from fastload.cache.build.build import build_lmdb
from fastload.cache.dataset import CachedDataset
from fastload.cache.fingerprint import Fingerprint
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.errors import CacheBusyError, CacheMismatchError
from tests.cache.build_zoo import building
from tests.cache.zoo import BareImages, Images, RaggedImages
from tests.kit.batches import assert_same_samples

if TYPE_CHECKING:
    from pathlib import Path


# --- what is read and written ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shards", [1, 3])
def test_build_reads_each_sample_once(num_workers: int, shards: int, tmp_path: Path) -> None:
    """A build decodes every sample once, in the parent or in workers, and leaves the cache alone."""
    dataset = RaggedImages(40, log=tmp_path / "log")
    cache = build_lmdb(dataset, tmp_path / "cache", num_workers=num_workers, shards=shards)

    assert dataset.reads == [1] * 40
    assert sorted(os.listdir(tmp_path)) == ["cache", "log"]
    for index in range(40):
        assert_same_samples(cache.get(index), dataset.sample(index))


def test_many_tasks(tmp_path: Path) -> None:
    """Many tasks of each worker arrive in their order."""
    dataset = Images(700)
    cache = build_lmdb(dataset, tmp_path / "cache", num_workers=2)

    assert cache.verify() == []
    for index in range(0, 700, 37):
        assert_same_samples(cache.get(index), dataset.sample(index))


@pytest.mark.slow
def test_workers_that_are_spawned(tmp_path: Path) -> None:
    """Spawned workers build the same."""
    multiprocessing_method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    try:
        cache = build_lmdb(Images(12), tmp_path / "cache", num_workers=1)
    finally:
        multiprocessing.set_start_method(multiprocessing_method, force=True)

    assert_same_samples(cache.get(11), Images(12).sample(11))


def test_build_leaves_the_random_state_alone(tmp_path: Path) -> None:
    """Building draws nothing from torch's global generator."""
    before = torch.get_rng_state()
    build_lmdb(Images(4), tmp_path / "cache", num_workers=2)

    assert torch.equal(torch.get_rng_state(), before)


def test_probed_samples_are_not_read_again(tmp_path: Path) -> None:
    """Samples that the builder is given are stored without reading them."""
    dataset = Images(5)
    cache = build_lmdb(dataset, tmp_path / "cache", num_workers=0, probed={0: dataset.sample(0)})

    assert dataset.reads == [0, 1, 1, 1, 1]
    assert_same_samples(cache.get(0), dataset.sample(0))


@pytest.mark.parametrize("commit_bytes", [1 << 10, 1 << 16, 1 << 30])
def test_commits(commit_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost, whatever a commit holds."""
    monkeypatch.setattr(lmdb_writer, "_COMMIT_BYTES", commit_bytes)
    for shape in [(1, 1, 3), (37, 1, 3), (64, 64, 3)]:  # in the tree, in between, in pages of their own
        dataset = Images(120, shape=shape)
        cache = build_lmdb(dataset, tmp_path / f"cache{shape[0]}", num_workers=0)

        for index in range(120):
            assert_same_samples(cache.get(index), dataset.sample(index))


@pytest.mark.parametrize("shape", [(5, 7, 3), (100, 77, 3)], ids=["small", "in overflow pages"])
def test_equal_plans_give_equal_files(
    shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unused bytes of pages are zeros, and nothing that this process had in memory gets into a file."""
    monkeypatch.setattr(os, "urandom", bytes)
    monkeypatch.setattr(time, "time", lambda: 1e9)
    for name, used in (("first", 7), ("second", 200)):
        memory = [np.full(size, used, np.uint8) for size in (4096, 8192, 100_000, 1 << 20) for _ in range(9)]
        del memory  # freed memory of this process holds other bytes in each of the two builds
        build_lmdb(Images(300, shape=shape), tmp_path / name, num_workers=0).close()

    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_empty_dataset(tmp_path: Path) -> None:
    """A cache of nothing is built and opened."""
    assert build_lmdb(Images(0), tmp_path / "cache").num_samples == 0
    assert build_lmdb(Images(0), tmp_path / "cache").verify() == []


def test_build_reports_progress(tmp_path: Path, caplog: Any, capfd: Any) -> None:
    """Where standard error is no terminal a build logs its rate and draws nothing."""
    with caplog.at_level(logging.INFO, "fastload"):
        build_lmdb(Images(3), tmp_path / "cache", num_workers=0)

    assert "samples/s" in caplog.text
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "argument",
    [
        {"codec": "gif"},
        {"quality": 0},
        {"quality": 9.5},
        {"shards": 0},
        {"on_error": "ignore"},
        {"error_budget": 0.0},
    ],
)
def test_bad_arguments(argument: dict[str, Any], tmp_path: Path) -> None:
    """Arguments that mean nothing raise before anything is written."""
    with pytest.raises(ValueError, match=f"^{next(iter(argument))} should be "):
        build_lmdb(Images(3), tmp_path / "cache", **argument)

    assert os.listdir(tmp_path) == []


# --- finished caches -------------------------------------------------------------------------------------


def test_finished_cache_is_opened(path: Path) -> None:
    """A second build of the same dataset reads one sample, to compare it, and writes nothing."""
    before = path.stat().st_mtime_ns
    dataset = Images(20)
    build_lmdb(dataset, path)

    assert sum(dataset.reads) == 1
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("dataset", "part"),
    [
        (Images(21), "number of samples is 21 here and 20 there"),
        (Images(20, shape=(3, 3, 3)), "structure of sample 0"),
        (BareImages(20), "structure of sample 0"),
    ],
)
def test_cache_of_another_dataset_is_refused(dataset: Images, part: str, path: Path) -> None:
    """A cache of something else raises: what differs, which of the two to change, and code that runs."""
    with pytest.raises(CacheMismatchError, match=part) as caught:
        build_lmdb(dataset, path)

    text = str(caught.value)
    code = re.search(r"If the cache is right, change the dataset, or train without it from (.*?\))\.", text)
    assert code is not None
    assert len(eval(code[1], {"CachedDataset": CachedDataset})) == 20
    assert f"If the dataset is right, remove this cache with 'fastload cache rm {path}'" in text


def test_changed_content_is_refused(path: Path) -> None:
    """A first sample with the same structure and another content is noticed."""
    with pytest.raises(CacheMismatchError, match="content of sample 0"):
        build_lmdb(Images(20), path, probed={0: (np.zeros((32, 24, 3), np.uint8), 0)})


def test_fingerprints_are_compared(tmp_path: Path) -> None:
    """Of two fingerprints the parts are compared, and no sample is read; each part that differs is named."""
    path = tmp_path / "cache"
    build_lmdb(Images(3), path, num_workers=0, fingerprint=Fingerprint({"size": "224", "root": "a"}))
    dataset = Images(3)
    cache = build_lmdb(dataset, path, fingerprint=Fingerprint({"size": "224", "root": "a"}))

    assert sum(dataset.reads) == 0
    assert "its fingerprint matches" in cache.explain()
    with pytest.raises(CacheMismatchError, match='size is "256" here and "224" there'):
        build_lmdb(dataset, path, fingerprint=Fingerprint({"size": "256", "root": "a"}))


def test_one_fingerprint_alone_is_not_compared(path: Path) -> None:
    """Where one side has no fingerprint, sample 0 is compared."""
    dataset = Images(20)
    build_lmdb(dataset, path, fingerprint=Fingerprint({"size": "224"}))

    assert sum(dataset.reads) == 1


def test_codec_is_compared_if_asked_for(tmp_path: Path) -> None:
    """A finished cache of another codec is refused, unless any will do; its sample 0 is known, if lossy."""
    build_lmdb(Images(3), tmp_path / "cache", num_workers=0, codec="jpeg")
    with pytest.raises(CacheMismatchError, match="codec is raw here and jpeg there"):
        build_lmdb(Images(3), tmp_path / "cache", codec="raw")

    assert build_lmdb(Images(3), tmp_path / "cache").codec == "jpeg"
    assert build_lmdb(Images(3), tmp_path / "cache", codec="jpeg").codec == "jpeg"


# --- two builders ----------------------------------------------------------------------------------------


class Stopping(Images):
    """Tells its parent at sample 5 and then waits to be killed."""

    def __init__(self, pipe: Any) -> None:
        super().__init__(10)
        self.pipe = pipe

    def sample(self, index: int) -> Any:
        if index == 5:
            self.pipe.send(os.getpid())
            signal.pause()
        return super().sample(index)


@pytest.mark.usefixtures("needs_lmdb")
def test_killed_builder_is_followed_by_another(tmp_path: Path) -> None:
    """While one builds, others are told who; when it is killed, the next goes on from where it was."""
    path = tmp_path / "cache"
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(
        target=build_lmdb, args=(Stopping(sender), path), kwargs={"num_workers": 0, "shards": 4}
    )
    child.start()
    pid = receiver.recv()
    try:
        with pytest.raises(CacheBusyError, match=f"process {pid}"):
            build_lmdb(Images(10), path)
        with pytest.raises(FileNotFoundError, match="unfinished build"):
            LMDBCache(path)
    finally:
        child.kill()
        child.join()
        child.close()
        receiver.close()
        sender.close()

    assert sorted(os.listdir(tmp_path)) == [".cache.fastload-lock", "cache.partial"]
    dataset = Images(10)
    assert_same_samples(build_lmdb(dataset, path, num_workers=0).get(9), Images(10).sample(9))
    assert dataset.reads == [1, 0, 0, 0, 0, 1, 1, 1, 1, 1]  # sample 0 is compared; shard 3 begins at 5
    assert os.listdir(tmp_path) == ["cache"]


def test_lock_file_is_no_lock(tmp_path: Path) -> None:
    """A lock file that nobody holds is in nobody's way; one that is held is, whatever it says."""
    lock = tmp_path / ".cache.fastload-lock"
    lock.write_text("1")
    with building(tmp_path / "cache") as pid, pytest.raises(CacheBusyError, match=f"process {pid}"):
        build_lmdb(Images(3), tmp_path / "cache")
    lock.write_text("1")

    build_lmdb(Images(3), tmp_path / "cache", num_workers=0)


def test_a_finished_cache_of_another_form_is_refused(tmp_path: Path) -> None:
    """Another quality or number of files than requested is an error; without a request any form is taken."""
    build_lmdb(Images(6), tmp_path / "cache", codec="jpeg", quality=90, shards=2, num_workers=0)

    with pytest.raises(CacheMismatchError, match="quality is 50 here and 90 there"):
        build_lmdb(Images(6), tmp_path / "cache", codec="jpeg", quality=50, num_workers=0)
    with pytest.raises(CacheMismatchError, match="number of shards is 1 here and 2 there"):
        build_lmdb(Images(6), tmp_path / "cache", shards=1, num_workers=0)
    assert build_lmdb(Images(6), tmp_path / "cache", num_workers=0).num_shards == 2
