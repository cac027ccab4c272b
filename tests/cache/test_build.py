"""build_lmdb in one process: samples, systems, foreign files; what every way to build promises; kills."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import multiprocessing
import os
import random
import re
import resource
import shlex
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lmdb
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fastload import errors
from fastload.cache.build import inventory, processes
from fastload.cache.build import writer as lmdb_writer
from fastload.cache.build.build import build_lmdb
from fastload.cache.build.on_executor import build_on
from fastload.cache.build.staging import lock_name, only_builder
from fastload.cache.build.writer import writing
from fastload.cache.dataset import CachedDataset
from fastload.cache.format.fingerprint import fingerprint_of
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.errors import CacheBusyError, CacheCorruptError, CacheError, CacheMismatchError, ImageReadError
from fastload.images.folder import ImageFolder
from tests.cache.build_zoo import BrokenImages, Calling, OddError, building, die, exit_codes, odd, refusing
from tests.cache.zoo import BareImages, Everything, Images, KnownImages, Made, RaggedImages
from tests.kit.batches import assert_same_samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


SKIP: dict[str, Any] = {"on_error": "skip", "max_errors": 1.0}


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
    wrong = ("shards", 0), ("on_error", "ignore"), ("max_errors", 0.0), ("num_workers", -1)
    for name, value in wrong:
        with pytest.raises(ValueError, match=rf"^{name} (option )?should be "):
            build_lmdb(Images(3), tmp_path / "cache", **{name: value})
    with pytest.raises(ValueError, match=r'^max_errors=9 needs on_error="skip": '):
        build_lmdb(Images(3), tmp_path / "cache", max_errors=9)
    assert os.listdir(tmp_path) == []


def test_the_loaders_word_for_a_bad_sample_is_answered_with_that_of_builds(path: Path) -> None:
    """A build has no other sample to put in its place."""
    with pytest.raises(ValueError, match='write on_error="skip", which leaves them out'):
        build_lmdb(Images(4), path, on_error="replace")


def test_a_command_in_a_message_can_be_copied(tmp_path: Path) -> None:
    """Its path is quoted for a shell, whatever is in it, and the code beside it runs."""
    path = tmp_path / "my photos' $cache.lmdb"
    build_lmdb(Images(4), path, num_workers=0).close()
    with pytest.raises(CacheMismatchError) as caught:
        build_lmdb(Images(5), path)
    (command,) = re.findall("`(.*?)`", str(caught.value))
    assert shlex.split(command) == ["fastload", "cache", "rm", str(path)]
    path = tmp_path / 'my "photos"'
    build_lmdb(Images(4), path, num_workers=0).close()
    with pytest.raises(ValueError, match="for the cache at this path") as error:
        CachedDataset(Images(4), cache=str(path))
    advice = re.search("pass cache=(.*) for the cache", str(error.value))
    assert advice is not None
    assert eval(advice[1]) == f"lmdb:{path}"
    with pytest.raises(ValueError, match=r'pass cache="lmdb:new\.lmdb" for'):  # it need not exist yet
        CachedDataset(Images(4), cache="new.lmdb")


def test_a_different_length_is_said_once(tmp_path: Path) -> None:
    """It is a part of the fingerprint, too."""
    cache = f"lmdb:{tmp_path / 'cache.lmdb'}"
    CachedDataset(KnownImages(4), cache=cache)
    with pytest.raises(CacheMismatchError) as caught:
        CachedDataset(KnownImages(5), cache=cache)
    text = str(caught.value)
    assert 'num_samples is "5" here and "4" there' in text
    assert "number of samples" not in text
    folder = tmp_path / "photos" / "a"
    folder.mkdir(parents=True)
    for name in ("1.png", "2.png"):
        Image.new("RGB", (8, 8)).save(folder / name)
        dataset, cache = ImageFolder(folder.parent), f"lmdb:{tmp_path / 'photos.lmdb'}"
        if name == "1.png":
            CachedDataset(dataset, cache=cache)
    with pytest.raises(CacheMismatchError, match=r'files is "2 files.* and "1 files') as caught:
        CachedDataset(dataset, cache=cache)
    assert "num_samples" not in str(caught.value)


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
    assert f"If the dataset is right, remove it with `fastload cache rm {path}`, build it again" in text


@pytest.mark.usefixtures("needs_lmdb")
@pytest.mark.parametrize("content", ["", "4194304"])
def test_while_one_builds_others_are_told_who(content: str, tmp_path: Path) -> None:
    """The lock of a killed builder is taken over; an unfinished build is no cache, and the next goes on."""
    path, lock = tmp_path / "cache", Path(lock_name(str(tmp_path / "cache")))
    for stop, left in ((1, []), (5, ["cache.partial"])):  # in the first shard there is nothing to keep
        with pytest.raises(KeyboardInterrupt):
            build_lmdb(BrokenImages(10, stop=stop), path, num_workers=0, shards=4)
        assert os.listdir(tmp_path) == left
    lock.write_text(content)
    with building(path) as pid:
        assert lock.read_text() == str(pid)
        assert inventory.is_being_built(str(path))
        with pytest.raises(CacheBusyError, match=f"process {pid}"):
            build_lmdb(Images(10), path, wait=False)
    assert not inventory.is_being_built(str(path))
    assert os.listdir(tmp_path) == ["cache.partial"]
    with pytest.raises(FileNotFoundError, match="unfinished build"):
        LMDBCache(path)
    assert build_lmdb(Images(10), path, num_workers=0).description.num_shards == 4


@pytest.mark.parametrize(("num_workers", "shards"), [(0, 2), (2, 1)])
def test_skip_leaves_bad_samples_out(num_workers: int, shards: int, tmp_path: Path) -> None:
    """With on_error="skip" bad samples are missing, and reported: index, path, type, reason, worker."""
    dataset = BrokenImages(12, bad=[0, 5, 6, 11])
    cache = build_lmdb(dataset, tmp_path / "cache", num_workers=num_workers, shards=shards, **SKIP)
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


def test_a_killed_worker_ends_the_build_with_a_word_on_what_is_kept(tmp_path: Path) -> None:
    """Its sample is not skipped; nothing is left, and nothing said, if no sample was built before."""
    kept = f"Finished shards are kept at {tmp_path}/cache.partial: build again to resume"
    for notes in ([], [kept]):
        with pytest.raises(RuntimeError, match="DataLoader worker") as caught:
            build_lmdb(Calling(12, 7, die), tmp_path / "cache", num_workers=1, **SKIP)
        assert getattr(caught.value, "__notes__", []) == notes
        assert os.listdir(tmp_path) == ["cache.partial"] * len(notes)
        with contextlib.suppress(KeyboardInterrupt):
            build_lmdb(BrokenImages(12, stop=5), tmp_path / "cache", num_workers=0, shards=3, **SKIP)


ODD_SAMPLE, UNSUPPORTED = errors.UnsupportedSampleError, Made(lambda index: {1, 2} if index == 3 else index)


@pytest.mark.parametrize(
    ("dataset", "num_workers", "kind", "said", "notes"),
    [
        (BrokenImages(12, bad=[0]), 0, ImageReadError, "0.jpg", ["in sample 0 of the dataset", "leaves out"]),
        (BrokenImages(12, bad=[7]), 2, ImageReadError, "7.jpg", ["in sample 7", "in __getitem__"]),
        (Calling(12, 7, odd), 0, OddError, "an odd picture", ["in sample 7 of the dataset"]),
        (Calling(12, 7, odd), 2, RuntimeError, "OddError, which cannot be pickled: an odd", ["in sample 7"]),
        *((UNSUPPORTED, workers, ODD_SAMPLE, "set", ["in sample 3"]) for workers in (0, 1)),
    ],
)
def test_an_error_names_its_sample_and_leaves_nothing(
    dataset: Any, num_workers: int, kind: type[Exception], said: str, notes: list[str], tmp_path: Path
) -> None:
    """From a worker it has the user's frames and no others; what cannot be cached is never left out."""
    on_error = "skip" if kind is ODD_SAMPLE else "raise"
    with pytest.raises(kind, match=said) as caught:
        build_lmdb(dataset, tmp_path / "cache", num_workers=num_workers, on_error=on_error)
    found = "\n".join(caught.value.__notes__)
    assert [note for note in notes if note not in found] == []
    assert "/tasks.py" not in found
    assert kind is ODD_SAMPLE or "\n" not in str(caught.value)
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


