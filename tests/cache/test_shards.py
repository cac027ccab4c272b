"""Shards that single processes build, and the cache that is joined from them."""

from __future__ import annotations

import errno
import functools
import json
import logging
import multiprocessing
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from fastload.cache.build import inventory
from fastload.cache.build.build import build_lmdb, build_shard, join
from fastload.cache.fingerprint import Fingerprint
from fastload.errors import CacheBusyError, CacheError, CacheMismatchError, TooManyFailuresError
from fastload.system import locks
from tests.cache.build_zoo import BrokenImages, Stopping, exit_codes
from tests.cache.zoo import Everything, Images, RaggedImages

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fastload.cache.build.build import BuiltShard


def shard_of(dataset: Any, path: Any, shard: int, num_shards: int, **options: Any) -> BuiltShard:
    return build_shard(dataset, path, shard, num_shards, num_workers=0, progress=False, **options)


def all_shards(dataset: Any, path: Any, num_shards: int, **options: Any) -> None:
    for shard in range(num_shards):
        shard_of(dataset, path, shard, num_shards, **options)


def local_twin(dataset: Any, path: Path, twin: Path, **options: Any) -> Path:
    """The cache that one process builds by the plan of the shards in PATH.partial."""
    fields = json.loads((path.parent / f"{path.name}.partial" / "plan.json").read_text())
    partial = twin.parent / f"{twin.name}.partial"
    partial.mkdir()
    local = {"version": fields["version"], "plan": fields["plan"], "max_errors": 1.0}
    (partial / "plan.json").write_text(json.dumps(local))
    shards = fields["plan"]["num_shards"]
    build_lmdb(dataset, twin, shards=shards, num_workers=0, progress=False, **options).close()
    return twin


def files_at(path: Path) -> dict[str, bytes]:
    """The content of all files of a cache."""
    if path.is_file():
        return {"": path.read_bytes()}
    return {one.name: one.read_bytes() for one in path.iterdir()}


def own_files(path: Path) -> list[str]:
    """The names in PATH.partial that a process gives to files that it is writing."""
    return sorted(name for name in os.listdir(f"{path}.partial") if name.startswith("."))


class Calling(Images):
    """Calls a function when it reads one sample."""

    def __init__(self, num_samples: int, at: int, call: Any) -> None:
        super().__init__(num_samples)
        self.at = at
        self.call = call

    def sample(self, index: int) -> Any:
        if index == self.at:
            self.at = -1
            self.call()
        return super().sample(index)


# --- the result ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "num_shards", "options"),
    [
        (Images, 4, {}),
        (RaggedImages, 4, {"codec": "png"}),
        (Everything, 4, {"codec": "jpeg", "quality": 80}),
        (BrokenImages, 4, {"on_error": "skip", "max_errors": 1.0}),
        (Images, 1, {}),
    ],
)
def test_a_joined_cache_is_that_of_a_local_build(
    kind: Any, num_shards: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """Byte for byte, whoever builds which shard in which order; one shard is a file."""
    known = Fingerprint({"files": "a"})
    dataset = BrokenImages(30, bad=[3, 8, 29]) if kind is BrokenImages else kind(30)
    for shard in reversed(range(num_shards)):
        num_workers = 2 if shard == 3 and kind is Images else 0
        own = {"num_workers": num_workers, "fingerprint": known, **options}
        build_shard(dataset, tmp_path / "cache", shard, num_shards, **own)
    twin = local_twin(dataset, tmp_path / "cache", tmp_path / "twin", fingerprint=known, **options)

    cache = join(tmp_path / "cache")

    assert files_at(tmp_path / "cache") == files_at(twin)
    assert (cache.num_shards, cache.parts, cache.verify()) == (num_shards, {"files": "a"}, [])
    assert {"cache", "twin", "cache.errors.jsonl", "twin.errors.jsonl"} >= set(os.listdir(tmp_path))


def test_a_shard_says_what_was_built(tmp_path: Path) -> None:
    """Three samples make three shards, whatever number was asked for; a second call builds none."""
    built = [shard_of(Images(3), tmp_path / "cache", shard, 8) for shard in [*range(8), 1]]

    assert [one.num_samples for one in built] == [1, 1, 1, 0, 0, 0, 0, 0, 1]
    assert [one.was_built for one in built] == [True] * 3 + [False] * 6
    assert built[8].nbytes == built[1].nbytes > 0
    assert join(tmp_path / "cache").num_shards == 3


def test_joining_twice_is_harmless(tmp_path: Path) -> None:
    """The second call opens the cache; a shard that is built once more finds it, too."""
    all_shards(Images(20), tmp_path / "cache", 3)
    join(tmp_path / "cache").close()
    before = files_at(tmp_path / "cache")

    assert "joined before" in join(tmp_path / "cache").explain()
    assert shard_of(Images(20), tmp_path / "cache", 2, 3).is_joined
    assert files_at(tmp_path / "cache") == before
    assert os.listdir(tmp_path) == ["cache"]
    with pytest.raises(CacheMismatchError, match="number of samples"):
        shard_of(Images(21), tmp_path / "cache", 2, 3)


# --- what is missing -------------------------------------------------------------------------------------


def test_join_names_missing_shards_as_commands(tmp_path: Path) -> None:
    """The numbers are those of `build-shard`, the first one in a command, and everything is kept."""
    for shard in (0, 1, 3, 4, 5):
        shard_of(Images(20), tmp_path / "cache", shard, 7)
    with pytest.raises(CacheError) as caught:
        join(tmp_path / "cache")

    command = f"fastload cache build-shard SOURCE {tmp_path}/cache"
    assert str(caught.value).startswith("2 of 7 shards are missing or damaged: 3, 7. ")
    assert f"'{command} 3/7', then join again" in str(caught.value)
    for shard in (2, 6):
        shard_of(Images(20), tmp_path / "cache", shard, 7)
    assert join(tmp_path / "cache").verify() == []


def test_join_says_what_is_there(tmp_path: Path) -> None:
    """Ten missing shards are named at most; an empty directory is nothing; a budget is checked at once."""
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match="neither a cache nor a shard"):
            join(tmp_path / "cache")
        (tmp_path / "cache.partial").mkdir(exist_ok=True)
    shard_of(Images(500), tmp_path / "cache", 4, 500)
    with pytest.raises(CacheError, match=r"^499 of 500 shards are missing or damaged: 1, .*, \.\.\.\. Build"):
        join(tmp_path / "cache")
    with pytest.raises(ValueError, match="max_errors"):
        join(tmp_path / "cache", max_errors=-1)


