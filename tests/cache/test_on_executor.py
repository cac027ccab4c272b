"""Unfinished builds, and shards that tasks of an executor build."""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from fastload import errors
from fastload.cache.build import inventory
from fastload.cache.build.build import build_lmdb
from fastload.cache.build.on_executor import Task, TransientTaskError, build_on
from fastload.cache.format.fingerprint import fingerprint_of
from fastload.errors import CacheBusyError, CacheError, TooManyFailuresError
from fastload.system import locks
from tests.cache.build_zoo import BrokenImages, Calling, die, exit_codes, odd, refusing
from tests.cache.zoo import Everything, Images, RandomImages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future
    from pathlib import Path


def files_at(path: Path) -> dict[str, bytes]:
    """The content of all files of a cache."""
    if path.is_file():
        return {"": path.read_bytes()}
    return {one.name: one.read_bytes() for one in path.iterdir()}


def stop(path: Path, *, shards: int = 4) -> None:
    """Leave an unfinished build of 20 images: without the shards from that of image 11."""
    with pytest.raises(KeyboardInterrupt):
        build_lmdb(BrokenImages(20, stop=11), path, shards=shards, num_workers=0)


def test_lists_tell_how_many_shards_are_missing(tmp_path: Path) -> None:
    """A build that was killed before it had a plan was interrupted."""
    (tmp_path / "other.partial").mkdir()
    stop(tmp_path / "cache")
    found = inventory.list_caches(str(tmp_path))
    assert [one.state for one in found] == ["unfinished"] * 2
    states = ("2 of 4 shards are missing", "it was interrupted")
    assert [one.problem for one in found] == [f"{state}: run the build again to continue" for state in states]


@pytest.mark.parametrize("way", ["here", "by tasks"])
def test_a_cache_that_is_being_built_is_neither_built_nor_removed(
    way: str, executors: Callable[..., OneByOne], tmp_path: Path
) -> None:
    """A second builder and `rm` are told, and the first builder finishes."""
    path, said = tmp_path / "cache", []

    def meanwhile() -> None:
        for attempt in (
            lambda: build_lmdb(Images(20), path, num_workers=0),
            lambda: build_on(executors(), images(20), path, num_cpus=1),
            lambda: inventory.remove(str(path)),
        ):
            with pytest.raises(CacheBusyError, match=r"cache is being built by another thread"):
                attempt()
        said.extend(item.state for item in inventory.list_caches(str(tmp_path)))

    if way == "here":
        build_lmdb(Calling(20, 14, meanwhile), path, num_workers=0, shards=2).close()
    else:
        executor = executors(before=lambda shard: shard == 1 and meanwhile())
        build_on(executor, images(20), path, num_cpus=1, shards=2).close()
    assert said == ["building"]
    assert os.listdir(tmp_path) == ["cache"]


@pytest.mark.parametrize("replaces", [False, True])
def test_a_directory_that_is_removed_meanwhile_is_an_error(replaces: bool, tmp_path: Path) -> None:
    """Files that came to the same place are not touched."""
    path, partial, found = tmp_path / "cache", tmp_path / "cache.partial", []

    def remove() -> None:
        shutil.rmtree(partial)
        if replaces:
            partial.mkdir()
            (partial / "00000-of-00002.lmdb").write_text("another")
            found.append(files_at(partial))

    with pytest.raises(CacheError, match="cannot write the cache"):
        build_lmdb(Calling(20, 14, remove), path, num_workers=0, shards=2)
    assert [files_at(partial) for _ in found] == found


@pytest.mark.parametrize("way", ["build", "rm"])
def test_leftovers_of_a_killed_process_go(way: str, tmp_path: Path) -> None:
    """With the next build, and with rm; the shard is built from its start."""
    pytest.importorskip("lmdb")
    path = tmp_path / "cache"
    killed = functools.partial(build_lmdb, Calling(20, 14, die), path, num_workers=0, shards=2)
    assert exit_codes(killed) == [-signal.SIGKILL]
    (leftover,) = [name for name in os.listdir(f"{path}.partial") if name.startswith(".")]
    assert leftover.startswith(".00001-of-00002.lmdb.")
    if way == "rm":
        inventory.remove(str(path))
        assert os.listdir(tmp_path) == []
        return
    again = Images(20)
    assert build_lmdb(again, path, num_workers=0).verify() == []
    assert again.reads[1:10] == [0] * 9
    assert sorted(os.listdir(path)) == ["00000-of-00002.lmdb", "00001-of-00002.lmdb"]


