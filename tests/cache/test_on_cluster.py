"""The driver of a build on a cluster, with an engine that runs tasks in this process; no Ray."""

from __future__ import annotations

import functools
import json
import logging
import os
import pickle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from fastload.cache import progress
from fastload.cache.build.build import build_lmdb
from fastload.cache.build.on_cluster import MayPassError, Outcome, Task, build_on
from fastload.cache.build.sharded import build_shard
from fastload.errors import (
    CacheError,
    CacheMismatchError,
    ErrorBudgetError,
    ImageReadError,
    RandomDatasetError,
)
from tests.cache.build_zoo import BrokenImages, OddlyBroken
from tests.cache.test_shards import files_at
from tests.cache.zoo import Images, RandomImages

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path


class Engine:
    """Runs tasks here, the last shard first.

    Args:
        num_cpus: Of the cluster.
        before: Called with the shard before each task.
        attempts: How often a task is tried that raises MayPassError.
    """

    def __init__(
        self, num_cpus: int = 2, before: Callable[[int], None] = lambda _: None, attempts: int = 2
    ) -> None:
        self.cpus = num_cpus
        self.before = before
        self.attempts = attempts
        self.ran: list[int] = []
        self.is_ended = False

    def num_cpus(self) -> int:
        return self.cpus

    def run(self, task: Task, shards: Sequence[int]) -> Generator[Outcome, None, None]:
        copy = pickle.loads(pickle.dumps(task))
        try:
            for shard in reversed(shards):
                self.ran.append(shard)
                yield self._run(copy, shard)
        finally:
            self.is_ended = True

    def _run(self, task: Task, shard: int) -> Outcome:
        for attempt in range(self.attempts):
            try:
                self.before(shard)
                outcome: Outcome = pickle.loads(pickle.dumps(task(shard)))
                return outcome
            except MayPassError as error:
                if attempt == self.attempts - 1:
                    return Outcome(shard, "", failure=str(error))
        raise AssertionError(attempt)


def images(num_samples: int = 40, bad: Sequence[int] = ()) -> Callable[[], Any]:
    return functools.partial(BrokenImages, num_samples, bad=bad)


def test_shards_are_built_and_joined(tmp_path: Path) -> None:
    """The number of shards is a few for each CPU; the cache is that of a local build but for its id."""
    engine = Engine(num_cpus=2)
    cache = build_on(engine, images(), tmp_path / "cache", progress=False)
    build_lmdb(Images(40), tmp_path / "twin", shards=8, num_workers=0).close()

    assert sorted(engine.ran) == list(range(8))
    assert engine.is_ended
    assert cache.verify() == []
    assert "from 8 shards" in cache.explain()
    sizes = [
        [len(content) for _, content in sorted(files_at(tmp_path / name).items())]
        for name in ("cache", "twin")
    ]
    assert [abs(a - b) < 9 for a, b in zip(*sizes, strict=True)] == [True] * 8


def test_a_cluster_without_cpus_yet_gets_one_shard(tmp_path: Path) -> None:
    """An autoscaled cluster may start with none."""
    assert build_on(Engine(num_cpus=0), images(), tmp_path / "cache").num_shards == 1


def test_a_large_cluster_gets_shards_that_a_process_can_open(tmp_path: Path) -> None:
    """Each open shard takes two descriptors, of which a process may have 1024."""
    asked: list[int] = []

    class Large(Engine):
        def run(self, task: Task, shards: Sequence[int]) -> Generator[Outcome, None, None]:
            asked.append(len(shards))
            raise KeyboardInterrupt
            yield

    with pytest.raises(KeyboardInterrupt):
        build_on(Large(num_cpus=4096), images(2000), tmp_path / "cache", progress=False)

    assert asked == [128]


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

    task = Task(opened, os.fspath(tmp_path / "cache"), 1, None, None, "raise", 1.0)
    assert task(0).failure is None

    assert set(during) == {os.fspath(tmp_path / "elsewhere")}
    assert os.getcwd() == before


def test_a_finished_cache_is_opened(tmp_path: Path) -> None:
    """No task runs, with any number of shards; another dataset is an error."""
    build_on(Engine(), images(), tmp_path / "cache", shards=3)
    engine = Engine()

    assert "matches the dataset" in build_on(engine, images(), tmp_path / "cache").explain()
    assert engine.ran == []
    with pytest.raises(CacheMismatchError, match="number of samples"):
        build_on(engine, images(41), tmp_path / "cache")


def test_a_driver_that_died_is_followed(tmp_path: Path) -> None:
    """The next one takes the number of shards from the plan, and builds those that are missing."""

    def die(shard: int) -> None:
        if shard == 2:
            raise KeyboardInterrupt

    first = Engine(before=die)
    with pytest.raises(KeyboardInterrupt) as caught:
        build_on(first, images(), tmp_path / "cache", shards=5)
    second = Engine(num_cpus=50)
    cache = build_on(second, images(), tmp_path / "cache")

    assert "build again to build the others" in caught.value.__notes__[-1]
    assert first.is_ended
    assert sorted(second.ran) == [0, 1, 2]
    assert cache.verify() == []