def test_no_directory_is_asked_for_below_a_file(tmp_path: Path) -> None:
    """The system says that there is no such directory, but nobody can create it."""
    (tmp_path / "a.jpg").write_bytes(b"an image")
    for directory, said in (("a.jpg", "a part of .* is a file"), ("a.jpg/b", "is a file"), ("b/c", "create")):
        with pytest.raises(CacheError, match=said):
            build_lmdb(Images(4), tmp_path / directory / "cache")


def test_a_file_that_is_no_cache_is_told_with_a_cure(tmp_path: Path) -> None:
    """It can be a damaged cache, or a file of the user's that should stay."""
    (tmp_path / "cache").write_bytes(b"a file of the user's")
    with pytest.raises(CacheCorruptError, match=r"Use a different path; or, if it is a cache, delete"):
        CachedDataset(Images(4), cache=f"lmdb:{tmp_path / 'cache'}")


@pytest.mark.parametrize("dataset", [Images(20), Everything(20), [1, 2, 3], BrokenImages(12, bad=[0, 3])])
def test_a_build_logs_its_rate(dataset: Any, tmp_path: Path, caplog: Any, capfd: Any) -> None:
    """And draws nothing without a terminal."""
    with caplog.at_level(logging.INFO, "fastload"):
        build_lmdb(dataset, tmp_path / "x", num_workers=0, **SKIP).close()
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


