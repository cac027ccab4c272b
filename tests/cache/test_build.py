"""build_lmdb in one process: samples, systems, foreign files; what every way to build promises; kills."""

from __future__ import annotations

import contextlib
import errno
import json
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fastload import errors
from fastload.cache import inventory, lmdb_store
from fastload.cache.build import build_lmdb
from fastload.cache.dataset import CachedDataset
from fastload.cache.fingerprint import fingerprint_of
from fastload.cache.finished import LMDBCache
from fastload.cache.inventory import lock_name, only_builder
from fastload.cache.lmdb_store import open_store
from fastload.errors import CacheBusyError, CacheError, CacheMismatchError, ImageReadError
from fastload.images.folder import ImageFolder
from tests.cache.build_zoo import (
    BrokenImages,
    Calling,
    Edited,
    OddError,
    building,
    die,
    exit_codes,
    odd,
    refusing,
)
from tests.cache.zoo import BareImages, Images, KnownImages, Made, RaggedImages
from tests.kit.batches import assert_same_samples
from tests.kit.processes import still_running

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


SKIP: dict[str, Any] = {"on_error": "skip", "max_errors": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_workers", "method", "num_samples"), [(0, "fork", 40), (2, "fork", 700), (1, "forkserver", 12)]
)
def test_build_reads_each_sample_once(
    num_workers: int, method: str, num_samples: int, tmp_path: Path
) -> None:
    """Here or in many tasks of workers, but for probed ones; no generator is used, and an old report goes."""
    dataset, state = RaggedImages(num_samples, log=tmp_path / "log"), torch.get_rng_state()
    (tmp_path / "cache.errors.jsonl").write_text("old")
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(method, force=True)
    try:
        probed, options = {0: dataset.sample(0)}, {"num_workers": num_workers, "on_error": "skip"}
        cache = build_lmdb(dataset, tmp_path / "cache", probed=probed, **options)
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
    wrong = ("on_error", "ignore"), ("max_errors", 0.0), ("num_workers", -1)
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
        with pytest.raises(CacheMismatchError, match="sample 0 of the dataset differs"):
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
    """The lock of a killed builder is taken over, its file is replaced, and it is no cache."""
    path, lock = tmp_path / "cache", Path(lock_name(str(tmp_path / "cache")))
    lock.write_text(content)
    with building(path) as pid:
        assert lock.read_text() == str(pid)
        assert inventory.is_being_built(str(path))
        with pytest.raises(CacheBusyError, match=f"process {pid}"):
            build_lmdb(Images(10), path, wait=False)
    assert not inventory.is_being_built(str(path))
    (tmp_path / "cache.partial").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"cache\.partial is left of a build: run it again"):
        LMDBCache(path)
    assert build_lmdb(Images(10), path, num_workers=0).num_cached == 10
    assert os.listdir(tmp_path) == ["cache"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_skip_leaves_bad_samples_out(num_workers: int, tmp_path: Path) -> None:
    """With on_error="skip" bad samples are missing, and reported: index, path, type, reason, worker."""
    dataset = BrokenImages(12, bad=[0, 5, 6, 11])
    cache = build_lmdb(dataset, tmp_path / "cache", num_workers=num_workers, **SKIP)
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


def test_a_killed_worker_ends_the_build(tmp_path: Path) -> None:
    """Its sample is not skipped, and the next build continues."""
    with pytest.raises(RuntimeError, match=r"worker process .* exit code -9"):
        build_lmdb(Calling(12, 7, die), tmp_path / "cache", num_workers=1, **SKIP)
    assert build_lmdb(Images(12), tmp_path / "cache", num_workers=0).verify() == []


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
def test_an_error_names_its_sample_and_what_is_stored(
    dataset: Any, num_workers: int, kind: type[Exception], said: str, notes: list[str], tmp_path: Path
) -> None:
    """From a worker it has the frames there; what cannot be cached is never left out."""
    on_error = "skip" if kind is ODD_SAMPLE else "raise"
    with pytest.raises(kind, match=said) as caught:
        build_lmdb(dataset, tmp_path / "cache", num_workers=num_workers, on_error=on_error)
    found = "\n".join(caught.value.__notes__)
    assert [note for note in notes if note not in found] == []
    assert kind is ODD_SAMPLE or "\n" not in str(caught.value)
    assert f"records are stored in {tmp_path}/cache.partial: run the same" in found


def test_an_error_names_the_directory_that_is_missing_or_a_file(tmp_path: Path) -> None:
    """The error has the system's words, and the directory to look at."""
    (tmp_path / "a.jpg").write_bytes(b"an image")
    for directory, said in (("a.jpg", "Not a directory"), ("a.jpg/b", "Not a directory"), ("b/c", "No such")):
        with pytest.raises(CacheError, match=rf"{said}.*: check that the directory .*{directory} exists"):
            build_lmdb(Images(4), tmp_path / directory / "cache")


def test_a_build_draws_nothing_without_a_terminal(tmp_path: Path, capfd: Any) -> None:
    """Also one that leaves samples out."""
    build_lmdb(BrokenImages(12, bad=[0, 3]), tmp_path / "x", num_workers=0, **SKIP).close()
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
        *(("cache.partial", kind) for kind in ("text", "directory", "pipe", "hard link", "link to a folder")),
    ],
)
def test_what_is_not_ours_refuses_a_build_and_stays(place: str, kind: str, tmp_path: Path) -> None:
    """The error names what is foreign; a finished cache beside it is opened and listed."""
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


