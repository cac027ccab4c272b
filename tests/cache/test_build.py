"""build_lmdb in one process: what it reads, writes and refuses, of samples, systems and foreign files."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import re
import resource
import socket
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
from tests.cache.build_zoo import BrokenImages, Dying, OddError, OddlyBroken, Stopping, building, exit_codes
from tests.cache.zoo import BareImages, Collatable, Images, RaggedImages
from tests.kit.batches import assert_same_samples

if TYPE_CHECKING:
    from collections.abc import Callable


# --- what is read and written ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "shards", "num_samples"), [(0, 3, 40), (2, 1, 700)])
def test_build_reads_each_sample_once(
    num_workers: int, shards: int, num_samples: int, tmp_path: Path
) -> None:
    """Every sample is decoded once, here or in many tasks of workers; torch's generator is left alone."""
    dataset, state = RaggedImages(num_samples, log=tmp_path / "log"), torch.get_rng_state()
    cache = build_lmdb(dataset, tmp_path / "cache", num_workers=num_workers, shards=shards)

    assert dataset.reads == [1] * num_samples
    assert sorted(os.listdir(tmp_path)) == ["cache", "log"]
    assert torch.equal(torch.get_rng_state(), state)
    for index in range(num_samples):
        assert_same_samples(cache.get(index), dataset.sample(index))