def test_failures_are_told_together_and_the_rest_is_kept(tmp_path: Path) -> None:
    """The error lists shards, machines, reasons and samples; the next run builds only those."""
    with pytest.raises(CacheError) as caught:
        build_on(Engine(), images(40, bad=[7, 33]), tmp_path / "cache", shards=4)
    told = str(caught.value)
    engine = Engine()
    cache = build_on(engine, images(40), tmp_path / "cache")

    host = os.uname().nodename
    assert told.startswith(f"2 of 4 shards were not built: shard 1/4 on {host}: ImageReadError: ")
    assert "; in sample 7 of the dataset; shard 4/4 on " in told
    assert f"Finished shards are kept at {tmp_path}/cache.partial" in told
    assert sorted(engine.ran) == [0, 3]
    assert cache.num_cached == 40


def test_many_failures_are_told_shortly(tmp_path: Path) -> None:
    """Ten are listed."""
    with pytest.raises(CacheError, match=r"^14 of 15 shards .* shard 11/15 on .*; and 4 more\. ") as caught:
        build_on(Engine(), images(30, bad=range(2, 30)), tmp_path / "cache", shards=15)

    assert str(caught.value).count("ImageReadError") == 10


def test_an_error_that_cannot_be_pickled_is_told(tmp_path: Path) -> None:
    """Errors travel as text."""
    with pytest.raises(CacheError, match=r"shard 2/3 on .*: OddError: an odd picture; in sample 7"):
        build_on(Engine(), functools.partial(OddlyBroken, 20), tmp_path / "cache", shards=3)


def test_skipped_samples_are_reported_once(tmp_path: Path) -> None:
    """One report of all shards."""
    cache = build_on(Engine(), images(40, bad=[7, 33]), tmp_path / "cache", on_error="skip")
    lines = (tmp_path / "cache.errors.jsonl").read_text().splitlines()

    assert cache.num_cached == 38
    assert [json.loads(line)["index"] for line in lines] == [7, 33]


@pytest.mark.parametrize("bad", [[7, 33, 38], [37, 38, 39]], ids=["together", "one shard alone"])
def test_the_error_budget_holds_for_the_whole(bad: list[int], tmp_path: Path) -> None:
    """More skipped samples end the build at once; finished shards are kept, and count again later."""
    engine = Engine()
    with pytest.raises(ErrorBudgetError, match=r"3 samples could not be read, .* allows 2 of 40"):
        build_on(engine, images(40, bad=bad), tmp_path / "cache", shards=8, on_error="skip", error_budget=2)

    assert engine.is_ended
    assert len(engine.ran) < 8
    with pytest.raises(ErrorBudgetError, match="allows 2"):
        build_on(Engine(), images(40, bad=bad), tmp_path / "cache", on_error="skip", error_budget=2)
    assert build_on(Engine(), images(40, bad=bad), tmp_path / "cache", on_error="skip").num_cached == 37


def test_shards_that_left_samples_out_fail_without_skip(tmp_path: Path) -> None:
    """A user who asks for all samples does not get a cache without some."""
    build_shard(BrokenImages(40, bad=[3]), tmp_path / "cache", 0, 4, num_workers=0, on_error="skip")

    with pytest.raises(CacheError, match=r"1 of 4 shards .* shard 1/4 .* leaves out 1 samples"):
        build_on(Engine(), images(), tmp_path / "cache")


def test_a_disk_that_is_full_once_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine repeats such a task; if it never passes, the error says so."""
    real = os.link
    refused = []

    def refuse_once(*args: Any, **options: Any) -> None:
        if "00001-of" in str(args[0]) and (not refused or always):
            refused.append(args[0])
            raise OSError(28, os.strerror(28))
        real(*args, **options)

    always = False
    monkeypatch.setattr(os, "link", refuse_once)
    assert build_on(Engine(), images(), tmp_path / "cache", shards=3).verify() == []
    assert len(refused) == 1
    always = True
    with pytest.raises(CacheError, match=r"1 of 3 shards .* shard 2/3: on .*No space left"):
        build_on(Engine(), images(), tmp_path / "other", shards=3)


def test_random_datasets_are_refused(tmp_path: Path) -> None:
    """Before a plan is made."""
    with pytest.raises(RandomDatasetError):
        build_on(Engine(), functools.partial(RandomImages, "numpy"), tmp_path / "cache")

    assert os.listdir(tmp_path) == []


def test_a_build_of_one_process_is_not_taken_over(tmp_path: Path) -> None:
    """The error is that of a single shard."""
    with pytest.raises(ImageReadError, match="broken"):
        build_lmdb(BrokenImages(40, bad=[9]), tmp_path / "cache", num_workers=0)
    with pytest.raises(CacheMismatchError, match="unfinished build by one process"):
        build_on(Engine(), images(), tmp_path / "cache")


def test_progress_counts_finished_shards(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples of an earlier build are counted, and are not part of the rate."""
    build_shard(Images(400), tmp_path / "cache", 1, 4, num_workers=0)
    now_s = [0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    engine = Engine(before=lambda _: now_s.append(now_s.pop() + 20))
    with caplog.at_level(logging.INFO, "fastload"):
        build_on(engine, images(400), tmp_path / "cache")

    lines = [line for line in caplog.messages if line.startswith(f"building {tmp_path}/cache: ")]
    done = [line.removeprefix(f"building {tmp_path}/cache: ").partition(",")[0] for line in lines]
    assert done == [
        "200 of 400 samples: 5 samples/s",  # 100 of them in 20 s
        "300 of 400 samples: 5 samples/s",
        "400 of 400 samples: 5 samples/s",
        "finished: 5 samples/s",
    ]
