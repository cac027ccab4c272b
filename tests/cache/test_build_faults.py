"""build_lmdb where samples cannot be read, or the system refuses."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import resource
from typing import TYPE_CHECKING, Any

import lmdb
import numpy as np
import pytest

from fastload.cache.build.build import build_lmdb
from fastload.cache.build.writer import writing
from fastload.errors import (
    CacheError,
    CacheMismatchError,
    ErrorBudgetError,
    ImageReadError,
    UnsupportedSampleError,
)
from tests.cache.build_zoo import BrokenImages, Dying, OddError, OddlyBroken, Stopping
from tests.cache.zoo import Images
from tests.kit.batches import assert_same_samples

if TYPE_CHECKING:
    from pathlib import Path


# --- samples that cannot be read -------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shards", [1, 2])
def test_skip_leaves_bad_samples_out(num_workers: int, shards: int, tmp_path: Path) -> None:
    """With on_error="skip" bad samples are missing, and reported: index, path, type, reason, worker."""
    dataset = BrokenImages(12, bad=[0, 5, 6, 11])
    cache = build_lmdb(dataset, tmp_path / "cache", num_workers=num_workers, on_error="skip", shards=shards)
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


def test_cache_without_sample_0_is_opened(tmp_path: Path) -> None:
    """A cache whose sample 0 could not be read is compared by what is there."""
    build_lmdb(BrokenImages(4, bad=[0]), tmp_path / "cache", num_workers=0, on_error="skip")

    assert build_lmdb(BrokenImages(4, bad=[0]), tmp_path / "cache").num_cached == 3
    with pytest.raises(CacheMismatchError, match="number of samples"):
        build_lmdb(BrokenImages(5, bad=[0]), tmp_path / "cache")


def test_old_report_goes(tmp_path: Path) -> None:
    """A build that leaves nothing out removes the report of a cache that was there before."""
    (tmp_path / "cache.errors.jsonl").write_text("old")
    build_lmdb(Images(3), tmp_path / "cache", num_workers=0, on_error="skip")

    assert os.listdir(tmp_path) == ["cache"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_raise_names_the_sample(num_workers: int, tmp_path: Path) -> None:
    """The dataset's own error is raised, with the sample's index; finished shards are kept."""
    dataset = BrokenImages(12, bad=[7])
    with pytest.raises(ImageReadError, match=r"7\.jpg") as caught:
        build_lmdb(dataset, tmp_path / "cache", num_workers=num_workers, shards=3)

    assert "in sample 7 of the dataset" in caught.value.__notes__
    assert os.listdir(tmp_path) == ["cache.partial"]


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
            build_lmdb(Stopping(12, 5), tmp_path / "cache", num_workers=0, on_error="skip", shards=3)
    with pytest.raises(RuntimeError, match="DataLoader worker") as caught:
        build_lmdb(Dying(12), tmp_path / "cache", num_workers=1, on_error="skip")

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


def build_under_limit(path: str, nbytes: int, num_workers: int) -> None:
    """Run in a child: exit with 0 if a file-size limit gives a clear error."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))
    try:
        build_lmdb(Images(40, shape=(64, 64, 3)), path, num_workers=num_workers)
    except CacheError as error:
        said = "\n".join([str(error), *getattr(error, "__notes__", [])])
        is_clear = "cannot write the cache" in said and "`ulimit -f`" in said
        is_kept = os.path.exists(f"{path}.partial/plan.json")
        os._exit(0 if is_clear and ("build again to resume" in said) == is_kept else 2)
    os._exit(1)


@pytest.mark.parametrize(
    ("nbytes", "num_workers"), [(0, 0), (100, 0), (5_000, 0), (100_000, 0), (400_000, 0), (400_000, 2)]
)
def test_file_size_limit(nbytes: int, num_workers: int, tmp_path: Path) -> None:
    """A limit that is met at any time is a clear error, and the build goes on where there is room."""
    child = multiprocessing.get_context("fork").Process(
        target=build_under_limit, args=(str(tmp_path / "cache"), nbytes, num_workers)
    )
    child.start()
    child.join()
    code = child.exitcode
    child.close()

    assert code == 0
    cache = build_lmdb(Images(40, shape=(64, 64, 3)), tmp_path / "cache", num_workers=0)
    assert cache.verify() == []
    assert_same_samples(cache.get(39), Images(40, shape=(64, 64, 3)).sample(39))


@pytest.mark.parametrize("call", ["fsync", "link", "rename", "ftruncate", "makedirs"])
def test_full_disk(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is a clear error whichever call meets it, and the build can be gone on with."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(
            CacheError, match=r"cannot write the cache .*No space left.* free in .* free more space"
        ):
            build_lmdb(Images(6), tmp_path / "cache", num_workers=0)

    assert_same_samples(build_lmdb(Images(6), tmp_path / "cache", num_workers=0).get(5), Images(6).sample(5))
    assert os.listdir(tmp_path) == ["cache"]


def test_read_only_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that may not be written to is a clear error."""
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT:  # root, whom CI may be, could write all the same
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CacheError) as caught:
        build_lmdb(Images(3), tmp_path / "cache", num_workers=0)

    assert str(caught.value) == (
        f"cannot write the cache {tmp_path}/cache: Permission denied: change the permissions of {tmp_path}, "
        "or give another path"
    )


def test_directory_that_is_not_there(tmp_path: Path) -> None:
    """A path below a directory that does not exist is a clear error."""
    with pytest.raises(CacheError) as caught:
        build_lmdb(Images(3), tmp_path / "nowhere" / "cache", num_workers=0)

    assert str(caught.value) == (
        f"cannot write the cache {tmp_path}/nowhere/cache: No such file or directory: "
        f"make the directory {tmp_path}/nowhere first"
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EROFS, os.strerror(errno.EROFS)), "Read-only file system: give a path outside /a/b"),
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


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(("error_budget", "may_fail"), [(2, True), (1, False), (0.2, True), (0.1, False)])
def test_a_build_that_leaves_out_more_than_its_budget_ends(
    error_budget: Any, may_fail: bool, num_workers: int, tmp_path: Path
) -> None:
    """Two of ten samples are bad; with a larger budget the build goes on."""
    dataset = BrokenImages(10, bad=[3, 7])
    options: dict[str, Any] = {"num_workers": num_workers, "on_error": "skip", "progress": False}
    if may_fail:
        cache = build_lmdb(dataset, tmp_path / "cache", error_budget=error_budget, **options)
        assert cache.num_cached == 8
        return
    with pytest.raises(ErrorBudgetError, match=r"2 samples .* allows 1 of 10. The last one is 7"):
        build_lmdb(dataset, tmp_path / "cache", error_budget=error_budget, **options)

    assert os.listdir(tmp_path) == []
    assert build_lmdb(dataset, tmp_path / "cache", **options).num_cached == 8