@pytest.mark.slow
def test_workers_that_are_spawned(tmp_path: Path) -> None:
    """Spawned workers build the same."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    try:
        cache = build_lmdb(Images(12), tmp_path / "cache", num_workers=1)
    finally:
        multiprocessing.set_start_method(before, force=True)

    assert_same_samples(cache.get(11), Images(12).sample(11))


def test_probed_samples_are_not_read_again(tmp_path: Path) -> None:
    """Samples that the builder is given are stored without reading them."""
    dataset = Images(5)
    cache = build_lmdb(dataset, tmp_path / "cache", num_workers=0, probed={0: dataset.sample(0)})

    assert dataset.reads == [0, 1, 1, 1, 1]
    assert_same_samples(cache.get(0), dataset.sample(0))


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
        build_lmdb(Images(80, shape=shape), tmp_path / name, num_workers=0).close()

    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


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
        {"max_errors": 0.0},
    ],
)
def test_bad_arguments(argument: dict[str, Any], tmp_path: Path) -> None:
    """Arguments that mean nothing raise before anything is written."""
    with pytest.raises(ValueError, match=f"^{next(iter(argument))} should be "):
        build_lmdb(Images(3), tmp_path / "cache", **argument)

    assert os.listdir(tmp_path) == []


# --- finished caches -------------------------------------------------------------------------------------


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


# --- two builders ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("needs_lmdb")
def test_while_one_builds_others_are_told_who(tmp_path: Path) -> None:
    """An unfinished build is no cache; its builder may be gone, and the next one goes on."""
    path = tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        build_lmdb(Stopping(10, 5), path, num_workers=0, shards=4)
    with building(path) as pid, pytest.raises(CacheBusyError, match=f"process {pid}"):
        build_lmdb(Images(10), path)
    with pytest.raises(FileNotFoundError, match="unfinished build"):
        LMDBCache(path)
    dataset = Images(10)

    assert_same_samples(build_lmdb(dataset, path, num_workers=0).get(9), Images(10).sample(9))
    assert dataset.reads == [1, 0, 0, 0, 0, 1, 1, 1, 1, 1]  # sample 0 is compared; shard 3 begins at 5
    assert os.listdir(tmp_path) == ["cache"]


def test_a_finished_cache_of_another_form_is_refused(tmp_path: Path) -> None:
    """Another quality or number of files than requested is an error; without a request any form is taken."""
    build_lmdb(Images(6), tmp_path / "cache", codec="jpeg", quality=90, shards=2, num_workers=0)

    with pytest.raises(CacheMismatchError, match="quality is 50 here and 90 there"):
        build_lmdb(Images(6), tmp_path / "cache", codec="jpeg", quality=50, num_workers=0)
    with pytest.raises(CacheMismatchError, match="number of shards is 1 here and 2 there"):
        build_lmdb(Images(6), tmp_path / "cache", shards=1, num_workers=0)
    assert build_lmdb(Images(6), tmp_path / "cache", num_workers=0).num_shards == 2


# --- samples that cannot be read -------------------------------------------------------------------------


@pytest.mark.parametrize(("num_workers", "shards"), [(0, 2), (2, 1)])
def test_skip_leaves_bad_samples_out(num_workers: int, shards: int, tmp_path: Path) -> None:
    """With on_error="skip" bad samples are missing, and reported: index, path, type, reason, worker."""
    dataset = BrokenImages(12, bad=[0, 5, 6, 11])
    cache = build_lmdb(
        dataset, tmp_path / "cache", num_workers=num_workers, on_error="skip", max_errors=1.0, shards=shards
    )
    lines = [json.loads(line) for line in (tmp_path / "cache.errors.jsonl").read_text().splitlines()]

    assert [cache.get(index) is None for index in range(12)] == [i in (0, 5, 6, 11) for i in range(12)]
    assert cache.stored_indices is not None
    assert cache.stored_indices.tolist() == [1, 2, 3, 4, 7, 8, 9, 10]
    assert (cache.num_samples, cache.num_cached) == (12, 8)
    assert [line["index"] for line in lines] == [0, 5, 6, 11]
    assert lines[1].pop("worker") in (range(num_workers) if num_workers else [None])
    assert lines[1] == {"index": 5, "path": "5.jpg", "type": "ImageReadError", "reason": "it is broken"}
    assert 5 not in cache
    assert cache.gather(np.array([4, 5]), np.empty) is None
    assert cache.verify() == []
    assert sorted(os.listdir(tmp_path)) == ["cache", "cache.errors.jsonl"]
    assert build_lmdb(dataset, tmp_path / "cache").num_cached == 8  # compared without sample 0
    with pytest.raises(CacheMismatchError, match="number of samples"):
        build_lmdb(BrokenImages(13, bad=[0]), tmp_path / "cache")


def test_old_report_goes(tmp_path: Path) -> None:
    """A build that leaves nothing out removes the report of a cache that was there before."""
    (tmp_path / "cache.errors.jsonl").write_text("old")
    build_lmdb(Images(3), tmp_path / "cache", num_workers=0, on_error="skip", max_errors=1.0)

    assert os.listdir(tmp_path) == ["cache"]


def test_an_error_from_a_worker_shows_the_frames_of_the_user(tmp_path: Path) -> None:
    """In a note, without those of fastload and torch."""
    with pytest.raises(ImageReadError) as caught:
        build_lmdb(BrokenImages(12, bad=[7]), tmp_path / "cache", num_workers=2)

    (note,) = (note for note in caught.value.__notes__ if note.startswith("raised in a worker process:\n"))
    assert "in __getitem__" in note
    assert "/tasks.py" not in note


@pytest.mark.parametrize(("num_workers", "kind"), [(0, OddError), (2, RuntimeError)])
def test_an_error_that_cannot_be_pickled_is_short(
    num_workers: int, kind: type[Exception], tmp_path: Path
) -> None:
    """From a worker its class and text arrive in one line, with the same notes as any other."""
    with pytest.raises(kind, match="an odd picture") as caught:
        build_lmdb(OddlyBroken(12), tmp_path / "cache", num_workers=num_workers)

    assert "\n" not in str(caught.value)
    assert num_workers == 0 or str(caught.value).startswith("OddError, which cannot be pickled: ")
    assert "in sample 7 of the dataset" in caught.value.__notes__


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_killed_worker_ends_the_build_with_a_word_on_what_is_kept(is_begun: bool, tmp_path: Path) -> None:
    """Its sample is not skipped; nothing is left, and nothing said, if no sample was built before."""
    if is_begun:
        with pytest.raises(KeyboardInterrupt):
            build_lmdb(
                Stopping(12, 5), tmp_path / "cache", num_workers=0, on_error="skip", max_errors=1.0, shards=3
            )
    with pytest.raises(RuntimeError, match="DataLoader worker") as caught:
        build_lmdb(Dying(12), tmp_path / "cache", num_workers=1, on_error="skip", max_errors=1.0)

    kept = f"Finished shards are kept at {tmp_path}/cache.partial: build again to resume"
    assert getattr(caught.value, "__notes__", []) == ([kept] if is_begun else [])
    assert os.listdir(tmp_path) == (["cache.partial"] if is_begun else [])


def test_raise_at_sample_0_leaves_nothing(tmp_path: Path) -> None:
    """An error at the first sample comes before anything is written, and names the way around it."""
    with pytest.raises(ImageReadError) as caught:
        build_lmdb(BrokenImages(12, bad=[0]), tmp_path / "cache", num_workers=0)

    assert "in sample 0 of the dataset" in caught.value.__notes__
    assert 'on_error="skip" leaves out' in caught.value.__notes__[-1]
    assert os.listdir(tmp_path) == []


def test_wrong_arguments_leave_nothing(tmp_path: Path) -> None:
    """Also those that are refused when the samples are about to be read."""
    with pytest.raises((TypeError, ValueError)):
        build_lmdb(Images(12), tmp_path / "cache", num_workers=-1)

    assert os.listdir(tmp_path) == []


class Unsupported(Images):
    """Gives what cannot be cached, at one index."""

    def sample(self, index: int) -> Any:
        return {1, 2} if index == 3 else super().sample(index)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_unsupported_samples_are_not_skipped(num_workers: int, tmp_path: Path) -> None:
    """A dataset that gives what cannot be cached is wrong as a whole: that is never left out silently."""
    with pytest.raises(UnsupportedSampleError) as caught:
        build_lmdb(Unsupported(6), tmp_path / "cache", num_workers=num_workers, on_error="skip")

    assert "in sample 3 of the dataset" in caught.value.__notes__


# --- a system that refuses -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("nbytes", "num_workers"), [(0, 0), (5_000, 0), (100_000, 0), (400_000, 2)])
def test_file_size_limit(nbytes: int, num_workers: int, tmp_path: Path) -> None:
    """A limit that is met at any time is a clear error, and the build goes on where there is room."""
    dataset = Images(40, shape=(64, 64, 3))

    def build() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))
        with pytest.raises(CacheError) as caught:
            build_lmdb(dataset, tmp_path / "cache", num_workers=num_workers)
        said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        is_kept = (tmp_path / "cache.partial/plan.json").exists()
        is_clear = "cannot write the cache" in said and "`ulimit -f`" in said
        os._exit(7 if is_clear and ("build again to resume" in said) == is_kept else 1)

    assert exit_codes(build) == [7]
    cache = build_lmdb(dataset, tmp_path / "cache", num_workers=0)
    assert cache.verify() == []
    assert_same_samples(cache.get(39), dataset.sample(39))


def test_directory_that_is_not_there(tmp_path: Path) -> None:
    """A path below a directory that does not exist is a clear error."""
    with pytest.raises(CacheError) as caught:
        build_lmdb(Images(3), tmp_path / "nowhere" / "cache", num_workers=0)

    assert str(caught.value) == (
        f"cannot write the cache {tmp_path}/nowhere/cache: No such file or directory: "
        f"create the directory {tmp_path}/nowhere first"
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES)), "denied: change the permissions of /a/b"),
        (OSError(errno.EROFS, os.strerror(errno.EROFS)), "Read-only file system: use a path outside /a/b"),
        (OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)), "Not a directory: a part of /a/b is a file"),
        (OSError(errno.EPERM, os.strerror(errno.EPERM)), "not permitted: change the permissions of /a/b"),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "Too many open files"),
        (OSError("something odd"), "something odd"),
        (
            lmdb.DiskError("mdb_txn_commit: No space left on device"),
            "No space left on device: free more space there",
        ),
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


# --- shapes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_workers", "shards"), [(0, 3), (2, 1)])
def test_mixed_shapes_are_told_with_an_example_and_the_fix(
    num_workers: int, shards: int, tmp_path: Path, caplog: Any
) -> None:
    """The log names the number of shapes, two of them, where they are, and what to change."""
    with caplog.at_level(logging.INFO, "fastload"):
        build_lmdb(RaggedImages(40), tmp_path / "x", num_workers=num_workers, shards=shards)

    assert "the samples have at least 35 different shapes at $[0], such as (8, 8, 3) and (" in caplog.text
    assert "--size 256x256" in caplog.text
    assert "crop in the transform" in caplog.text


@pytest.mark.parametrize("kind", [Images, Collatable])
def test_equal_shapes_are_not_mentioned(kind: type[Images], tmp_path: Path, caplog: Any) -> None:
    """Where default_collate works there is nothing to say."""
    with caplog.at_level(logging.INFO, "fastload"):
        cache = build_lmdb(kind(20), tmp_path / "x", num_workers=0)

    default_collate([kind(20).sample(index) for index in range(20)])
    cache.close()
    assert "different shapes" not in caplog.text


def test_samples_without_arrays_have_no_shapes(tmp_path: Path, caplog: Any) -> None:
    """There is nothing to say about a dataset of numbers, nor about samples that are left out."""
    with caplog.at_level(logging.INFO, "fastload"):
        build_lmdb([1, 2, 3], tmp_path / "x", num_workers=0)
        build_lmdb(
            BrokenImages(12, bad=[0, 3]), tmp_path / "y", num_workers=0, on_error="skip", max_errors=1.0
        )

    assert "different shapes" not in caplog.text


def test_a_large_cache_is_looked_at_in_part(
    tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of samples that are looked at is bounded."""
    monkeypatch.setattr("fastload.cache.build.build._MAX_LOOKED_AT", 5)
    with caplog.at_level(logging.INFO, "fastload"):
        build_lmdb(RaggedImages(30), tmp_path / "x", num_workers=0)

    assert "at least 5 different shapes" in caplog.text