# --- every way to build: here, by tasks ----------------------------------------------------------------


def here(source: BrokenImages, place: str, **options: Any) -> LMDBCache:
    return build_lmdb(source, place, num_workers=0, fingerprint=fingerprint_of(source), **options)


def by_tasks(source: BrokenImages, place: str, **options: Any) -> LMDBCache:
    with ThreadPoolExecutor(1) as executor:
        return build_on(executor, lambda: source, place, num_cpus=1, **options)


WAYS = {way.__name__: way for way in (here, by_tasks)}


class Builder:
    """One way to build, and its place."""

    def __init__(self, way: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.way, self.folder, self.patch = way, folder, patch
        self.place = str(folder / "cache")
        self.files = f"{self.place}.partial/"

    def __call__(self, source: BrokenImages, **options: Any) -> LMDBCache:
        WAYS[self.way](source, self.place, progress=False, **{"shards": 3, **options}).close()
        return LMDBCache(self.place)

    def stopped(self, **options: Any) -> list[str]:
        """Leave an unfinished build: the first two of three shards are finished; gives the error's notes."""
        with pytest.raises(KeyboardInterrupt) as caught:
            self(BrokenImages(stop=15, **options), on_error="skip")
        return getattr(caught.value, "__notes__", [])

    def content(self) -> dict[str, bytes]:
        """All files by their paths."""
        return {str(path): path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}

    def plan(self, data: bytes) -> None:
        """Replace the plan of an unfinished build."""
        Path(f"{self.files}plan.json").write_bytes(data)

    def reported(self) -> list[int]:
        """The samples in the report."""
        found = [data for path, data in self.content().items() if path.endswith("cache.errors.jsonl")]
        return [json.loads(line)["index"] for data in found for line in data.splitlines()]


@contextlib.contextmanager
def builder_in(folder: Path, way: str) -> Iterator[Builder]:
    with pytest.MonkeyPatch.context() as patch:
        yield Builder(way, folder, patch)


@pytest.fixture(params=WAYS)
def builder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Builder]:
    with builder_in(tmp_path, request.param) as made:
        yield made


