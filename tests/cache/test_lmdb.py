"""LMDBCache and its builder: the contract, atomic builds, and every kind of bad file."""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import pickle
import random
import signal
import zlib
from typing import TYPE_CHECKING, Any

import lmdb
import numpy as np
import pytest
import torch

from fastload.cache import build, lmdb_format
from fastload.cache.build import build_lmdb
from fastload.cache.lmdb import LMDBCache
from fastload.cache.lmdb_format import read_description, write_description
from fastload.errors import CacheBusyError, CacheCorruptError, CacheError, CacheMismatchError
from tests.cache.contract import SharedContract
from tests.cache.zoo import BareImages, Images, RaggedImages, assert_same

if TYPE_CHECKING:
    from pathlib import Path


class TestLMDBCache(SharedContract):
    """The contract, on disk."""

    def make(self, dataset: Images, tmp_path: Any) -> LMDBCache:
        return build_lmdb(dataset, tmp_path / "cache", num_workers=0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A finished cache of 20 images."""
    build_lmdb(Images(20), tmp_path / "cache", num_workers=0).close()
    return tmp_path / "cache"


def _content_bytes(path: Path) -> int:
    with lmdb.open(str(path), subdir=False, lock=False, readonly=True) as environment:
        return (environment.info()["last_pgno"] + 1) * 4096


def rewrite(path: Path, change: Any) -> None:
    """Change the environment in place, as only a test may."""
    meta = read_description(str(path))
    environment = lmdb.open(str(path), subdir=False, lock=False)
    with environment, environment.begin(write=True) as transaction:
        change(transaction)
    os.truncate(path, _content_bytes(path))  # new pages were written over the description
    write_description(str(path), meta, 4096)


# --- building --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_build_reads_each_sample_once(num_workers: int, tmp_path: Path) -> None:
    """A build decodes every sample once, in the parent or in workers, and leaves one file."""
    dataset = RaggedImages(40, log=tmp_path / "log")
    cache = build_lmdb(dataset, tmp_path / "cache", num_workers=num_workers)

    assert dataset.reads == [1] * 40
    assert sorted(os.listdir(tmp_path)) == ["cache", "log"]
    for index in range(40):
        assert_same(cache.get(index), dataset.sample(index))


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
    assert_same(cache.get(0), dataset.sample(0))


def test_map_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that outgrows its map goes on with a larger one and loses nothing."""
    monkeypatch.setattr(build, "_FIRST_MAP_BYTES", 1 << 16)
    monkeypatch.setattr(build, "_COMMIT_RECORDS", 7)
    dataset = Images(100, shape=(64, 64, 3))
    cache = build_lmdb(dataset, tmp_path / "cache", num_workers=0)

    for index in range(100):
        assert_same(cache.get(index), dataset.sample(index))


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
        (Images(21), "number of samples is 20 in the cache and 21"),
        (Images(20, shape=(3, 3, 3)), "structure of sample 0"),
        (BareImages(20), "structure of sample 0"),
    ],
)
def test_cache_of_another_dataset_is_refused(dataset: Images, part: str, path: Path) -> None:
    """A finished cache that was made from something else raises, saying what differs and what to do."""
    with pytest.raises(CacheMismatchError, match=part) as caught:
        build_lmdb(dataset, path)

    assert "Delete the file" in str(caught.value)


def test_changed_content_is_refused(path: Path) -> None:
    """A first sample with the same structure and another content is noticed."""
    with pytest.raises(CacheMismatchError, match="content of sample 0"):
        build_lmdb(Images(20), path, probed={0: (np.zeros((32, 24, 3), np.uint8), 0)})


class Failing(Images):
    """Raises at one index."""

    def sample(self, index: int) -> Any:
        if index == 7:
            raise OSError("bad file")
        return super().sample(index)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_failed_build_leaves_nothing(num_workers: int, tmp_path: Path) -> None:
    """An error in the dataset is raised with its type, and no file is left."""
    with pytest.raises(OSError, match="bad file"):
        build_lmdb(Failing(10), tmp_path / "cache", num_workers=num_workers)

    assert os.listdir(tmp_path) == []