# --- samples that are left out ---------------------------------------------------------------------------


def test_a_shard_above_max_errors_ends_early(tmp_path: Path) -> None:
    """It is not finished; it is built again with a larger `max_errors`."""
    options: dict[str, Any] = {"on_error": "skip"}
    with pytest.raises(TooManyFailuresError, match=r"2 samples .* allows 1 of 40.* build again to resume"):
        shard_of(BrokenImages(40, bad=[21, 23, 25]), tmp_path / "cache", 1, 2, max_errors=1, **options)
    dataset = BrokenImages(40, bad=[21, 23, 25])

    assert shard_of(dataset, tmp_path / "cache", 1, 2, max_errors=3, **options).num_left_out == 3


# --- other plans -----------------------------------------------------------------------------------------


def test_one_process_finishes_what_single_shards_began(tmp_path: Path) -> None:
    """A build of the whole follows the plan of the shards, and reads only what is missing."""
    shard_of(Images(20), tmp_path / "cache", 1, 2)
    dataset = Images(20)

    cache = build_lmdb(dataset, tmp_path / "cache", num_workers=0)

    assert cache.verify() == []
    assert dataset.reads == [1] * 10 + [0] * 10


@pytest.mark.parametrize(
    ("shard", "num_shards", "said"),
    [
        *((0, wrong, "shards should be an int from 1") for wrong in (0, True, "4")),
        *((wrong, 4, "shard should be an int from 0 to 3") for wrong in (-1, 4, True, "1")),
    ],
)
def test_numbers_that_are_not_valid(shard: Any, num_shards: Any, said: str, tmp_path: Path) -> None:
    """The error states the range."""
    with pytest.raises(ValueError, match=said):
        build_shard(Images(4), tmp_path / "cache", shard, num_shards)


# --- several processes -----------------------------------------------------------------------------------


def test_two_builders_of_one_shard_exclude_each_other(tmp_path: Path) -> None:
    """The second one is told, and the first one finishes."""

    def again() -> None:
        with pytest.raises(CacheBusyError, match=r"00001-of-00002\.lmdb is being built by another thread"):
            shard_of(Images(20), tmp_path / "cache", 1, 2)

    shard_of(Calling(20, 14, again), tmp_path / "cache", 1, 2)

    assert sorted(os.listdir(tmp_path / "cache.partial")) == ["00001-of-00002.lmdb", "plan.json"]
    shard_of(Images(20), tmp_path / "cache", 0, 2)
    assert join(tmp_path / "cache").verify() == []