@pytest.mark.slow
@given(
    st.sampled_from([*WAYS]),
    st.fixed_dictionaries({"shards": st.integers(1, 6)}),
    st.integers(1, 9000),
    st.integers(0, 13),
    st.sets(st.integers(1, 12), max_size=3),
    st.sets(st.integers(0, 12), max_size=4),
)
@settings(max_examples=50)
def test_any_stops_give_the_readable_samples(
    way: str,
    made: Any,
    commit_bytes: int,
    num_samples: int,
    stops: set[int],
    bad: set[int],
) -> None:
    """Builds that end early and are run again give every readable sample."""
    options: dict[str, Any] = {**SKIP, **made}
    bad = {index for index in bad if index < num_samples}
    with tempfile.TemporaryDirectory() as folder, builder_in(Path(folder), way) as build:
        build.patch.setattr(lmdb_writer, "_COMMIT_BYTES", commit_bytes)
        for stop in sorted(stops - bad):
            if stop < num_samples:
                with contextlib.suppress(KeyboardInterrupt):  # its shard is finished, maybe
                    build(BrokenImages(num_samples, stop=stop, bad=bad), **options)
        cache = build(BrokenImages(num_samples, bad=bad), **options)

        assert [index for index in range(num_samples) if index not in cache] == sorted(bad)
        for index in range(num_samples):
            assert_same_samples(cache.get(index), None if index in bad else BrokenImages().sample(index))
        assert cache.verify() == []
        assert build.reported() == sorted(bad)
        assert not [path for path in build.content() if ".partial" in path]
        cache.close()


@pytest.mark.parametrize("version", [None, "1"])
def test_a_second_build_opens_the_cache(version: Any, builder: Builder) -> None:
    """It writes nothing, and reads sample 0 at most, none where the fingerprints are the same."""
    builder(BrokenImages(version=version))
    before, again = builder.content(), BrokenImages(version=version)
    assert builder(again, shards=None).description.num_shards == 3
    assert builder.content() == before
    if builder.way == "here":
        assert sum(again.reads) == (version is None)


@pytest.mark.parametrize(
    ("first", "second"),
    [*((way, way) for way in WAYS), ("here", "by_tasks"), ("by_tasks", "here")],
)
def test_finished_shards_are_not_read_again(first: str, second: str, tmp_path: Path) -> None:
    """A build goes on with those that are missing, but for samples that it compares, whoever began it."""
    with builder_in(tmp_path, first) as one, builder_in(tmp_path, second) as other:
        assert f"Finished shards are kept at {one.files.rstrip('/')}: build again to resume" in one.stopped()
        again = BrokenImages()
        assert other(again).verify() == []
        assert again.reads[1:10] + again.reads[11:13] == [0] * 11
        assert min(again.reads[13:]) == 1


DIFFERENCES: list[tuple[BrokenImages, dict[str, Any], str]] = [
    (BrokenImages(21, version="1"), {}, 'num_samples is "21" here and "20" there'),
    (BrokenImages(version="1"), {"shards": 4}, "number of shards is 4 here and 3 there"),
    (BrokenImages(version="2"), {}, '"2" here and "1" there'),
    (BrokenImages(shift=1), {}, "content of sample 0 is"),
]


@pytest.mark.parametrize("state", ["finished", "unfinished"])
def test_a_build_of_other_samples_or_settings_is_refused(state: str, builder: Builder) -> None:
    """The error says what differs and what to do, and nothing is changed."""
    builder(BrokenImages(version="1")) if state == "finished" else builder.stopped(version="1")
    before = builder.content()
    for source, options, said in DIFFERENCES:
        with pytest.raises(CacheMismatchError, match=rf"{said}.*fastload cache rm"):
            builder(source, **options)
    assert builder.content() == before


def test_a_damaged_plan_is_an_error(builder: Builder) -> None:
    """It is never replaced: it may be that of another release, which is at work elsewhere."""
    builder.stopped()
    good = next(data for path, data in builder.content().items() if path.endswith("plan.json"))
    for data in (
        *(b"", b"[]", b"{}", b"[" * 100_000, b'{"version": 4, "plan": 5}'),
        good.replace(b'"num_samples": 20', b'"num_samples": -20'),
        good.replace(b'"parts"', b'"party"'),
        good.replace(b'"version": 4', b'"version": 9'),
    ):
        builder.plan(data)
        before = builder.content()
        with pytest.raises(CacheError, match=rf"{builder.place}.*(plan\.json is damaged|format 9)"):
            builder(BrokenImages())
        assert builder.content() == before