def test_full_disk_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDB's own errors while writing name the file, and nothing is left."""

    def refuse(self: Any) -> None:
        raise lmdb.DiskError("No space left on device")

    monkeypatch.setattr(build._Writer, "finish", refuse)
    with pytest.raises(CacheError, match=r"cannot write the cache .*No space"):
        build_lmdb(Images(3), tmp_path / "cache", num_workers=0)

    assert os.listdir(tmp_path) == []


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


def test_killed_builder_is_followed_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one builds, others are told who; what it leaves when killed is removed and built again."""
    monkeypatch.setattr(build, "_COMMIT_RECORDS", 2)
    path = tmp_path / "cache"
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=build_lmdb, args=(Stopping(sender), path), kwargs={"num_workers": 0})
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

    assert sorted(os.listdir(tmp_path)) == ["cache.lock", "cache.partial"]
    assert_same(build_lmdb(Images(10), path, num_workers=0).get(9), Images(10).sample(9))
    assert os.listdir(tmp_path) == ["cache"]


def test_lock_file_is_no_lock(tmp_path: Path) -> None:
    """A lock file that nobody holds is in nobody's way; one that is held is, whatever it says."""
    lock = tmp_path / "cache.lock"
    lock.write_text("1")
    with open(lock) as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(CacheBusyError, match="process 1"):
            build_lmdb(Images(3), tmp_path / "cache")

    build_lmdb(Images(3), tmp_path / "cache", num_workers=0)


def test_build_reports_progress(tmp_path: Path, caplog: Any, capfd: Any) -> None:
    """Where standard error is no terminal a build logs its rate and draws nothing."""
    with caplog.at_level(logging.INFO, "fastload"):
        build_lmdb(Images(3), tmp_path / "cache", num_workers=0)

    assert "samples/s" in caplog.text
    assert capfd.readouterr().err == ""


def test_empty_dataset(tmp_path: Path) -> None:
    """A cache of nothing is built and opened."""
    assert build_lmdb(Images(0), tmp_path / "cache").num_samples == 0
    assert build_lmdb(Images(0), tmp_path / "cache").num_samples == 0


# --- opening ---------------------------------------------------------------------------------------------


def test_one_environment_a_file(path: Path) -> None:
    """Two caches of one file share an environment, also through another name of the file."""
    os.link(path, path.with_name("other"))
    one, other = LMDBCache(path), LMDBCache(path.with_name("other"))
    one.close()

    assert_same(other.get(3), Images(20).sample(3))


def test_unpickled_cache_opens_late(path: Path) -> None:
    """A handle opens nothing until it is read, and notices that the file was replaced."""
    text = pickle.dumps(LMDBCache(path))
    path.unlink()
    handle = pickle.loads(text)
    with pytest.raises(FileNotFoundError):
        handle.get(0)
    build_lmdb(Images(4), path, num_workers=0).close()

    with pytest.raises(CacheMismatchError, match="replaced"):
        handle.get(0)


def test_missing_file(tmp_path: Path) -> None:
    """A file that is not there raises, with its path."""
    with pytest.raises(FileNotFoundError, match=r"there is no cache at .*nowhere"):
        LMDBCache(tmp_path / "nowhere")


def test_directory_is_no_cache(tmp_path: Path) -> None:
    """A directory raises."""
    with pytest.raises(CacheMismatchError, match="single file"):
        LMDBCache(tmp_path)


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\0" * 20_000, os.urandom(20_000)])
def test_no_lmdb_file(content: bytes, tmp_path: Path) -> None:
    """A file that is no LMDB file raises."""
    (tmp_path / "cache").write_bytes(content)

    with pytest.raises(CacheError):
        LMDBCache(tmp_path / "cache")


