"""Shards that single processes or tasks of an executor build, and the cache that is joined from them."""

from __future__ import annotations

import contextlib
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
from fastload.cache.build.build import build_lmdb, build_shard, join
from fastload.cache.build.on_executor import Task, TransientTaskError, build_on
from fastload.cache.fingerprint import Fingerprint
from fastload.errors import CacheBusyError, CacheError, CacheMismatchError, TooManyFailuresError
from fastload.system import locks
from tests.cache.build_zoo import BrokenImages, Calling, die, exit_codes, odd, refusing
from tests.cache.zoo import Everything, Images, RandomImages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from fastload.cache.build.build import BuiltShard


def shard_of(dataset: Any, path: Any, shard: int, num_shards: int, **options: Any) -> BuiltShard:
    return build_shard(dataset, path, shard, num_shards, num_workers=0, progress=False, **options)


def files_at(path: Path) -> dict[str, bytes]:
    """The content of all files of a cache."""
    if path.is_file():
        return {"": path.read_bytes()}
    return {one.name: one.read_bytes() for one in path.iterdir()}


def own_files(path: Path) -> list[str]:
    """The names in PATH.partial that a process gives to files that it is writing."""
    return sorted(name for name in os.listdir(f"{path}.partial") if name.startswith("."))


@pytest.mark.parametrize(
    ("kind", "num_shards", "options"),
    [
        (Images, 4, {}),
        (Everything, 4, {"codec": "jpeg", "quality": 80}),
        (BrokenImages, 4, {"on_error": "skip", "max_errors": 1.0}),
        (Images, 1, {}),
    ],
)
def test_a_joined_cache_is_that_of_a_local_build(
    kind: Any, num_shards: int, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte, whoever builds which shard in which order; one shard is a file."""
    monkeypatch.setattr(os, "urandom", bytes)  # else no two builds have the same id
    monkeypatch.setattr(time, "time", lambda: 1e9)
    dataset = BrokenImages(30, bad=[3, 8, 29]) if kind is BrokenImages else kind(30)
    options = {"fingerprint": Fingerprint({"files": "a"}), **options}
    for shard in reversed(range(num_shards)):
        num_workers = 1 if shard == 3 and kind is Images else 0
        build_shard(dataset, tmp_path / "cache", shard, num_shards, num_workers=num_workers, **options)
    build_lmdb(dataset, tmp_path / "twin", shards=num_shards, num_workers=0, **options).close()
    cache = join(tmp_path / "cache")
    assert files_at(tmp_path / "cache") == files_at(tmp_path / "twin")
    assert (cache.num_shards, cache.parts, cache.verify()) == (num_shards, {"files": "a"}, [])
    assert {"cache", "twin", "cache.errors.jsonl", "twin.errors.jsonl"} >= set(os.listdir(tmp_path))


def test_building_and_joining_twice_is_harmless(tmp_path: Path) -> None:
    """Three samples make three shards, whatever number was asked for; a second call builds or joins none."""
    path = tmp_path / "cache"
    built = [shard_of(Images(3), path, shard, 8) for shard in [*range(8), 1]]
    assert [one.num_samples for one in built] == [1, 1, 1, 0, 0, 0, 0, 0, 1]
    assert [one.was_built for one in built] == [True] * 3 + [False] * 6
    assert built[8].nbytes == built[1].nbytes > 0
    assert join(path).num_shards == 3
    before = files_at(path)
    assert "joined before" in join(path).explain()
    assert shard_of(Images(3), path, 2, 3).is_joined
    assert (files_at(path), os.listdir(tmp_path)) == (before, ["cache"])
    with pytest.raises(CacheMismatchError, match="number of samples"):
        shard_of(Images(21), path, 2, 3)


def test_join_and_lists_name_what_is_missing(tmp_path: Path) -> None:
    """Ten shards at most, by the numbers of `build-shard`, the first in a command; everything is kept."""
    path = tmp_path / "cache"
    (tmp_path / "cache.partial").mkdir()
    with pytest.raises(FileNotFoundError, match="neither a cache nor a shard"):
        join(path)
    for shard in (0, 1, 3, 4, 5):
        shard_of(Images(20), path, shard, 7)
    with pytest.raises(ValueError, match="max_errors"):
        join(path, max_errors=-1)
    for problem in ("2 of 7 shards are missing: run the build", "all 7 shards are built: run 'fastload"):
        (found,) = inventory.list_caches(str(tmp_path))
        assert found.state == "unfinished"
        assert (found.problem or "").startswith(problem)
        for shard in (2, 6):
            shard_of(Images(20), path, shard, 7)
    assert join(path).verify() == []
    shard_of(Images(500), tmp_path / "other", 4, 500)
    command = f"'fastload cache build-shard SOURCE {tmp_path}/other 1/500', then join again"
    with pytest.raises(CacheError, match=rf"^499 of 500 shards are .*: 1, .*, \.\.\.\. Build.*{command}"):
        join(tmp_path / "other")


def test_a_shard_above_max_errors_ends_early(tmp_path: Path) -> None:
    """It is not finished; it is built again with a larger `max_errors`."""
    dataset = BrokenImages(40, bad=[21, 23, 25])
    with pytest.raises(TooManyFailuresError, match=r"2 samples .* allows 1 of 40.* build again to resume"):
        shard_of(dataset, tmp_path / "cache", 1, 2, max_errors=1, on_error="skip")
    assert shard_of(dataset, tmp_path / "cache", 1, 2, max_errors=3, on_error="skip").num_left_out == 3


def test_what_no_shard_is_built_of(executors: Callable[..., OneByOne], tmp_path: Path) -> None:
    """Numbers out of range, which the error states; random samples, before a plan is made."""
    wrong: list[Any] = [*((0, number, "shards should be an int from 1") for number in (0, True, "4"))]
    wrong += [(shard, 4, "shard should be an int from 0 to 3") for shard in (-1, 4, True, "1")]
    for shard, num_shards, said in wrong:
        with pytest.raises(ValueError, match=said):
            build_shard(Images(4), tmp_path / "cache", shard, num_shards)
    with pytest.raises(errors.RandomDatasetError):
        build_on(executors(), functools.partial(RandomImages, "numpy"), tmp_path / "cache", num_cpus=2)
    assert os.listdir(tmp_path) == []


def test_a_shard_that_is_being_built_is_neither_built_nor_removed(tmp_path: Path) -> None:
    """A second builder and `rm` are told, and the first builder finishes."""
    path, said = tmp_path / "cache", []

    def meanwhile() -> None:
        with pytest.raises(CacheBusyError, match=r"00001-of-00002\.lmdb is being built by another thread"):
            shard_of(Images(20), path, 1, 2)
        said.extend(one.state for one in inventory.list_caches(str(tmp_path)))
        with pytest.raises(CacheBusyError, match=r"shards of .* are being built"):
            inventory.remove(str(path))

    assert shard_of(Calling(20, 14, meanwhile), path, 1, 2).was_built
    assert said == ["building"]
    assert sorted(os.listdir(tmp_path / "cache.partial")) == ["00001-of-00002.lmdb", "plan.json"]


@pytest.mark.parametrize("instead", [0, 1])
def test_a_directory_that_is_removed_meanwhile_is_an_error(instead: int, tmp_path: Path) -> None:
    """The error says what happened, and files of another build at the same place are not touched."""
    path, partial, found = tmp_path / "cache", tmp_path / "cache.partial", []

    def remove() -> None:
        shutil.rmtree(partial)
        for shard in range(instead):
            shard_of(Images(30), path, shard, 3)
            found.append(files_at(partial))

    with pytest.raises(CacheError, match=r"was removed while a shard was built in it"):
        shard_of(Calling(20, 14, remove), path, 1, 2)
    assert [files_at(partial) for _ in range(instead)] == found


@pytest.mark.usefixtures("needs_lmdb")
def test_processes_that_begin_at_once_agree_on_one_plan(tmp_path: Path) -> None:
    """Three processes, released by one event; their shards have one id."""
    barrier = multiprocessing.get_context("fork").Barrier(3)

    def build(shard: int) -> None:
        barrier.wait()
        shard_of(Images(24), tmp_path / "cache", shard, 3)

    assert exit_codes(*(functools.partial(build, shard) for shard in range(3))) == [0] * 3
    assert own_files(tmp_path / "cache") == []
    assert join(tmp_path / "cache").verify() == []


@pytest.mark.parametrize("way", ["build and join", "rm"])
def test_leftovers_of_a_killed_process_go(way: str, tmp_path: Path) -> None:
    """With the next build of the same shard, with join, and with rm; the shard is built from its start."""
    pytest.importorskip("lmdb")
    path = tmp_path / "cache"
    assert exit_codes(lambda: shard_of(Calling(20, 14, die), path, 1, 2)) == [-signal.SIGKILL]
    (leftover,) = [path.with_name("cache.partial") / name for name in own_files(path) if "-lock" not in name]
    if way == "rm":
        inventory.remove(str(path))
        assert os.listdir(tmp_path) == []
        return
    shard_of(Images(20), path, 0, 2)
    assert leftover.exists()
    content = leftover.read_bytes()
    shard_of(Images(20), path, 1, 2)
    assert not leftover.exists()
    # As if the process had been killed on another machine, or were alive there.
    leftover.with_name(f".00001-of-00002.lmdb.elsewhere.{'0' * 16}").write_bytes(content)
    shard_of(Images(20), path, 1, 2)
    assert len(own_files(path)) == 1
    assert join(path).verify() == []
    assert sorted(os.listdir(path)) == ["00000-of-00002.lmdb", "00001-of-00002.lmdb"]


@pytest.mark.parametrize("name", ["notes.txt", ".00000-of-00002.lmdb.swp", "00000-of-00002.errors.txt"])
def test_foreign_files_stay(name: str, tmp_path: Path) -> None:
    """A build of a shard, join and rm refuse a directory with a file of another program."""
    path = tmp_path / "cache"
    shard_of(Images(4), path, 0, 2)
    (tmp_path / "cache.partial" / name).write_text("mine")
    before = files_at(tmp_path / "cache.partial")
    refused = lambda: shard_of(Images(4), path, 1, 2), lambda: join(path), lambda: inventory.remove(str(path))
    for attempt in refused:
        with pytest.raises(CacheError, match=r"cache\.partial"):
            attempt()
    assert files_at(tmp_path / "cache.partial") == before


def test_a_file_system_without_locks_and_hard_links(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    """The plan gets its name in another way, and shards are built and joined all the same."""
    monkeypatch.setattr(locks.fcntl, "lockf", refusing(errno.ENOSYS))
    monkeypatch.setattr(os, "link", refusing(errno.ENOSYS))
    for shard in range(2):
        shard_of(Images(6), tmp_path / "cache", shard, 2)
    with caplog.at_level(logging.INFO, "fastload"):
        assert join(tmp_path / "cache").verify() == []
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


def test_shards_are_built_and_joined(executors: Callable[..., OneByOne], tmp_path: Path) -> None:
    """A few for each CPU, and one where an autoscaled cluster has none yet; the executor is not ended."""
    executor = executors()
    cache = build_on(executor, images(), tmp_path / "cache", num_cpus=2, progress=False)
    assert executor.ran == list(range(8))
    assert not executor.is_ended.is_set()
    assert "from 8 shards" in cache.explain()
    assert build_on(executors(), images(), tmp_path / "other", num_cpus=0).num_shards == 1
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
        return Calling(8, 3, lambda: during.append(os.getcwd()))

    settings = {"codec": None, "quality": None, "on_error": "raise"}
    assert not isinstance(Task(opened, os.fspath(tmp_path / "cache"), 1, settings)(0), str)
    assert (during, os.getcwd()) == ([os.fspath(tmp_path)], before)


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
    assert "; in sample 7 of the dataset; shard 4/4 on " in told
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
        with pytest.raises(TooManyFailuresError, match=r"3 samples could not be read, .* allows 2 of 40"):
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
