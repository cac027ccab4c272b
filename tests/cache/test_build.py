"""build_lmdb in one process: what it reads, writes and refuses, of samples, systems and foreign files."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import multiprocessing
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lmdb
import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from fastload.cache.build import inventory
from fastload.cache.build.build import build_lmdb
from fastload.cache.build.build_lock import lock_name, only_builder
from fastload.cache.build.writer import writing
from fastload.cache.dataset import CachedDataset
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.errors import (
    CacheBusyError,
    CacheError,
    CacheMismatchError,
    ImageReadError,
    UnsupportedSampleError,
)
from tests.cache.build_zoo import BrokenImages, Calling, OddError, building, die, odd
from tests.cache.zoo import BareImages, Collatable, Images, Made, RaggedImages
from tests.kit.batches import assert_same_samples

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_workers", "method", "shards", "num_samples"),
    [(0, "fork", 3, 40), (2, "fork", 1, 700), (1, "forkserver", 1, 12)],
)
def test_build_reads_each_sample_once(
    num_workers: int, method: str, shards: int, num_samples: int, tmp_path: Path
) -> None:
    """Here or in many tasks of workers, but for probed ones; no generator is used, and an old report goes."""
    dataset, state = RaggedImages(num_samples, log=tmp_path / "log"), torch.get_rng_state()
    (tmp_path / "cache.errors.jsonl").write_text("old")
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(method, force=True)
    try:
        probed, options = {0: dataset.sample(0)}, {"num_workers": num_workers, "on_error": "skip"}
        cache = build_lmdb(dataset, tmp_path / "cache", probed=probed, shards=shards, **options)
    finally:
        multiprocessing.set_start_method(before, force=True)

    assert dataset.reads == [int(index > 0) for index in range(num_samples)]
    assert sorted(os.listdir(tmp_path)) == ["cache", "log"]
    assert torch.equal(torch.get_rng_state(), state)
    for index in range(num_samples):
        assert_same_samples(cache.get(index), dataset.sample(index))


@pytest.mark.parametrize("shape", [(5, 7, 3), (100, 77, 3)], ids=["small", "in overflow pages"])
def test_equal_plans_give_equal_files(shape: tuple[int, ...], tmp_path: Path, monkeypatch: Any) -> None:
    """Unused bytes of pages are zeros, and nothing that this process had in memory gets into a file."""
    monkeypatch.setattr(os, "urandom", bytes)
    monkeypatch.setattr(time, "time", lambda: 1e9)
    for name, used in (("first", 7), ("second", 200)):
        memory = [np.full(size, used, np.uint8) for size in (4096, 8192, 100_000, 1 << 20) for _ in range(9)]
        del memory  # freed memory of this process holds other bytes in each of the two builds
        build_lmdb(Images(80, shape=shape), tmp_path / name, num_workers=0).close()
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_bad_arguments(tmp_path: Path) -> None:
    """Arguments that mean nothing raise before anything is written."""
    wrong = ("codec", "gif"), ("shards", 0), ("on_error", "ignore"), ("max_errors", 0.0), ("num_workers", -1)
    for name, value in (*wrong, *(("quality", value) for value in (0, 101, True, 9.5))):
        with pytest.raises(ValueError, match=rf"^{name} (option )?should be "):
            build_lmdb(Images(3), tmp_path / "cache", **{name: value})
    assert os.listdir(tmp_path) == []


def test_cache_of_another_dataset_is_refused(path: Path) -> None:
    """A cache of something else raises: what differs, which of the two to change, and code that runs."""
    for shape in (Images(20, shape=(3, 3, 3)), BareImages(20)):
        with pytest.raises(CacheMismatchError, match="structure of sample 0"):
            build_lmdb(shape, path)
    with pytest.raises(CacheMismatchError, match="number of samples is 21 here and 20 there") as caught:
        build_lmdb(Images(21), path)
    text = str(caught.value)
    code = re.search(r"If the cache is right, change the dataset, or train without it from (.*?\))\.", text)

    assert code is not None
    assert len(eval(code[1], {"CachedDataset": CachedDataset})) == 20
    assert f"If the dataset is right, remove this cache with 'fastload cache rm {path}'" in text
    jpegs = path.with_name("jpegs")
    build_lmdb(Images(6), jpegs, codec="jpeg", quality=90, num_workers=0).close()
    with pytest.raises(CacheMismatchError, match="quality is 50 here and 90 there"):
        build_lmdb(Images(6), jpegs, codec="jpeg", quality=50)


@pytest.mark.usefixtures("needs_lmdb")
@pytest.mark.parametrize("content", ["", "4194304"])
def test_while_one_builds_others_are_told_who(content: str, tmp_path: Path) -> None:
    """The lock of a killed builder is taken over; an unfinished build is no cache, and the next goes on."""
    path, lock = tmp_path / "cache", Path(lock_name(str(tmp_path / "cache")))
    with pytest.raises(KeyboardInterrupt):
        build_lmdb(BrokenImages(10, stop=5), path, num_workers=0, shards=4)
    lock.write_text(content)
    with building(path) as pid:
        assert lock.read_text() == str(pid)
        assert inventory.is_being_built(str(path))
        with pytest.raises(CacheBusyError, match=f"process {pid}"):
            build_lmdb(Images(10), path)
    assert not inventory.is_being_built(str(path))
    assert os.listdir(tmp_path) == ["cache.partial"]
    with pytest.raises(FileNotFoundError, match="unfinished build"):
        LMDBCache(path)
    assert build_lmdb(Images(10), path, num_workers=0).num_shards == 4


@pytest.mark.parametrize(("num_workers", "shards"), [(0, 2), (2, 1)])
def test_skip_leaves_bad_samples_out(num_workers: int, shards: int, tmp_path: Path) -> None:
    """With on_error="skip" bad samples are missing, and reported: index, path, type, reason, worker."""
    dataset = BrokenImages(12, bad=[0, 5, 6, 11])
    options: dict[str, Any] = {"on_error": "skip", "max_errors": 1.0, "shards": shards}
    cache = build_lmdb(dataset, tmp_path / "cache", num_workers=num_workers, **options)
    lines = [json.loads(line) for line in (tmp_path / "cache.errors.jsonl").read_text().splitlines()]

    assert cache.stored_indices is not None
    assert cache.stored_indices.tolist() == [1, 2, 3, 4, 7, 8, 9, 10]
    assert (cache.num_samples, cache.num_cached) == (12, 8)
    assert [line["index"] for line in lines] == [0, 5, 6, 11]
    assert lines[1].pop("worker") in (range(num_workers) if num_workers else [None])
    assert lines[1] == {"index": 5, "path": "5.jpg", "type": "ImageReadError", "reason": "it is broken"}
    assert cache.gather(np.array([4, 5]), np.empty) is None
    assert sorted(os.listdir(tmp_path)) == ["cache", "cache.errors.jsonl"]
    assert build_lmdb(dataset, tmp_path / "cache").num_cached == 8  # compared without sample 0
    with pytest.raises(CacheMismatchError, match="number of samples"):
        build_lmdb(BrokenImages(13, bad=[0]), tmp_path / "cache")


def test_a_killed_worker_ends_the_build_with_a_word_on_what_is_kept(tmp_path: Path) -> None:
    """Its sample is not skipped; nothing is left, and nothing said, if no sample was built before."""
    options: dict[str, Any] = {"on_error": "skip", "max_errors": 1.0}
    kept = f"Finished shards are kept at {tmp_path}/cache.partial: build again to resume"
    for notes in ([], [kept]):
        with pytest.raises(RuntimeError, match="DataLoader worker") as caught:
            build_lmdb(Calling(12, 7, die), tmp_path / "cache", num_workers=1, **options)
        assert getattr(caught.value, "__notes__", []) == notes
        assert os.listdir(tmp_path) == ["cache.partial"] * len(notes)
        with contextlib.suppress(KeyboardInterrupt):
            build_lmdb(BrokenImages(12, stop=5), tmp_path / "cache", num_workers=0, shards=3, **options)


UNSUPPORTED = Made(lambda index: {1, 2} if index == 3 else index)


@pytest.mark.parametrize(
    ("dataset", "num_workers", "kind", "said", "notes"),
    [
        (BrokenImages(12, bad=[0]), 0, ImageReadError, "0.jpg", ["in sample 0 of the dataset", "leaves out"]),
        (BrokenImages(12, bad=[7]), 2, ImageReadError, "7.jpg", ["in sample 7", "in __getitem__"]),
        (Calling(12, 7, odd), 0, OddError, "an odd picture", ["in sample 7 of the dataset"]),
        (Calling(12, 7, odd), 2, RuntimeError, "OddError, which cannot be pickled: an odd", ["in sample 7"]),
        *((UNSUPPORTED, workers, UnsupportedSampleError, "set", ["in sample 3"]) for workers in (0, 1)),
    ],
)
def test_an_error_names_its_sample_and_leaves_nothing(
    dataset: Any, num_workers: int, kind: type[Exception], said: str, notes: list[str], tmp_path: Path
) -> None:
    """From a worker it has the user's frames and no others; what cannot be cached is never left out."""
    on_error = "skip" if kind is UnsupportedSampleError else "raise"
    with pytest.raises(kind, match=said) as caught:
        build_lmdb(dataset, tmp_path / "cache", num_workers=num_workers, on_error=on_error)
    found = "\n".join(caught.value.__notes__)
    assert [note for note in notes if note not in found] == []
    assert "/tasks.py" not in found
    assert kind is UnsupportedSampleError or "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == []


REFUSALS = {
    errno.ENOENT: "create the directory /a/b first",
    errno.EACCES: "denied: change the permissions of /a/b",
    errno.EROFS: "Read-only file system: use a path outside /a/b",
    errno.ENOTDIR: "Not a directory: a part of /a/b is a file",
    errno.EPERM: "not permitted: change the permissions of /a/b",
    errno.EFBIG: "File too large: free more space there (check quotas and `ulimit -f`)",
    errno.EMFILE: "Too many open files",
}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        *((OSError(number, os.strerror(number)), said) for number, said in REFUSALS.items()),
        (OSError("something odd"), "something odd"),
        (lmdb.DiskError("mdb_txn_commit: No space left on device"), "on device: free more space there"),
        (lmdb.Error("mdb_txn_commit: Input/output error"), "Input/output error: free more space there"),
        (lmdb.Error("mdb_put: something odd"), "mdb_put: something odd"),
    ],
)
def test_each_refusal_says_what_to_change(error: Exception, said: str) -> None:
    """Errors of Python's own calls and of LMDB are told alike, without numbers."""
    with pytest.raises(CacheError) as caught, writing("/a/b/cache"):
        raise error
    assert said in str(caught.value)
    assert "Errno" not in str(caught.value)


@pytest.mark.parametrize(("num_workers", "shards"), [(0, 3), (2, 1)])
def test_mixed_shapes_are_told_with_an_example_and_the_fix(
    num_workers: int, shards: int, tmp_path: Path, caplog: Any
) -> None:
    """The log names the number of shapes of the first samples, two of them, their place, and the change."""
    with caplog.at_level(logging.INFO, "fastload"):
        build_lmdb(RaggedImages(40), tmp_path / "x", num_workers=num_workers, shards=shards)
    assert "have at least 35 different shapes at $[0], such as (8, 8, 3) and (" in caplog.text
    assert "--size 256x256" in caplog.text
    assert "crop in the transform" in caplog.text