def test_a_bad_sample_ends_the_build_and_skip_leaves_it_out_later(builder: Builder) -> None:
    """The error names the sample and what is kept; finished shards are not built again."""
    kind = CacheError if builder.way == "by_tasks" else ImageReadError
    with pytest.raises(kind, match=r"14\.jpg") as caught:
        builder(BrokenImages(bad=[14]))
    said = "\n".join([str(caught.value), *caught.value.__notes__])
    again = BrokenImages(bad=[14])
    assert "in sample 14 of the dataset" in said
    assert 'on_error="skip"' in said
    assert f"Finished shards are kept at {builder.files.rstrip('/')}" in said
    assert builder(again, on_error="skip").num_cached == 19
    assert (again.reads[1:9], builder.reported()) == ([0] * 8, [14])


def test_too_many_failures_in_the_first_shard_are_listed(tmp_path: Path) -> None:
    """Nothing else is left then, and the error does not promise shards."""
    with pytest.raises(
        errors.TooManyFailuresError, match=r"2 of 20 .*=0\.01 \(a share; .* allows 1"
    ) as caught:
        build_lmdb(BrokenImages(bad=[1, 4]), tmp_path / "cache", on_error="skip", num_workers=0)
    assert "kept" not in f"{caught.value}{caught.value.__notes__}"
    assert f"listed in {tmp_path}/cache.errors.jsonl" in caught.value.__notes__[-1]
    assert os.listdir(tmp_path) == ["cache.errors.jsonl"]


def test_max_errors_holds_for_the_whole(builder: Builder) -> None:
    """One sample of each shard is left out; two may be, none by default, and a larger limit is enough."""
    bad, options = BrokenImages(bad=[1, 8, 19]), {"on_error": "skip"}
    with pytest.raises(errors.TooManyFailuresError, match=r"3 of 20 samples .*=2 allows 2\.") as caught:
        builder(bad, max_errors=2, **options)
    said = "\n".join([str(caught.value), *caught.value.__notes__])
    assert said.count("kept at") == 1
    assert f"listed in {builder.place}.errors.jsonl" in said
    assert builder.reported() == [1, 8, 19]
    with pytest.raises(FileNotFoundError):
        LMDBCache(builder.place)
    with pytest.raises(CacheError, match=r"leaves out \d samples"):
        builder(BrokenImages())
    assert builder(bad, max_errors=0.15, **options).num_cached == 17


@pytest.mark.parametrize("call", ["fsync", "ftruncate", "makedirs", "rename"])
def test_a_full_disk_is_an_error_whichever_call_meets_it(call: str, builder: Builder) -> None:
    """The error says that a file could not be written, and the build goes on where there is room."""
    for begin in (lambda: None, lambda: builder.stopped(bad=[3]))[: 1 + (call in ("fsync", "rename"))]:
        begin()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, call, refusing(errno.ENOSPC))
            with pytest.raises(CacheError, match=r"cannot write .*No space left"):
                builder(BrokenImages(bad=[3]), on_error="skip")
    assert builder(BrokenImages(bad=[3]), on_error="skip").num_cached == 19
    assert not [path for path in builder.content() if ".partial" in path]


@pytest.mark.parametrize("damage", ["cut", "of another build", "its report"])
def test_a_damaged_shard_is_built_again(damage: str, builder: Builder, tmp_path: Path) -> None:
    """A shard is taken over whole, of the same build, and with the reasons of what it leaves out."""
    builder.stopped(bad=[3])
    shard = Path(builder.files, "00000-of-00003.lmdb")
    if damage == "its report":
        lines = b'{"index": "x", "path": null, "type": "", "reason": ""}', b"[" * 100_000, b"5", b"\xff"
        shard.with_name("00000-of-00003.errors.jsonl").write_bytes(b"\n".join(lines))
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-5])
    else:
        (tmp_path / "other").mkdir()
        other = Builder("here", tmp_path / "other", builder.patch)
        other.stopped(bad=[3])
        shard.write_bytes(Path(other.files, shard.name).read_bytes())
    again = BrokenImages(bad=[3])

    cache = builder(again, on_error="skip")
    assert (cache.num_cached, cache.verify(), builder.reported()) == (19, [], [3])
    assert min(again.reads[1:6]) == 1
    assert again.reads[6:9] == [0] * 3


# --- killed builds -------------------------------------------------------------------------------------


PACKAGE = str(Path(lmdb_writer.__file__).parent)
SETTINGS: list[dict[str, Any]] = [{}, {"shards": 3}, SKIP, {**SKIP, "shards": 4}]


