"""Builds that are killed at any point, or stopped, and gone on with."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from fastload.cache.build import writer as lmdb_writer
from fastload.cache.build.build import build_lmdb
from fastload.errors import CacheError, ImageReadError
from tests.cache.build_zoo import BrokenImages, Stopping, exit_codes
from tests.cache.zoo import Images, RaggedImages
from tests.kit.batches import assert_same_samples

if TYPE_CHECKING:
    from collections.abc import Mapping

PACKAGE = str(Path(lmdb_writer.__file__).parent)
SETTINGS: list[dict[str, Any]] = [
    {},
    {"shards": 3},
    {"on_error": "skip"},
    {"on_error": "skip", "shards": 4, "codec": "png"},
]


def dataset_for(settings: Mapping[str, Any]) -> Images:
    """Ragged images, or some that cannot be read where these are left out."""
    return BrokenImages(24, bad=[3, 4, 11, 23]) if "on_error" in settings else RaggedImages(24)


def build(dataset: Images, path: Path, settings: Mapping[str, Any]) -> Any:
    """In this process, so that there is one to kill."""
    return build_lmdb(dataset, path, num_workers=0, progress=False, **settings)


def check(dataset: Images, cache: Any) -> None:
    """The cache equals its source."""
    assert cache.verify() == []
    for index in range(len(dataset)):
        try:
            expected = dataset.sample(index)
        except ImageReadError:
            expected = None
        assert_same_samples(cache.get(index), expected)


class Countdown:
    """Kills its process just before a certain call that the cache's code makes to the system or to C.

    Args:
        calls: Number of calls that are let through.
    """

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.calls -= 1
            if self.calls < 0:
                os.kill(os.getpid(), signal.SIGKILL)


def count_calls(path: Path, settings: Mapping[str, Any]) -> int:
    """How many such calls a whole build makes, once what is computed once is there."""
    build(dataset_for(settings), path.with_name("warm"), settings)
    counter = Countdown(1 << 40)
    sys.setprofile(counter)
    try:
        build(dataset_for(settings), path, settings)
    finally:
        sys.setprofile(None)
    return (1 << 40) - counter.calls


cases = pytest.mark.parametrize(
    ("number", "seed"),
    [
        pytest.param(number, seed, marks=[pytest.mark.slow, *([pytest.mark.thorough] if seed else [])])
        for seed in range(4)
        for number in range(len(SETTINGS))
    ],
)


@cases
def test_killed_at_random_points(
    number: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before any of its calls, a build leaves what the next completes."""
    monkeypatch.setattr(lmdb_writer, "_COMMIT_BYTES", 5000)
    settings = SETTINGS[number]
    total = count_calls(tmp_path / "counted", settings)
    chance = random.Random(10 * number + seed)
    for turn in range(6):
        path = tmp_path / f"cache{turn}"
        # Now and then right at the end, where files are renamed and removed.
        at = total - chance.randrange(5, 60) if turn % 3 == 0 else chance.randrange(total)

        def builder(path: Path = path, at: int = at) -> None:
            sys.setprofile(Countdown(at))
            build(dataset_for(settings), path, settings)

        assert exit_codes(builder) == [-signal.SIGKILL], f"turn {turn}, call {at} of {total}"
        dataset = dataset_for(settings)
        check(dataset, build(dataset, path, settings))
        # Killed at its very end, a build leaves small files that are in nobody's way.
        left = {name for name in os.listdir(tmp_path) if f"cache{turn}" in name}
        known = {f"cache{turn}", f"cache{turn}.errors.jsonl", f".cache{turn}.fastload-lock"}
        assert left - {f"cache{turn}.partial"} <= known, f"turn {turn}, call {at} of {total}"


@cases
def test_killed_in_the_middle_of_a_write(
    number: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut short or killed within LMDB's own writes, at any size of the file, a build can be gone on with."""
    monkeypatch.setattr(lmdb_writer, "_COMMIT_BYTES", 5000)
    settings = SETTINGS[number]
    chance = random.Random(10 * number + seed)
    for turn in range(3):
        path = tmp_path / f"cache{turn}"
        limit = chance.randrange(4096, 60_000)

        def builder(path: Path = path, limit: int = limit) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            with contextlib.suppress(CacheError):  # what the system cuts short, LMDB reports
                build(dataset_for(settings), path, settings)

        assert exit_codes(builder)[0] in (0, -signal.SIGXFSZ)
        dataset = dataset_for(settings)
        check(dataset, build(dataset, path, settings))


class Telling(Images):
    """Tells when a worker reads sample 300."""

    def __init__(self, pipe: Any = None) -> None:
        super().__init__(400)
        self.pipe = pipe

    def sample(self, index: int) -> Any:
        if index == 300 and self.pipe is not None:
            self.pipe.send_bytes(b"300")
            signal.pause()
        return super().sample(index)


@pytest.mark.usefixtures("needs_lmdb")
def test_killed_with_its_workers_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A builder that is killed while its workers live is followed at once: they hold no lock."""
    monkeypatch.setattr(lmdb_writer, "_COMMIT_BYTES", 5000)
    path = tmp_path / "cache"
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=build_lmdb, args=(Telling(sender), path), kwargs={"num_workers": 2})
    child.start()
    receiver.recv_bytes()
    workers = psutil.Process(child.pid).children()
    child.kill()
    child.join()
    try:
        dataset = Telling()
        check(dataset, build(dataset, path, {}))
    finally:
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()  # they would find out by themselves, some seconds later
        child.close()
        receiver.close()
        sender.close()


# --- stopped ---------------------------------------------------------------------------------------------


def test_interrupt_keeps_finished_shards(tmp_path: Path) -> None:
    """After Ctrl-C a note on the error says what is kept and how to go on."""
    with pytest.raises(KeyboardInterrupt) as caught:
        build(Stopping(40, 9), tmp_path / "cache", {"shards": 8})
    dataset = Images(40)
    cache = build(dataset, tmp_path / "cache", {})

    kept = f"Finished shards are kept at {tmp_path}/cache.partial: build again to resume"
    assert caught.value.__notes__ == [kept]
    check(dataset, cache)
    assert dataset.reads == [1] + [0] * 4 + [1] * 35


def test_interrupt_in_the_first_shard_leaves_nothing(tmp_path: Path) -> None:
    """There is nothing to resume, and nothing in the way of another build."""
    with pytest.raises(KeyboardInterrupt):
        build(Stopping(40, 9), tmp_path / "cache", {})

    assert os.listdir(tmp_path) == []