# --- what others have put where a build writes ---------------------------------------------------------


def _hard_link(place: Path) -> None:
    (place.parent / "pid").write_text("4711")
    os.link(place.parent / "pid", place)


def _link(place: Path, content: str | None) -> None:
    if content is not None:
        (place.parent / "target").write_text(content)
    place.symlink_to(place.parent / "target")


def _socket(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        directory = os.open(place.parent, os.O_RDONLY)
        try:
            server.bind(f"/proc/self/fd/{directory}/{place.name}")  # a path may be too long for a socket
        finally:
            os.close(directory)


FOREIGN: dict[str, Callable[[Path], Any]] = {
    "link to a file": lambda place: _link(place, "my thesis"),
    "link to an empty file": lambda place: _link(place, ""),
    "link to a number": lambda place: _link(place, "4711"),
    "link to nothing": lambda place: _link(place, None),
    "link to itself": lambda place: place.symlink_to(place),
    "hard link": _hard_link,
    "text": lambda place: place.write_text("my notes"),
    "number and text": lambda place: place.write_text("4711\nand more"),
    "long number": lambda place: place.write_text("1" * 21),
    "number of other digits": lambda place: place.write_text("\N{ARABIC-INDIC DIGIT ONE}"),
    "bytes": lambda place: place.write_bytes(b"\0" * 4),
    "directory": lambda place: place.mkdir(),
    "pipe": lambda place: os.mkfifo(place),
    "socket": _socket,
}


def look(directory: Path) -> dict[str, Any]:
    """What is there, by name: kind, content or target, and the time of its last change."""
    found = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        changed_ns = None if path.is_dir() and not path.is_symlink() else status.st_mtime_ns
        found[str(path.relative_to(directory))] = status.st_mode, content, changed_ns
    return found


# --- the lock --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["link to a file", "link to nothing", "directory", "socket"])
def test_what_cannot_be_a_lock_is_an_error(kind: str, tmp_path: Path) -> None:
    """The error names the destination, and nothing is written or removed."""
    FOREIGN[kind](Path(lock_name(str(tmp_path / "cache"))))
    before = look(tmp_path)

    with pytest.raises(CacheError, match="cannot write the cache"):
        build_lmdb(Images(3), tmp_path / "cache", num_workers=0)
    assert look(tmp_path) == before


@pytest.mark.parametrize("content", ["", "1", "4194304"])
def test_a_lock_of_a_killed_builder_is_taken_over(content: str, tmp_path: Path) -> None:
    """It holds our number alone while we hold it, and others see that the cache is being built."""
    lock = Path(lock_name(str(tmp_path / "cache")))
    lock.write_text(content)
    with building(tmp_path / "cache") as pid:
        assert lock.read_text() == str(pid)
        assert inventory.is_being_built(str(tmp_path / "cache"))

    assert not inventory.is_being_built(str(tmp_path / "cache"))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["nothing", "text", "link to a file", "directory"])
