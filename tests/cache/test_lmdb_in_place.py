"""Files that are changed while they are open: the samples that were opened, or an error, never others."""

from __future__ import annotations

import os
import shutil
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import fastload
from fastload.cache.build.build import build_lmdb
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.cache.lmdb.open_file import OpenFile
from fastload.errors import CacheCorruptError, CacheMismatchError
from tests.cache.forge import Forgery
from tests.cache.zoo import Images
from tests.kit.batches import assert_same_samples

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OLD_NS = 10**18  # long ago: no change in a test has this time


class OtherImages(Images):
    """Images of the same shapes that are all different."""

    def sample(self, index: int) -> Any:
        image, label = super().sample(index)
        return 255 - image, label


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A finished cache of 20 images."""
    return built(tmp_path / "cache", Images(20))


def built(path: Path, dataset: Images, **options: Any) -> Path:
    build_lmdb(dataset, path, num_workers=0, **options).close()
    for file in [path] if path.is_file() else path.iterdir():
        os.utime(file, ns=(OLD_NS, OLD_NS))
    return path


def gather(cache: LMDBCache) -> Any:
    return cache.gather(np.arange(20), np.empty)


READS: dict[str, Callable[[LMDBCache], Any]] = {
    "get": lambda cache: cache.get(3),
    "gather": gather,
    "verify": lambda cache: cache.verify(),
}
CHANGED = "was changed while it was open.* open the cache again"


@pytest.mark.parametrize(("read", "was_read"), [("get", True), ("gather", False), ("verify", True)])
def test_overwritten_in_place(read: str, was_read: bool, path: Path, tmp_path: Path) -> None:
    """`cp OTHER PATH`: each way to read raises, says that the file was changed and names it."""
    cache = LMDBCache(path)
    if was_read:
        READS[read](cache)
    shutil.copyfile(built(tmp_path / "other", OtherImages(20)), path)

    for _ in range(2):
        with pytest.raises(CacheMismatchError, match=f"{path} {CHANGED}"):
            READS[read](cache)


@pytest.mark.parametrize("is_set_back", [False, True])
def test_one_byte_of_the_same_file(is_set_back: bool, path: Path) -> None:
    """A record that is changed in place is compared with its checksum again, also if the time is set back."""
    cache = LMDBCache(path)
    opened_ns = path.stat().st_ctime_ns
    gather(cache)
    content = path.read_bytes()
    # LMDB may leave older copies of a value in pages that it has used again.
    start = int(OpenFile(os.open(path, os.O_RDONLY), str(path))._table.starts[5])
    at = content.index(Images(20).sample(5)[0].tobytes(), start)
    with open(path, "r+b") as file:
        file.seek(at + 100)
        file.write(bytes([content[at + 100] ^ 1]))
    while is_set_back:  # the time of that change itself may be some milliseconds coarse
        os.utime(path, ns=(OLD_NS, OLD_NS))
        is_set_back = path.stat().st_ctime_ns == opened_ns

    with pytest.raises(CacheCorruptError, match="sample 5: its checksum is wrong"):
        cache.get(5)
    with pytest.raises(CacheCorruptError, match="sample 5: its checksum is wrong"):
        gather(cache)
    assert_same_samples(cache.get(4), Images(20).sample(4))


@pytest.mark.parametrize(
    ("nbytes", "read"), [(0, "get"), (8192, "gather"), (50_000, "verify"), (8192, "get")]
)
def test_cut_short_in_place(nbytes: int, read: str, path: Path) -> None:
    """A file that is truncated raises, and does not end the process."""
    cache = LMDBCache(path)
    READS[read](cache)
    os.truncate(path, nbytes)

    with pytest.raises(CacheMismatchError, match=CHANGED):
        READS[read](cache)


def test_cut_short_in_the_middle_of_a_first_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record whose file is truncated while it is read for the first time raises and says so."""
    cache = LMDBCache(path)
    real = os.pread

    def cut_and_read(fd: int, nbytes: int, at: int) -> bytes:
        os.truncate(path, 8192)
        return real(fd, nbytes, at)

    monkeypatch.setattr(os, "pread", cut_and_read)
    with pytest.raises(CacheMismatchError, match=CHANGED):
        cache.get(3)


