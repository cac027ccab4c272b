"""Several jobs that ask for one cache on disk: one builds it, the others wait and then read it."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fastload.cache import inventory
from fastload.cache.build import build_lmdb
from fastload.cache.dataset import CachedDataset
from fastload.cache.inventory import lock_name, only_builder
from fastload.errors import CacheBusyError, CacheMismatchError
from tests.cache.build_zoo import BrokenImages, Calling, _hold, _release, building, exit_codes
from tests.cache.zoo import Images
from tests.kit.batches import assert_same_samples
from tests.kit.jobs import Job
from tests.test_cli import run

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("needs_lmdb")


@pytest.fixture
def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A builder in another process; it ends at a pause of those that wait, after what a test adds."""
    path, pauses = tmp_path / "cache", []
    job = Job(_hold, str(path))
    job.answer()

    class Busy:
        at, ended = 120, staticmethod(lambda: None)
        seconds = pauses

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == Busy.at:
            Busy.ended()
            job.ask(_release)

    monkeypatch.setattr(inventory, "_sleep", sleep)
    yield Busy
    job.end()


def test_a_second_job_waits_with_a_line_and_builds_what_the_first_did_not(
    busy: Any, tmp_path: Path, caplog: Any
) -> None:
    """One warning says for whom it waits."""
    partial_file = tmp_path / "cache.partial"
    partial_file.write_bytes(bytes(5_000_000))
    busy.ended = partial_file.unlink
    with caplog.at_level(logging.INFO, "fastload"):
        ds = CachedDataset(Images(8), cache=f"lmdb:{tmp_path}/cache")

    assert_same_samples(ds[3], Images(8).sample(3))
    lines = [record for record in caplog.records if "waits until" in record.getMessage()]
    assert sum(busy.seconds) == pytest.approx(24)
    assert [record.levelname for record in lines] == ["WARNING"]
    assert "is being built by process" in lines[0].getMessage()


def test_what_the_first_has_built_is_read(busy: Any, tmp_path: Path) -> None:
    """Also with other settings, which are then compared; nothing is built twice."""
    build_lmdb(Images(8), tmp_path / "built", num_workers=0).close()
    busy.ended = lambda: (tmp_path / "built").rename(tmp_path / "cache")
    source = Images(8)
    assert CachedDataset.build(source, tmp_path / "cache", num_workers=0).num_cached == 8
    assert sum(source.reads) <= 6


def test_other_samples_are_an_error_after_the_wait(busy: Any, tmp_path: Path) -> None:
    """As if the cache had been there before."""
    build_lmdb(Images(8), tmp_path / "built", num_workers=0).close()
    busy.ended = lambda: (tmp_path / "built").rename(tmp_path / "cache")
    with pytest.raises(CacheMismatchError, match="sample 0 of the dataset differs"):
        build_lmdb(BrokenImages(8, shift=1), tmp_path / "cache", num_workers=0)


def test_a_lock_with_this_process_s_number_is_not_this_process_s(busy: Any, tmp_path: Path) -> None:
    """The number is that of another container or another host."""
    Path(lock_name(str(tmp_path / "cache"))).write_text(str(os.getpid()))
    assert build_lmdb(Images(8), tmp_path / "cache", num_workers=0).num_cached == 8
    assert len(busy.seconds) == 120


def read_all(path: Path, log: Path) -> None:
    ds = CachedDataset(Images(40, log=log), cache=f"lmdb:{path}")
    assert_same_samples([ds[index] for index in range(40)], [Images(40).sample(index) for index in range(40)])


def test_three_jobs_build_once(tmp_path: Path) -> None:
    """All of them train on all samples, and each sample is read for the cache once."""
    jobs = [partial(read_all, tmp_path / "cache", tmp_path / f"log {number}") for number in range(3)]
    assert exit_codes(*jobs) == [0, 0, 0]
    reads = [(tmp_path / f"log {number}").stat().st_size // 4 for number in range(3)]
    assert max(reads) <= 40 + 6
    assert sorted(reads)[:2] <= [7, 7]  # they probe, and compare sample 0
    assert sorted(path.name for path in tmp_path.iterdir() if "log" not in path.name) == ["cache"]


WAYS: dict[str, Callable[[Path], Any]] = {
    "build_lmdb": lambda path: build_lmdb(Images(4), path, wait=False),
    "CachedDataset.build": lambda path: CachedDataset.build(Images(4), path, wait=False),
    "only_builder": lambda path: only_builder(str(path)).__enter__(),
}


@pytest.mark.parametrize("way", WAYS)
def test_who_does_not_want_to_wait_gets_an_error(way: str, tmp_path: Path, monkeypatch: Any) -> None:
    """At once, also where ranks wait."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with building(tmp_path / "cache") as pid, pytest.raises(CacheBusyError, match=f"built by process {pid}"):
        WAYS[way](tmp_path / "cache")


def test_the_command_line_waits(busy: Any, tmp_path: Path) -> None:
    """And says so."""
    waited = run("build", "tests.cli_zoo:Plain", tmp_path / "cache", "--num-workers", "0")
    assert waited.exit_code == 0
    assert "waits until" in waited.stderr


def test_a_thread_of_the_builder_s_process_does_not_wait(tmp_path: Path) -> None:
    """It could be the builder itself, which would wait for ever."""
    path = tmp_path / "cache"

    def again() -> None:
        with pytest.raises(CacheBusyError, match="another thread"):
            build_lmdb(Images(20), path)

    build_lmdb(Calling(20, 12, again), path, num_workers=0).close()