def test_what_took_the_place_of_our_lock_stays(kind: str, tmp_path: Path) -> None:
    """The end of a build removes its own lock file only."""
    lock = Path(lock_name(str(tmp_path / "cache")))
    with only_builder(str(tmp_path / "cache")):
        lock.unlink()
        if kind != "nothing":
            FOREIGN[kind](lock)
        before = look(tmp_path)

    assert look(tmp_path) == before


# --- DEST.partial ----------------------------------------------------------------------------------------


def _partial_link(place: Path) -> None:
    (place.parent / "folder").mkdir()
    (place.parent / "folder" / "errors.jsonl").write_text("mine")
    place.symlink_to(place.parent / "folder")


def _folder(place: Path, name: str, make: Callable[[Path], Any]) -> None:
    place.mkdir()
    (place / "00000-of-00001.lmdb").write_bytes(b"half")
    make(place / name)


PARTIALS: dict[str, Callable[[Path], Any]] = {
    "file": lambda place: place.write_text("a download"),
    "link": _partial_link,
    "link to nothing": lambda place: _link(place, None),
    "foreign file": lambda place: _folder(place, "thesis.txt", lambda at: at.write_text("mine")),
    "folder in it": lambda place: _folder(place, "errors.jsonl", lambda at: at.mkdir()),
    "link in it": lambda place: _folder(place, "errors.jsonl", lambda at: _link(at, "mine")),
    "linked plan": lambda place: _folder(place, "plan.json.new", lambda at: _link(at, "mine")),
    "linked shard": lambda place: _folder(place, "00001-of-00001.lmdb", lambda at: _link(at, "mine")),
    "hard link in it": lambda place: _folder(place, "errors.jsonl", _hard_link),
    "pipe in it": lambda place: _folder(place, "plan.json", lambda at: os.mkfifo(at)),
}  # fmt: skip