def dataset_for(settings: Mapping[str, Any]) -> Images:
    """Ragged images, or some that cannot be read where these are left out."""
    return BrokenImages(24, bad=[3, 4, 11, 23]) if "on_error" in settings else RaggedImages(24)


def build(path: Path, settings: Mapping[str, Any], dataset: Images | None = None) -> Any:
    """In this process, so that there is one to kill."""
    return build_lmdb(dataset or dataset_for(settings), path, num_workers=0, progress=False, **settings)


def build_and_check(path: Path, settings: Mapping[str, Any], dataset: Images) -> None:
    """The cache equals its source."""
    cache, bad = build(path, settings, dataset), getattr(dataset, "bad", ())
    assert cache.verify() == []
    for index in range(len(dataset)):
        assert_same_samples(cache.get(index), None if index in bad else dataset.sample(index))


class Countdown:
    """Kills its process just before a certain call that the cache's code makes to the system or to C."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.calls -= 1
            if self.calls < 0:
                os.kill(os.getpid(), signal.SIGKILL)


def count_calls(path: Path, settings: Mapping[str, Any]) -> int:
    """How many such calls a whole build makes, once what is computed once is there."""
    build(path.with_name("warm"), settings)
    counter = Countdown(1 << 40)
    sys.setprofile(counter)
    try:
        build(path, settings)
    finally:
        sys.setprofile(None)
    return (1 << 40) - counter.calls


@pytest.mark.slow
@pytest.mark.parametrize("way", ["before a call", "in a write"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2, 3))])
@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_a_build_that_was_killed_is_completed_by_the_next(
    number: int, seed: int, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any call of the cache's code, or in LMDB's own writes, which may be cut short at any size."""
    monkeypatch.setattr(lmdb_writer, "_COMMIT_BYTES", 5000)
    settings, chance = SETTINGS[number], random.Random(10 * number + seed)
    total = count_calls(tmp_path / "counted", settings)
    for turn in range(6):
        path = tmp_path / f"cache{turn}"
        # Now and then right at the end, where files are renamed and removed.
        at = total - chance.randrange(5, 60) if turn % 3 == 0 else chance.randrange(total)

        def killed(path: Path = path, at: int = at, turn: int = turn) -> None:
            if way == "before a call":
                sys.setprofile(Countdown(at))
                build(path, settings)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL if turn % 2 else signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (64 * at, 64 * at))
            try:
                build(path, settings)
            except CacheError as error:  # what the system cuts short, LMDB reports
                said = "\n".join([str(error), *getattr(error, "__notes__", [])])
                is_kept = Path(f"{path}.partial/plan.json").exists()
                assert "cannot write the cache" in said
                assert "`ulimit -f`" in said
                assert ("build again to resume" in said) == is_kept

        code = exit_codes(killed)[0]
        expected = [-signal.SIGKILL] if way == "before a call" else [0, -signal.SIGXFSZ]
        assert code in expected, f"turn {turn}, call {at} of {total}"
        build_and_check(path, settings, dataset_for(settings))
        # Killed at its very end, a build leaves small files that are in nobody's way.
        left = {name for name in os.listdir(tmp_path) if f"cache{turn}" in name}
        known = {f"cache{turn}", f"cache{turn}.errors.jsonl", f".cache{turn}.fastload-lock"}
        assert left - {f"cache{turn}.partial"} <= known, f"turn {turn}, call {at} of {total}"


