"""The driver of a build by the tasks of an executor, which runs them in a thread of this process; no Ray."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from fastload.cache.build.on_executor import Task, TransientTaskError, build_on
from fastload.errors import (
    CacheError,
    RandomDatasetError,
    TooManyFailuresError,
)
from tests.cache.build_zoo import BrokenImages, OddlyBroken
from tests.cache.zoo import Images, RandomImages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future
    from pathlib import Path


class OneByOne(ThreadPoolExecutor):
    """Runs tasks in one thread, as copies that were pickled.

    Args:
        before: Called with the shard before each task.
        attempts: How often a task is tried that raises TransientTaskError.
    """

    def __init__(self, before: Callable[[int], Any] = lambda _: None, attempts: int = 2) -> None:
        super().__init__(1)
        self.before = before
        self.attempts = attempts
        self.ran: list[int] = []
        self.is_ended = threading.Event()

    def submit(self, task: Any, /, *args: Any, **_: Any) -> Future[Any]:
        return super().submit(self._run, pickle.dumps(task), *args)

    def _run(self, task: bytes, shard: int) -> Any:
        self.ran.append(shard)
        for attempt in range(self.attempts):
            try:
                self.before(shard)
                return pickle.loads(pickle.dumps(pickle.loads(task)(shard)))
            except TransientTaskError:
                if attempt == self.attempts - 1:
                    raise
        raise AssertionError(attempt)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.is_ended.set()
        super().shutdown(wait, cancel_futures=cancel_futures)


@pytest.fixture
def executors() -> Iterator[Callable[..., OneByOne]]:
    """Makes executors, and ends their threads."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(OneByOne(*args, **options))


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


def test_a_pool_of_processes_is_an_executor(tmp_path: Path) -> None:
    """The build needs no cluster."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(2, context) as executor:
        cache = build_on(executor, images(), tmp_path / "cache", num_cpus=2)

    assert (cache.num_shards, cache.verify()) == (8, [])


def test_a_large_cluster_gets_shards_that_a_process_can_open(
    tmp_path: Path,
) -> None:
    """Each open shard takes two descriptors, of which a process may have 1024."""
    submitted = []

    class Counting(OneByOne):
        def submit(self, task: Any, /, *_: Any, **__: Any) -> Future[Any]:
            submitted.append(task.num_shards)
            raise KeyboardInterrupt

    with Counting() as executor, pytest.raises(KeyboardInterrupt):
        build_on(executor, images(2000), tmp_path / "cache", num_cpus=4096, progress=False)

    assert submitted == [128]


def test_a_task_leaves_its_process_in_the_directory_it_found(tmp_path: Path) -> None:
    """A worker of a cluster runs other tasks later; the dataset keeps its directory while it is read."""
    (tmp_path / "elsewhere").mkdir()
    before, during = os.getcwd(), []

    class Elsewhere(Images):
        def sample(self, index: int) -> Any:
            during.append(os.getcwd())
            return super().sample(index)

    def opened() -> Any:
        os.chdir(tmp_path / "elsewhere")
        return Elsewhere(8)

    settings = {"codec": None, "quality": None, "on_error": "raise"}
    assert not isinstance(Task(opened, os.fspath(tmp_path / "cache"), 1, settings)(0), str)

    assert set(during) == {os.fspath(tmp_path / "elsewhere")}
    assert os.getcwd() == before


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


def test_failures_are_told_together_and_the_rest_is_kept(
    executors: Callable[..., OneByOne], tmp_path: Path
) -> None:
    """The error lists shards, machines, reasons and samples; the next run builds only those."""
    with pytest.raises(CacheError) as caught:
        build_on(executors(), images(40, bad=[7, 33]), tmp_path / "cache", num_cpus=2, shards=4)
    told = str(caught.value)
    executor = executors()
    cache = build_on(executor, images(40), tmp_path / "cache", num_cpus=2)

    host = os.uname().nodename
    assert told.startswith(f"2 of 4 shards were not built: shard 1/4 on {host}: ImageReadError: ")
    assert "; in sample 7 of the dataset; shard 4/4 on " in told
    assert f"Finished shards are kept at {tmp_path}/cache.partial" in caught.value.__notes__[-1]
    assert sorted(executor.ran) == [0, 3]
    assert cache.num_cached == 40


def test_many_failures_are_told_shortly_and_as_text(
    executors: Callable[..., OneByOne], tmp_path: Path
) -> None:
    """Ten are listed; an error that cannot be pickled is told, too."""
    with pytest.raises(CacheError, match=r"^14 of 15 shards .* shard 11/15 on .*; and 4 more\. ") as caught:
        build_on(executors(), images(30, bad=range(2, 30)), tmp_path / "cache", num_cpus=2, shards=15)
    assert str(caught.value).count("ImageReadError") == 10
    with pytest.raises(CacheError, match=r"shard 2/3 on .*: OddError: an odd picture; in sample 7"):
        build_on(executors(), functools.partial(OddlyBroken, 20), tmp_path / "other", num_cpus=2, shards=3)


@pytest.mark.parametrize("bad", [[2, 13, 23], [7, 8, 9]], ids=["together", "one shard alone"])
def test_a_build_above_max_errors_ends_at_once(
    executors: Callable[..., OneByOne], bad: list[int], tmp_path: Path
) -> None:
    """The other tasks are cancelled; finished shards are kept, and count again later."""
    executor = executors(before=lambda shard: shard == 6 and executor.is_ended.wait(100))
    options: dict[str, Any] = {"num_cpus": 2, "on_error": "skip"}
    few = {**options, "max_errors": 2}
    for runner, shards in ((executor, 8), (executors(), None)):
        with pytest.raises(TooManyFailuresError, match=r"3 samples could not be read, .* allows 2 of 40"):
            build_on(runner, images(40, bad=bad), tmp_path / "cache", shards=shards, **few)

    assert executor.is_ended.is_set()
    assert executor.ran[6:] in ([], [6])  # the rest was cancelled
    assert (
        build_on(executors(), images(40, bad=bad), tmp_path / "cache", max_errors=3, **options).num_cached
        == 37
    )


def test_a_disk_that_is_full_once_is_tried_again(
    executors: Callable[..., OneByOne], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor repeats such a task; if it never passes, the error says so."""
    real = os.rename
    refused = []

    def refuse_once(*args: Any, **options: Any) -> None:
        if "00001-of" in str(args[1]) and (not refused or always):
            refused.append(args[0])
            raise OSError(28, os.strerror(28))
        real(*args, **options)

    always = False
    monkeypatch.setattr(os, "rename", refuse_once)
    assert build_on(executors(), images(), tmp_path / "cache", num_cpus=2, shards=3).verify() == []
    assert len(refused) == 1
    always = True
    with pytest.raises(CacheError, match=r"1 of 3 shards .* shard 2/3 on .*No space left"):
        build_on(executors(), images(), tmp_path / "other", num_cpus=2, shards=3)


def test_random_datasets_are_refused(executors: Callable[..., OneByOne], tmp_path: Path) -> None:
    """Before a plan is made."""
    with pytest.raises(RandomDatasetError):
        build_on(executors(), functools.partial(RandomImages, "numpy"), tmp_path / "cache", num_cpus=2)

    assert os.listdir(tmp_path) == []