@pytest.mark.parametrize("kind", PARTIALS)
def test_an_unfinished_build_that_is_not_ours_stays(kind: str, tmp_path: Path) -> None:
    """A build is refused, and names what is foreign; a finished cache beside it is opened."""
    PARTIALS[kind](tmp_path / "cache.partial")
    before = look(tmp_path)
    with pytest.raises(CacheError, match=r"cache\.partial.* move it away"):
        build_lmdb(Images(3), tmp_path / "cache", num_workers=0)
    assert look(tmp_path) == before

    build_lmdb(Images(3), tmp_path / "elsewhere", num_workers=0).close()
    (tmp_path / "elsewhere").rename(tmp_path / "cache")
    assert_same_samples(build_lmdb(Images(3), tmp_path / "cache").get(2), Images(3).sample(2))
    after = look(tmp_path)
    del after["cache"]
    assert after == before


# --- DEST and the report ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FOREIGN)
def test_the_report_is_written_through_no_other_file(kind: str, tmp_path: Path) -> None:
    """The report of errors comes to its place whole, and no file beside it is written to."""
    FOREIGN[kind](tmp_path / "cache.errors.jsonl.new")
    before = look(tmp_path)
    build_lmdb(BrokenImages(4, bad=[1]), tmp_path / "cache", num_workers=0, on_error="skip").close()
    after = look(tmp_path)

    assert after.pop("cache.errors.jsonl")[1].count(b"\n") == 1
    assert LMDBCache(tmp_path / "cache").num_cached == 3
    del after["cache"]
    assert after == before


@pytest.mark.parametrize(("kind", "shards"), [("text", 1), ("directory", 2), ("link to a file", 1)])
def test_what_came_to_the_destination_meanwhile_stays(kind: str, shards: int, tmp_path: Path) -> None:
    """A build whose destination was taken while it ran raises; what it built is kept."""

    class Late(Images):
        def sample(self, index: int) -> Any:
            if index == 2 and not os.path.lexists(tmp_path / "cache"):
                FOREIGN[kind](tmp_path / "cache")
            return super().sample(index)

    with pytest.raises(CacheError, match=r"created .*cache.*cache\.partial"):
        build_lmdb(Late(3), tmp_path / "cache", num_workers=0, shards=shards)
    found = look(tmp_path)
    assert found["cache.partial/plan.json"]
    FOREIGN[kind](tmp_path / "expected")
    assert look(tmp_path)["expected"][:2] == found["cache"][:2]


def test_a_finished_cache_is_listed_beside_a_foreign_partial_file(tmp_path: Path) -> None:
    """A download tool's file of that name hides no cache, neither this one nor another."""
    for name in ("cache", "other"):
        build_lmdb(Images(3), tmp_path / name, num_workers=0)
    (tmp_path / "cache.partial").write_bytes(b"half a download")

    found = inventory.list_caches(str(tmp_path))

    assert [(os.path.basename(one.path), one.state) for one in found] == [
        ("cache", "finished"),
        ("other", "finished"),
    ]


def test_without_lmdb_a_build_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no wheels for free-threaded Python, which can read files that a different Python built."""
    build_lmdb(Images(4), tmp_path / "built", num_workers=0).close()
    monkeypatch.setitem(sys.modules, "lmdb", None)

    with pytest.raises(CacheError, match=r'lmdb, which is not installed.*cache="ram".*reading it'):
        build_lmdb(Images(4), tmp_path / "cache", num_workers=0)
    cached = CachedDataset(Images(4), cache=f"lmdb:{tmp_path / 'built'}")
    assert_same_samples(cached[3], Images(4).sample(3))