@pytest.mark.parametrize("instead", ["nothing", "one process", "other shards"])
def test_a_directory_that_is_removed_meanwhile_is_an_error(instead: str, tmp_path: Path) -> None:
    """The error says what happened, and files of another build at the same place are not touched."""
    path, partial = tmp_path / "cache", tmp_path / "cache.partial"
    found = []

    def remove() -> None:
        for one in partial.iterdir():
            one.unlink()
        partial.rmdir()
        if instead == "one process":
            with pytest.raises(KeyboardInterrupt):
                build_lmdb(Stopping(30, 19), path, num_workers=0, shards=3)
        if instead == "other shards":
            shard_of(Images(30), path, 0, 3)
        if partial.exists():
            found.append(files_at(partial))

    with pytest.raises(CacheError, match=r"was removed while a shard was built in it"):
        shard_of(Calling(20, 14, remove), path, 1, 2)

    if found:
        assert files_at(partial) == found[0]


@pytest.mark.slow
def test_processes_that_begin_at_once_agree_on_one_plan(tmp_path: Path) -> None:
    """Six processes, released by one event; their shards have one id."""
    barrier = multiprocessing.get_context("fork").Barrier(6)

    def build(shard: int) -> None:
        barrier.wait()
        shard_of(Images(24), tmp_path / "cache", shard, 6)

    assert exit_codes(*(functools.partial(build, shard) for shard in range(6))) == [0] * 6
    assert own_files(tmp_path / "cache") == []
    assert join(tmp_path / "cache").verify() == []


@pytest.mark.parametrize("way", ["the same shard", "join", "rm"])
def test_leftovers_of_a_killed_process_go(way: str, tmp_path: Path) -> None:
    """With the next build of the same shard, with join, and with rm; the shard is built from its start."""
    path = tmp_path / "cache"
    dying = Calling(20, 14, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert exit_codes(lambda: shard_of(dying, path, 1, 2)) == [-signal.SIGKILL]
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
    if way == "join":
        # As if the process had been killed on another machine.
        leftover.with_name(f".00001-of-00002.lmdb.elsewhere.{'0' * 16}").write_bytes(content)
        assert len(own_files(path)) == 1
        shard_of(Images(20), path, 1, 2)
        assert len(own_files(path)) == 1  # it may be alive there

    assert join(path).verify() == []
    assert sorted(os.listdir(path)) == ["00000-of-00002.lmdb", "00001-of-00002.lmdb"]


def test_a_shard_that_is_being_built_here_is_not_removed(tmp_path: Path) -> None:
    """`rm` says that a process is at work, and the process finishes its shard."""
    said = []

    def try_to_remove() -> None:
        said.append([one.state for one in inventory.list_caches(str(tmp_path))])
        with pytest.raises(CacheBusyError, match=r"shards of .* are being built"):
            inventory.remove(str(tmp_path / "cache"))

    assert shard_of(Calling(20, 14, try_to_remove), tmp_path / "cache", 1, 2).was_built
    assert said == [["building"]]


@pytest.mark.parametrize("name", ["notes.txt", ".00000-of-00002.lmdb.swp", "00000-of-00002.errors.txt"])
def test_foreign_files_stay(name: str, tmp_path: Path) -> None:
    """A build of a shard, join and rm refuse a directory with a file of another program."""
    all_shards(Images(4), tmp_path / "cache", 2)
    (tmp_path / "cache.partial" / name).write_text("mine")
    before = files_at(tmp_path / "cache.partial")
    for attempt in (
        lambda: shard_of(Images(4), tmp_path / "cache", 0, 2),
        lambda: join(tmp_path / "cache"),
        lambda: inventory.remove(str(tmp_path / "cache")),
    ):
        with pytest.raises(CacheError, match=r"cache\.partial"):
            attempt()

    assert files_at(tmp_path / "cache.partial") == before


@pytest.mark.parametrize(
    ("shards", "problem"),
    [
        ([0], "1 of 2 shards are missing: run the build again"),
        ([0, 1], "all 2 shards are built: run 'fastload cache join"),
    ],
)
def test_unfinished_shards_are_listed(shards: Sequence[int], problem: str, tmp_path: Path) -> None:
    """With what is left to do."""
    for shard in shards:
        shard_of(Images(4), tmp_path / "cache", shard, 2)
    (found,) = inventory.list_caches(str(tmp_path))

    assert found.state == "unfinished"
    assert found.problem is not None
    assert found.problem.startswith(problem)


# --- a system that refuses -------------------------------------------------------------------------------


def test_a_file_system_without_locks_and_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The plan gets its name in another way, and shards are built and joined all the same."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(locks.fcntl, "lockf", refuse)
    monkeypatch.setattr(os, "link", refuse)
    all_shards(Images(6), tmp_path / "cache", 2)
    with caplog.at_level(logging.INFO, "fastload"):
        assert join(tmp_path / "cache").verify() == []

    assert "not locked, because" in caplog.text
    assert os.listdir(tmp_path) == ["cache"]
    inventory.remove(str(tmp_path / "cache"))
    assert os.listdir(tmp_path) == []