# --- builds of the same cache --------------------------------------------------------------------------


def here(source: BrokenImages, path: Path, **options: Any) -> LMDBCache:
    options = {"num_workers": 0, "progress": False, "fingerprint": fingerprint_of(source), **options}
    return build_lmdb(source, path, **options)


def reported(path: Path) -> list[int]:
    """The samples in the report of a cache."""
    lines = path.with_name(f"{path.name}.errors.jsonl").read_text().splitlines()
    return [json.loads(line)["index"] for line in lines]


@pytest.mark.slow
@given(st.integers(1, 9000), st.integers(0, 13), st.sets(st.integers(0, 12)))
@settings(max_examples=30)
def test_any_samples_and_commits_give_the_readable_samples(
    commit_bytes: int, num_samples: int, bad: set[int]
) -> None:
    """Also after a build that ended early."""
    bad = {index for index in bad if index < num_samples}
    options = SKIP
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder, "cache")
        patch.setattr(lmdb_store, "_BATCH_BYTES", commit_bytes)
        if num_samples > 5 and 5 not in bad:
            with pytest.raises(KeyboardInterrupt):
                here(BrokenImages(num_samples, stop=5, bad=bad), path, **options)
        cache = here(BrokenImages(num_samples, bad=bad), path, **options)
        assert [index for index in range(num_samples) if index not in cache] == sorted(bad)
        for index in range(num_samples):
            assert_same_samples(cache.get(index), None if index in bad else BrokenImages().sample(index))
        assert cache.verify() == []
        assert not bad or reported(path) == sorted(bad)
        assert sorted(os.listdir(folder)) == ["cache", "cache.errors.jsonl"][: 1 + bool(bad)]
        cache.close()


@pytest.mark.parametrize("version", [None, "1"])
def test_a_second_build_opens_the_cache(version: Any, tmp_path: Path) -> None:
    """It writes nothing, and reads sample 0 at most, none where the fingerprints are the same."""
    here(BrokenImages(version=version), tmp_path / "cache").close()
    before, again = look(tmp_path), BrokenImages(version=version)
    assert here(again, tmp_path / "cache").num_cached == 20
    assert look(tmp_path) == before
    assert sum(again.reads) == (version is None)


def test_too_many_failures_are_listed(tmp_path: Path) -> None:
    """In the report that the cache would have had, the samples so far; a larger limit is enough."""
    path, bad = tmp_path / "cache", [1, 4, 19]
    with pytest.raises(
        errors.TooManyFailuresError, match=r"2 of 20 .*=0\.01 \(a share; .* allows 1"
    ) as caught:
        here(BrokenImages(bad=bad), path, on_error="skip")
    assert f"listed in {path}.errors.jsonl" in caught.value.__notes__[0]
    assert reported(path) == [1, 4]
    assert here(BrokenImages(bad=bad), path, on_error="skip", max_errors=0.15).num_cached == 17
    assert reported(path) == bad


@pytest.mark.parametrize("call", ["fsync", "fdatasync", "link"])
def test_a_full_disk_is_an_error_whichever_call_meets_it(call: str, tmp_path: Path) -> None:
    """The error says that a file could not be written, and the next build is complete."""
    path = tmp_path / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, refusing(errno.ENOSPC))
        if call == "link":
            patch.setattr(os, "rename", refusing(errno.ENOSPC))
        with pytest.raises(CacheError, match=r"cannot .* the cache .*No space left"):
            here(BrokenImages(bad=[3]), path, **SKIP)
    assert here(BrokenImages(bad=[3]), path, **SKIP).num_cached == 19
    assert sorted(os.listdir(tmp_path)) == ["cache", "cache.errors.jsonl"]