@pytest.mark.parametrize("is_longer", [True, False])
def test_another_file_in_place(is_longer: bool, path: Path) -> None:
    """A file that something was appended to, and one of the same size with another description, raise."""
    cache = LMDBCache(path)
    forgery = Forgery(path.read_bytes())
    forgery.fields["plan"]["build_id"] = forgery.fields["plan"]["build_id"][::-1]
    with open(path, "ab" if is_longer else "r+b") as file:
        file.write(b"more" if is_longer else forgery.sealed())

    with pytest.raises(CacheMismatchError, match=CHANGED):
        cache.get(3)


def test_touched(path: Path) -> None:
    """A file that is touched, or written anew with the same bytes, is read on."""
    cache = LMDBCache(path)
    gather(cache)
    os.utime(path)
    assert_same_samples(cache.get(3), Images(20).sample(3))
    path.write_bytes(path.read_bytes())
    for index in range(20):
        assert_same_samples(cache.get(index), Images(20).sample(index))


def test_moved_over(path: Path, tmp_path: Path) -> None:
    """`mv OTHER PATH`, or `rm PATH`: what is open is read on; whoever opens it later reads the new file."""
    cache = LMDBCache(path)
    os.replace(built(tmp_path / "other", OtherImages(20)), path)

    assert_same_samples(cache.get(3), Images(20).sample(3))
    assert_same_samples(LMDBCache(path).get(3), OtherImages(20).sample(3))
    path.unlink()
    assert_same_samples(cache.get(4), Images(20).sample(4))
    assert gather(cache)[0][5].numpy().tobytes() == Images(20).sample(5)[0].tobytes()


def test_opened_again(path: Path, tmp_path: Path) -> None:
    """A path that is opened again gives the new content, though the old one is still open."""
    cache = LMDBCache(path)
    shutil.copyfile(built(tmp_path / "other", OtherImages(20)), path)
    again = LMDBCache(path)

    assert_same_samples(again.get(3), OtherImages(20).sample(3))
    assert_same_samples(LMDBCache(path).get(3), OtherImages(20).sample(3))
    with pytest.raises(CacheMismatchError, match=CHANGED):
        cache.get(3)
    assert_same_samples(again.get(4), OtherImages(20).sample(4))


def test_one_shard_of_several(tmp_path: Path) -> None:
    """Only reads of the shard that was changed raise."""
    path = built(tmp_path / "cache", Images(20), shards=2)
    other = built(tmp_path / "other", OtherImages(20), shards=2)
    cache = LMDBCache(path)
    shutil.copyfile(other / "00001-of-00002.lmdb", path / "00001-of-00002.lmdb")

    assert_same_samples(cache.get(9), Images(20).sample(9))
    with pytest.raises(CacheMismatchError, match=r"00001-of-00002\.lmdb was changed"):
        cache.get(10)
    with pytest.raises(CacheMismatchError, match=r"00001-of-00002\.lmdb was changed"):
        gather(cache)


def test_threads_that_read_a_touched_file(path: Path) -> None:
    """Threads that notice a touched file together read the right samples."""
    cache = LMDBCache(path)
    expected = [Images(20).sample(index) for index in range(20)]
    errors: list[BaseException] = []

    def read() -> None:
        try:
            for index in list(range(20)) * 20:
                assert_same_samples(cache.get(index), expected[index])
        except BaseException as error:  # noqa: BLE001 - told in the main thread
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(50):
        os.utime(path, ns=(OLD_NS, OLD_NS + number))
    for thread in threads:
        thread.join()

    assert errors == []


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_notice_too(method: str, path: Path, tmp_path: Path) -> None:
    """A worker's batch from a file that was overwritten is an error in the parent."""
    dataset = fastload.CachedDataset.from_cache(path)
    loader = fastload.DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context=method)
    assert len(list(loader)) == 5
    shutil.copyfile(built(tmp_path / "other", OtherImages(20)), path)

    with pytest.raises(CacheMismatchError, match=r"was changed while|was replaced"):
        list(loader)


def test_a_forked_worker_reads_what_its_parent_opened(path: Path, tmp_path: Path) -> None:
    """A worker that is forked after `mv OTHER PATH` reads the file that its parent has open."""
    dataset = fastload.CachedDataset.from_cache(path)
    os.replace(built(tmp_path / "other", OtherImages(20)), path)
    loader = fastload.DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="fork")

    images = next(iter(loader))[0]
    assert_same_samples(images[3].numpy(), Images(20).sample(3)[0])