def test_foreign_lmdb_file(tmp_path: Path) -> None:
    """An LMDB file that another program made raises."""
    environment = lmdb.open(str(tmp_path / "cache"), subdir=False, lock=False)
    with environment, environment.begin(write=True) as transaction:
        transaction.put(b"key", b"value")

    with pytest.raises(CacheCorruptError, match="no cache"):
        LMDBCache(tmp_path / "cache")


def test_other_format_version(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of another format version raises, with both versions."""
    monkeypatch.setattr(lmdb_format, "FORMAT_VERSION", 2)

    with pytest.raises(CacheMismatchError, match="format 1, this release reads 2"):
        LMDBCache(path)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 0.999])
def test_truncated_file(share: float, path: Path) -> None:
    """A file that is cut short raises when it is opened, before anything behind its end is touched."""
    os.truncate(path, int(path.stat().st_size * share))

    with pytest.raises(CacheCorruptError):
        LMDBCache(path)


def test_missing_record(path: Path) -> None:
    """A record that is not there raises, with its index."""
    rewrite(path, lambda transaction: transaction.delete((5).to_bytes(8, "big")))
    cache = LMDBCache(path)

    with pytest.raises(CacheCorruptError, match="sample 5"):
        cache.get(5)


def test_swapped_records(path: Path) -> None:
    """A record that lies under another's key raises."""

    def swap(transaction: Any) -> None:
        transaction.put((5).to_bytes(8, "big"), transaction.get((6).to_bytes(8, "big")))

    rewrite(path, swap)
    cache = LMDBCache(path)

    with pytest.raises(CacheCorruptError, match="sample 5: another record"):
        cache.get(5)


def test_flipped_bits_are_found(path: Path) -> None:
    """A record with any bit flipped raises at its first read, with path and index; the others are right."""
    rewrite(path, lambda transaction: transaction.put((5).to_bytes(8, "big"), flipped(transaction)))
    cache = LMDBCache(path)
    dataset = Images(20)
    for index in range(20):
        if index == 5:
            with pytest.raises(CacheCorruptError, match=f"{path}: sample 5"):
                cache.get(index)
        else:
            assert_same(cache.get(index), dataset.sample(index))


def flipped(transaction: Any) -> bytes:
    value = bytearray(transaction.get((5).to_bytes(8, "big")))
    value[random.Random(0).randrange(400, len(value))] ^= 4
    return bytes(value)


def read_everything(path: str, expected: list[Any]) -> None:
    """Run in a child: exit with 0 if every sample is right or raises a clear error."""
    try:
        cache = LMDBCache(path)
    except CacheError:
        os._exit(0)
    for index, sample in enumerate(expected):
        try:
            found = cache.get(index)
        except CacheError:
            continue
        assert_same(found, sample)
    os._exit(0)


@pytest.mark.slow
def test_flips_anywhere_in_the_file(path: Path) -> None:
    """A flip anywhere, most of them in the tree of LMDB, gives a clear error or the right samples."""
    dataset = Images(20)
    expected = [dataset.sample(index) for index in range(20)]
    content = path.read_bytes()
    tree = [at for at in range(0, len(content), 4096) if content[at + 10] in (1, 2, 8)]  # LMDB's page flags
    chance = random.Random(3)
    context = multiprocessing.get_context("fork")
    for turn in range(80):
        damaged = bytearray(content)
        at = chance.choice(tree) + chance.randrange(4096) if turn % 4 else chance.randrange(len(content))
        damaged[at] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        child = context.Process(target=read_everything, args=(str(path), expected))
        child.start()
        child.join()
        code = child.exitcode
        child.close()
        assert code == 0


def test_checksum_is_checked_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a record's first read in a process pays for its checksum."""
    cache = LMDBCache(path)
    counted: list[int] = []
    real = zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda *args: counted.append(1) or real(*args))
    for _ in range(3):
        cache.get(4)

    assert len(counted) == 1