def test_a_file_that_another_build_has_replaced_is_an_error(tmp_path: Path) -> None:
    """Where the file system has no locks, two builds can run at once: the first one fails."""
    partial = tmp_path / "cache.partial"

    def replace() -> None:
        partial.rename(tmp_path / "aside")
        partial.write_bytes(b"")

    with pytest.raises(CacheError, match="another file is in its place"):
        build_lmdb(Calling(4, 1, replace), tmp_path / "cache", num_workers=0)


# --- killed builds -------------------------------------------------------------------------------------


PACKAGE = str(Path(lmdb_store.__file__).parent)
SETTINGS: list[dict[str, Any]] = [{}, SKIP]


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
    monkeypatch.setattr(lmdb_store, "_BATCH_BYTES", 5000)
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
            with contextlib.suppress(CacheError):  # what the system cuts short, LMDB reports
                build(path, settings)

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
    """A builder that is killed is followed at once, and its workers end, in the middle of a sample, too."""
    monkeypatch.setattr(lmdb_store, "_BATCH_BYTES", 5000)
    path, worker = tmp_path / "cache", tmp_path / "worker"

    def kill_builder() -> None:
        worker.write_text(str(os.getpid()))
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()

    dataset = Calling(400, 300, kill_builder)
    assert exit_codes(lambda: build_lmdb(dataset, path, num_workers=1)) == [-signal.SIGKILL]
    pid = int(worker.read_text())
    try:
        build_and_check(path, {}, Images(400))
        assert still_running([pid], 10) == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


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
    (tmp_path / "cache.partial").touch()
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
def test_a_forced_build_replaces_a_cache_alone(tmp_path: Path) -> None:
    """Not the file that another program has put in its place meanwhile."""
    path = tmp_path / "cache"
    build_lmdb(Images(9), path, num_workers=0).close()

    def late() -> None:
        (tmp_path / "mine").write_text("mine")
        (tmp_path / "mine").replace(path)

    with pytest.raises(CacheMismatchError, match="is not a cache of fastload, and was not changed"):
        build_lmdb(Calling(9, 3, late), path, num_workers=0, force=True)
    assert path.read_text() == "mine"


@pytest.mark.usefixtures("needs_lmdb")
def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache is published all the same."""
    monkeypatch.setattr(os, "link", refusing(errno.EPERM))
    assert build_lmdb(Images(3), tmp_path / "cache", num_workers=0).verify() == []
    assert os.listdir(tmp_path) == ["cache"]


@pytest.mark.usefixtures("needs_lmdb")
@pytest.mark.parametrize("key", [None, "photos-v1"])
def test_a_build_does_not_continue_with_samples_of_other_code(key: str | None, tmp_path: Path) -> None:
    """All samples that are read first are compared; what --force builds has none that others stored."""

    def again(*edited: int, stop: int = -1, **options: Any) -> LMDBCache:
        dataset = Edited(20, edited, stop=stop)
        parts = fingerprint_of(dataset, key=key)
        return build_lmdb(dataset, tmp_path / "cache", fingerprint=parts, num_workers=0, **options)

    with pytest.raises(KeyboardInterrupt):
        again(stop=15)
    for number in (10, 19):
        with pytest.raises(CacheMismatchError, match=f"sample {number} of the dataset differs"):
            again(number)
    cache: Any = again(3, force=True)
    assert [cache.get(index)[1] for index in range(20)] == [0, 1, 2, 103, *range(4, 20)]


def interrupt_at_once() -> None:
    """Ctrl-C in a terminal: all processes of its group get the signal."""
    os.killpg(os.getpgid(0), signal.SIGINT)


def _interrupted(path: Path) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        build_lmdb(Calling(400, 150, interrupt_at_once), path, num_workers=2)
    except KeyboardInterrupt as error:
        os._exit(int("run the same build again to continue" not in error.__notes__[0]))


def test_ctrl_c_keeps_what_is_stored(tmp_path: Path, capfd: Any) -> None:
    """Its error says how to continue, no worker prints a traceback, and the next reads only the rest."""
    path, log = tmp_path / "cache", tmp_path / "log"
    assert exit_codes(lambda: _interrupted(path)) == [0]
    assert "Traceback" not in capfd.readouterr().err
    stored = open_store(f"{path}.partial").num_records
    dataset = Images(400, log=log)
    assert build_lmdb(dataset, path, num_workers=2, probed={0: dataset.sample(0)}).verify() == []
    assert sum(dataset.reads) == 400 - stored