@pytest.mark.parametrize("name", ["notes.txt", ".00000-of-00002.lmdb.swp", "00000-of-00002.errors.txt"])
def test_foreign_files_stay(name: str, tmp_path: Path) -> None:
    """A build and rm refuse a directory with a file of another program."""
    path = tmp_path / "cache"
    stop(path)
    (tmp_path / "cache.partial" / name).write_text("mine")
    before = files_at(tmp_path / "cache.partial")
    for attempt in (lambda: build_lmdb(Images(20), path, num_workers=0), lambda: inventory.remove(str(path))):
        with pytest.raises(CacheError, match=r"cache\.partial"):
            attempt()
    assert files_at(tmp_path / "cache.partial") == before


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    """A cache is built, resumed and removed all the same."""
    monkeypatch.setattr(locks.fcntl, "flock", refusing(errno.ENOSYS))
    stop(tmp_path / "cache")
    with caplog.at_level(logging.INFO, "fastload"):
        assert build_lmdb(Images(20), tmp_path / "cache", num_workers=0).verify() == []
    assert "not locked, because" in caplog.text
    assert os.listdir(tmp_path) == ["cache"]
    inventory.remove(str(tmp_path / "cache"))
    assert os.listdir(tmp_path) == []


# --- tasks of an executor; no Ray ------------------------------------------------------------------------


class OneByOne(ThreadPoolExecutor):
    """Runs tasks in one thread, as pickled copies, after `before`; tries a transient failure once again."""

    def __init__(self, before: Callable[[int], Any] = lambda _: None) -> None:
        super().__init__(1)
        self.before = before
        self.ran: list[int] = []
        self.is_ended = threading.Event()

    def submit(self, task: Any, /, *args: Any, **_: Any) -> Future[Any]:
        return super().submit(self._run, pickle.dumps(task), *args)

    def _run(self, task: bytes, shard: int) -> Any:
        self.ran.append(shard)
        self.before(shard)
        with contextlib.suppress(TransientTaskError):
            return pickle.loads(pickle.dumps(pickle.loads(task)(shard)))
        return pickle.loads(task)(shard)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.is_ended.set()
        super().shutdown(wait, cancel_futures=cancel_futures)


@pytest.fixture
def executors() -> Iterator[Callable[..., OneByOne]]:
    """Makes executors, and ends their threads."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(OneByOne(**options))


def images(num_samples: int = 40, bad: Sequence[int] = ()) -> Callable[[], Any]:
    return functools.partial(BrokenImages, num_samples, bad=bad)


@pytest.mark.parametrize(
    ("dataset", "shards", "options"),
    [
        (Images(30), 4, {}),
        (Everything(30), 4, {}),
        (BrokenImages(30, bad=[3, 8, 29], version="1"), 4, {"on_error": "skip", "max_errors": 1.0}),
        (Images(30), 1, {}),
        (Images(3), 8, {}),
    ],
)
def test_the_cache_is_that_of_a_local_build(
    dataset: Any, shards: int, options: Any, executors: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte; one shard is a file, and a shard has at least one sample."""
    monkeypatch.setattr(os, "urandom", bytes)  # else no two builds have the same id
    monkeypatch.setattr(time, "time", lambda: 1e9)
    opened = functools.partial(copy.copy, dataset)
    cache = build_on(executors(), opened, tmp_path / "cache", num_cpus=1, shards=shards, **options)
    known = fingerprint_of(dataset)
    twin = build_lmdb(dataset, tmp_path / "twin", shards=shards, num_workers=0, fingerprint=known, **options)
    assert files_at(tmp_path / "cache") == files_at(tmp_path / "twin")
    assert (cache.description.num_shards, cache.verify()) == (min(shards, len(dataset)), [])
    assert twin.description.parts == cache.description.parts
    assert {"cache", "twin", "cache.errors.jsonl", "twin.errors.jsonl"} >= set(os.listdir(tmp_path))


def test_shards_are_built_by_tasks(executors: Callable[..., OneByOne], tmp_path: Path) -> None:
    """A few for each CPU, and one where an autoscaled cluster has none yet; the executor is not ended."""
    executor = executors()
    cache = build_on(executor, images(), tmp_path / "cache", num_cpus=2, progress=False)
    assert executor.ran == list(range(8))
    assert not executor.is_ended.is_set()
    assert cache.description.num_shards == 8
    assert build_on(executors(), images(), tmp_path / "other", num_cpus=0).description.num_shards == 1
    again = executors()
    assert "match the dataset" in build_on(again, images(), tmp_path / "cache", num_cpus=3).explain()
    assert again.ran == []
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:  # it needs no cluster
        assert build_on(pool, images(), tmp_path / "third", num_cpus=2).verify() == []


def test_a_task_leaves_its_process_in_the_directory_it_found(tmp_path: Path) -> None:
    """A worker of a cluster runs other tasks later; the dataset keeps its directory while it is read."""
    before, during = os.getcwd(), []

    def opened() -> Any:
        os.chdir(tmp_path)
        return Calling(20, 13, lambda: during.append(os.getcwd()))

    settings = {"on_error": "raise"}
    stop(tmp_path / "cache", shards=2)
    assert not isinstance(Task(opened, os.fspath(tmp_path / "cache"), settings)(1), str)
    assert (during, os.getcwd()) == ([os.fspath(tmp_path)], before)


def test_random_samples_are_refused_before_a_plan_is_made(executors: Any, tmp_path: Path) -> None:
    """Tasks would read other samples than the driver."""
    with pytest.raises(errors.NondeterministicDatasetError):
        build_on(executors(), functools.partial(RandomImages, "numpy"), tmp_path / "cache", num_cpus=2)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("state", ["another dataset", "removed"])