@pytest.mark.parametrize("dataset", [Images(20), Collatable(20), [1, 2, 3], BrokenImages(12, bad=[0, 3])])
def test_equal_shapes_are_not_mentioned(dataset: Any, tmp_path: Path, caplog: Any, capfd: Any) -> None:
    """Where default_collate works a build logs its rate alone, and draws nothing without a terminal."""
    with caplog.at_level(logging.INFO, "fastload"):
        build_lmdb(dataset, tmp_path / "x", num_workers=0, on_error="skip", max_errors=1.0).close()
    if not isinstance(dataset, BrokenImages):
        default_collate([dataset[index] for index in range(len(dataset))])
    assert "different shapes" not in caplog.text
    assert "samples/s" in caplog.text
    assert capfd.readouterr().err == ""


# --- what others have put where a build writes ---------------------------------------------------------


FOREIGN: dict[str, Callable[[Path, Path], Any]] = {  # at a place; what it refers to lies aside
    "link to a file": lambda place, aside: (aside.write_text("my thesis"), place.symlink_to(aside)),
    "link to a folder": lambda place, aside: (aside.mkdir(), place.symlink_to(aside)),
    "link to nothing": lambda place, aside: place.symlink_to(aside),
    "hard link": lambda place, aside: (aside.write_text("4711"), os.link(aside, place)),
    "text": lambda place, _: place.write_text("my notes"),
    "directory": lambda place, _: place.mkdir(),
    "pipe": lambda place, _: os.mkfifo(place),
}