@pytest.mark.usefixtures("needs_lmdb")
def test_killed_with_its_workers_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A builder that is killed while its workers live is followed at once: they hold no lock."""
    monkeypatch.setattr(lmdb_writer, "_COMMIT_BYTES", 5000)
    path, worker = tmp_path / "cache", tmp_path / "worker"

    def kill_builder() -> None:
        worker.write_text(str(os.getpid()))
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()

    dataset = Calling(400, 300, kill_builder)
    assert exit_codes(lambda: build_lmdb(dataset, path, num_workers=1)) == [-signal.SIGKILL]
    try:
        build_and_check(path, {}, Images(400))
    finally:
        os.kill(int(worker.read_text()), signal.SIGKILL)


# --- what the lock of a build survives --------------------------------------------------------------------


def _is_held_elsewhere(path: Path) -> bool:
    """Whether another process sees that a builder is at work."""
    return exit_codes(lambda: os._exit(int(inventory.is_being_built(str(path))))) == [1]


def _list_caches(path: Path) -> None:
    assert [item.state for item in inventory.list_caches(str(path.parent))] == ["building"]


def _build_again(path: Path) -> None:
    with pytest.raises(CacheBusyError, match="another thread"):
        build_lmdb(Images(4), path)


def _fork(path: Path) -> None:
    assert exit_codes(lambda: None) == [0]


LOOKS: dict[str, Callable[[Path], Any]] = {
    "list": _list_caches,
    "ask": lambda path: inventory.is_being_built(str(path)),
    "read": lambda path: Path(lock_name(str(path))).read_bytes(),
    "build again": _build_again,
    "fork": _fork,
}


@pytest.mark.usefixtures("needs_lmdb")
@pytest.mark.parametrize("name", LOOKS)
def test_a_look_at_the_lock_does_not_drop_it(name: str, tmp_path: Path) -> None:
    """Whatever else the process of the builder opens and closes, such as a backup of the folder."""
    path = tmp_path / "cache"
    (tmp_path / "cache.partial").mkdir()
    with only_builder(str(path)):
        LOOKS[name](path)
        assert _is_held_elsewhere(path)
    assert not _is_held_elsewhere(path)


def test_a_child_does_not_hold_the_lock_of_a_killed_builder(tmp_path: Path) -> None:
    """A worker of a loader that was forked meanwhile can live longer."""
    path, (end, to_end), (started, to_start) = tmp_path / "cache", os.pipe(), os.pipe()

    def hold() -> None:
        with only_builder(str(path)):
            if os.fork() == 0:
                os.close(to_end)
                os.write(to_start, b".")
                os.read(end, 1)  # until the test closes the pipe
                os._exit(0)
            os.read(started, 1)
            os.kill(os.getpid(), signal.SIGKILL)

    assert exit_codes(hold) == [-signal.SIGKILL]
    with only_builder(str(path)):
        pass
    for fd in (end, to_end, started, to_start):
        os.close(fd)


def test_a_child_that_leaves_the_block_does_not_end_the_lock(tmp_path: Path) -> None:
    """An error in a fork of the builder goes through the same code."""
    path = tmp_path / "cache"
    try:
        with only_builder(str(path)):
            if (pid := os.fork()) == 0:
                raise KeyboardInterrupt
            os.waitpid(pid, 0)
            assert _is_held_elsewhere(path)
    except KeyboardInterrupt:
        os._exit(0)


@pytest.mark.usefixtures("needs_lmdb")
def test_a_file_that_comes_at_the_last_moment_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache gets its name only if nothing has it, in one step."""
    path = tmp_path / "cache"

    def late(name: str) -> None:
        real = getattr(os, name)

        def call(source: Any, destination: Any) -> None:
            if os.fspath(destination) == str(path):
                path.write_text("mine")
            real(source, destination)

        patch.setattr(os, name, call)

    with monkeypatch.context() as patch:
        late("rename")
        late("link")
        with pytest.raises(CacheError, match=r"created .*cache.*cache\.partial"):
            build_lmdb(Images(3), path, num_workers=0)
    assert path.read_text() == "mine"
    path.unlink()
    assert build_lmdb(Images(3), path, num_workers=0).verify() == []
    assert os.listdir(tmp_path) == ["cache"]


@pytest.mark.usefixtures("needs_lmdb")
def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache is published all the same."""
    monkeypatch.setattr(os, "link", refusing(errno.EPERM))
    assert build_lmdb(Images(3), tmp_path / "cache", num_workers=0).verify() == []
    assert os.listdir(tmp_path) == ["cache"]


def test_no_more_workers_start_than_there_are_tasks() -> None:
    """However many are asked for: a number with some zeros too many must not exhaust the machine."""
    answers: Any = processes.run(Images(3), 3, 20)
    try:
        assert len(answers._workers) == 3
        assert [label for _, label in answers] == [0, 1, 2]
    finally:
        processes.stop(answers)