def test_a_task_that_cannot_follow_the_plan_fails(state: str, tmp_path: Path) -> None:
    """Its machine sees other files than the driver, or the build was removed; nothing is written."""
    path = tmp_path / "cache"
    stop(path)
    if state == "removed":
        inventory.remove(str(path))
    before = sorted(tmp_path.rglob("*"))
    task = Task(images(21), os.fspath(path), {"on_error": "raise"})
    if state == "removed":
        with pytest.raises(TransientTaskError, match="was removed while the cache was built"):
            task(3)
    else:
        assert "number of samples is 21 here and 20 there" in str(task(3))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_driver_that_died_is_followed(executors: Callable[..., OneByOne], tmp_path: Path) -> None:
    """The next one takes the number of shards from the plan, and builds those that are missing."""

    def die(shard: int) -> None:
        if shard == 2:
            raise KeyboardInterrupt
        if shard == 3:
            first.is_ended.wait(100)

    first = executors(before=die)
    with pytest.raises(KeyboardInterrupt) as caught:
        build_on(first, images(), tmp_path / "cache", num_cpus=2, shards=5)
    second = executors()
    cache = build_on(second, images(), tmp_path / "cache", num_cpus=2)

    assert "build again to resume" in caught.value.__notes__[-1]
    assert first.is_ended.is_set()
    assert second.ran in ([2, 3, 4], [2, 4])  # the task in progress may have finished
    assert cache.verify() == []


def test_failures_are_told_together_and_the_rest_is_kept(executors: Any, tmp_path: Path) -> None:
    """The error lists ten shards, with machines, reasons and samples; the next run builds only those."""
    with pytest.raises(CacheError) as caught:
        build_on(executors(), images(40, bad=[7, 33]), tmp_path / "cache", num_cpus=2, shards=4)
    told = str(caught.value)
    assert told.startswith(
        f"2 of 4 shards were not built: shard 1/4 on {os.uname().nodename}: ImageReadError: "
    )
    assert "; in sample 7 of the dataset, 7.jpg; shard 4/4 on " in told
    assert f"Finished shards are kept at {tmp_path}/cache.partial" in caught.value.__notes__[-1]
    executor = executors()
    assert build_on(executor, images(40), tmp_path / "cache", num_cpus=2).num_cached == 40
    assert sorted(executor.ran) == [0, 3]

    with pytest.raises(CacheError, match=r"^14 of 15 shards .* shard 11/15 on .*; and 4 more\. ") as caught:
        build_on(executors(), images(30, bad=range(2, 30)), tmp_path / "many", num_cpus=2, shards=15)
    assert str(caught.value).count("ImageReadError") == 10
    dead = executors(before=lambda shard: 1 / 0)
    # Each open shard takes two descriptors, of which a process may have 1024.
    with pytest.raises(CacheError, match=r"^128 of 128 shards .* shard 1/128 failed: ZeroDivisionError"):
        build_on(dead, images(2000), tmp_path / "large", num_cpus=4096, progress=False)
    strange = functools.partial(Calling, 20, 7, odd)  # whose error cannot be pickled
    with pytest.raises(CacheError, match=r"shard 2/3 on .*: OddError: an odd picture; in sample 7"):
        build_on(executors(), strange, tmp_path / "odd", num_cpus=2, shards=3)


@pytest.mark.parametrize("bad", [[2, 13, 23], [7, 8, 9]], ids=["together", "one shard alone"])
def test_a_build_above_max_errors_ends_at_once(executors: Any, bad: list[int], tmp_path: Path) -> None:
    """The other tasks are cancelled; finished shards are kept, and count again later."""
    executor = executors(before=lambda shard: shard == 6 and executor.is_ended.wait(100))
    path, options = tmp_path / "cache", {"num_cpus": 2, "on_error": "skip"}
    for runner, shards in ((executor, 8), (executors(), None)):
        with pytest.raises(TooManyFailuresError, match=r"3 of 40 samples could not be read, .* allows 2"):
            build_on(runner, images(40, bad=bad), path, shards=shards, max_errors=2, **options)
    assert executor.is_ended.is_set()
    assert executor.ran[6:] in ([], [6])  # the rest was cancelled
    assert build_on(executors(), images(40, bad=bad), path, max_errors=3, **options).num_cached == 37


def test_a_disk_that_is_full_once_is_tried_again(executors: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """The executor repeats such a task; if it never passes, the error says so."""
    real, left = os.rename, [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]

    def refuse(*args: Any) -> None:
        if "00001-of" in str(args[1]) and left:
            raise left.pop()
        real(*args)

    monkeypatch.setattr(os, "rename", refuse)
    assert build_on(executors(), images(), tmp_path / "cache", num_cpus=2, shards=3).verify() == []
    assert left == []
    left += [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) for _ in range(9)]
    with pytest.raises(CacheError, match=r"1 of 3 shards .* shard 2/3 on .*No space left"):
        build_on(executors(), images(), tmp_path / "other", num_cpus=2, shards=3)