def look(directory: Path) -> dict[str, Any]:
    """What is there, by name: kind, content or target, and the time of its last change."""
    found = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(directory))] = status.st_mode, content, content and status.st_mtime_ns
    return found


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        *((".cache.fastload-lock", kind) for kind in ("link to a file", "link to nothing", "directory")),
        *(("cache.partial", kind) for kind in ("text", "link to a folder")),
        *(("cache.partial/errors.jsonl", kind) for kind in ("directory", "hard link")),
        *(("cache.partial/thesis.txt", "text"), ("cache.partial/plan.json", "pipe")),
        ("cache.partial/plan.json.new", "link to a file"),
    ],
)
def test_what_is_not_ours_refuses_a_build_and_stays(place: str, kind: str, tmp_path: Path) -> None:
    """The error names what is foreign; a finished cache beside it is opened and listed."""
    if "/" in place:
        (tmp_path / "cache.partial").mkdir()
        (tmp_path / "cache.partial/00000-of-00001.lmdb").write_bytes(b"half")
    FOREIGN[kind](tmp_path / place, tmp_path / "aside")
    before = look(tmp_path)
    said = "cannot write the cache" if "lock" in place else r"cache\.partial.* move it away"
    with pytest.raises(CacheError, match=said):
        build_lmdb(Images(3), tmp_path / "cache", num_workers=0)
    assert look(tmp_path) == before

    build_lmdb(Images(3), tmp_path / "elsewhere", num_workers=0).close()
    (tmp_path / "elsewhere").rename(tmp_path / "cache")
    assert_same_samples(build_lmdb(Images(3), tmp_path / "cache").get(2), Images(3).sample(2))
    found = {os.path.basename(one.path): one.state for one in inventory.list_caches(str(tmp_path))}
    assert found == {"cache": "finished"}
    after = look(tmp_path)
    del after["cache"]
    assert after == before


@pytest.mark.parametrize("kind", FOREIGN)
def test_files_of_others_are_not_written_through_or_removed(kind: str, tmp_path: Path) -> None:
    """The report of errors comes to its place whole; the end of a build removes its own lock file only."""
    FOREIGN[kind](tmp_path / "cache.errors.jsonl.new", tmp_path / "aside")
    lock = Path(lock_name(str(tmp_path / "other")))
    before = look(tmp_path)
    build_lmdb(BrokenImages(4, bad=[1]), tmp_path / "cache", num_workers=0, on_error="skip").close()
    after = look(tmp_path)

    assert after.pop("cache.errors.jsonl")[1].count(b"\n") == 1
    assert LMDBCache(tmp_path / "cache").num_cached == 3
    del after["cache"]
    assert after == before
    with only_builder(str(tmp_path / "other")):
        lock.unlink()
        (tmp_path / "cache.errors.jsonl.new").rename(lock)
        before = look(tmp_path)
    assert look(tmp_path) == before


@pytest.mark.parametrize(("kind", "shards"), [("text", 1), ("directory", 2), ("link to a file", 1)])
def test_what_came_to_the_destination_meanwhile_stays(kind: str, shards: int, tmp_path: Path) -> None:
    """A build whose destination was taken while it ran raises; what it built is kept."""
    before = []

    def take() -> None:
        FOREIGN[kind](tmp_path / "cache", tmp_path / "aside")
        before.append(look(tmp_path)["cache"])

    with pytest.raises(CacheError, match=r"created .*cache.*cache\.partial"):
        build_lmdb(Calling(3, 2, take), tmp_path / "cache", num_workers=0, shards=shards)
    found = look(tmp_path)
    assert found["cache.partial/plan.json"]
    assert found["cache"] == before[0]


def test_without_lmdb_a_build_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches that were built elsewhere can still be read."""
    build_lmdb(Images(4), tmp_path / "built", num_workers=0).close()
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(CacheError, match=r'lmdb, which is not installed.*cache="ram".*reading it'):
        build_lmdb(Images(4), tmp_path / "cache", num_workers=0)
    cached = CachedDataset(Images(4), cache=f"lmdb:{tmp_path / 'built'}")
    assert_same_samples(cached[3], Images(4).sample(3))
