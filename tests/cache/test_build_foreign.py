"""What others have put where a build writes: it stays as it is, and the error says so."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fastload.cache.build import inventory
from fastload.cache.build.build import build_lmdb
from fastload.cache.build.build_lock import lock_name, only_builder
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.errors import CacheError
from tests.cache.build_zoo import BrokenImages, building
from tests.cache.zoo import Images
from tests.kit.batches import assert_same_samples

if TYPE_CHECKING:
    from collections.abc import Callable


def _hard_link(place: Path) -> None:
    (place.parent / "pid").write_text("4711")
    os.link(place.parent / "pid", place)


def _link(place: Path, content: str | None) -> None:
    if content is not None:
        (place.parent / "target").write_text(content)
    place.symlink_to(place.parent / "target")


def _socket(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        directory = os.open(place.parent, os.O_RDONLY)
        try:
            server.bind(f"/proc/self/fd/{directory}/{place.name}")  # a path may be too long for a socket
        finally:
            os.close(directory)


FOREIGN: dict[str, Callable[[Path], Any]] = {
    "link to a file": lambda place: _link(place, "my thesis"),
    "link to an empty file": lambda place: _link(place, ""),
    "link to a number": lambda place: _link(place, "4711"),
    "link to nothing": lambda place: _link(place, None),
    "link to itself": lambda place: place.symlink_to(place),
    "hard link": _hard_link,
    "text": lambda place: place.write_text("my notes"),
    "number and text": lambda place: place.write_text("4711\nand more"),
    "long number": lambda place: place.write_text("1" * 21),
    "number of other digits": lambda place: place.write_text("\N{ARABIC-INDIC DIGIT ONE}"),
    "bytes": lambda place: place.write_bytes(b"\0" * 4),
    "directory": lambda place: place.mkdir(),
    "pipe": lambda place: os.mkfifo(place),
    "socket": _socket,
}


def look(directory: Path) -> dict[str, Any]:
    """What is there, by name: kind, content or target, and the time of its last change."""
    found = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        changed_ns = None if path.is_dir() and not path.is_symlink() else status.st_mtime_ns
        found[str(path.relative_to(directory))] = status.st_mode, content, changed_ns
    return found


# --- the lock --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["link to a file", "link to nothing", "directory", "socket"])
def test_what_cannot_be_a_lock_is_an_error(kind: str, tmp_path: Path) -> None:
    """The error names the destination, and nothing is written or removed."""
    FOREIGN[kind](Path(lock_name(str(tmp_path / "cache"))))
    before = look(tmp_path)

    with pytest.raises(CacheError, match="cannot write the cache"):
        build_lmdb(Images(3), tmp_path / "cache", num_workers=0)
    assert look(tmp_path) == before


@pytest.mark.parametrize("content", ["", "1", "4194304"])
def test_a_lock_of_a_killed_builder_is_taken_over(content: str, tmp_path: Path) -> None:
    """It holds our number alone while we hold it, and others see that the cache is being built."""
    lock = Path(lock_name(str(tmp_path / "cache")))
    lock.write_text(content)
    with building(tmp_path / "cache") as pid:
        assert lock.read_text() == str(pid)
        assert inventory.is_being_built(str(tmp_path / "cache"))

    assert not inventory.is_being_built(str(tmp_path / "cache"))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["nothing", "text", "link to a file", "directory"])
def test_what_took_the_place_of_our_lock_stays(kind: str, tmp_path: Path) -> None:
    """The end of a build removes its own lock file only."""
    lock = Path(lock_name(str(tmp_path / "cache")))
    with only_builder(str(tmp_path / "cache")):
        lock.unlink()
        if kind != "nothing":
            FOREIGN[kind](lock)
        before = look(tmp_path)

    assert look(tmp_path) == before


# --- DEST.partial ----------------------------------------------------------------------------------------


def _partial_link(place: Path) -> None:
    (place.parent / "folder").mkdir()
    (place.parent / "folder" / "errors.jsonl").write_text("mine")
    place.symlink_to(place.parent / "folder")


def _folder(place: Path, name: str, make: Callable[[Path], Any]) -> None:
    place.mkdir()
    (place / "00000-of-00001.lmdb").write_bytes(b"half")
    make(place / name)


PARTIALS: dict[str, Callable[[Path], Any]] = {
    "file": lambda place: place.write_text("a download"),
    "link": _partial_link,
    "link to nothing": lambda place: _link(place, None),
    "foreign file": lambda place: _folder(place, "thesis.txt", lambda at: at.write_text("mine")),
    "folder in it": lambda place: _folder(place, "errors.jsonl", lambda at: at.mkdir()),
    "link in it": lambda place: _folder(place, "errors.jsonl", lambda at: _link(at, "mine")),
    "linked plan": lambda place: _folder(place, "plan.json.new", lambda at: _link(at, "mine")),
    "linked shard": lambda place: _folder(place, "00001-of-00001.lmdb", lambda at: _link(at, "mine")),
    "hard link in it": lambda place: _folder(place, "errors.jsonl", _hard_link),
    "pipe in it": lambda place: _folder(place, "plan.json", lambda at: os.mkfifo(at)),
}  # fmt: skip


@pytest.mark.parametrize("kind", PARTIALS)
def test_an_unfinished_build_that_is_not_ours_stays(kind: str, tmp_path: Path) -> None:
    """A build is refused, and names what is foreign; a finished cache beside it is opened."""
    PARTIALS[kind](tmp_path / "cache.partial")
    before = look(tmp_path)
    with pytest.raises(CacheError, match=r"cache\.partial.* move it away"):
        build_lmdb(Images(3), tmp_path / "cache", num_workers=0)
    assert look(tmp_path) == before

    build_lmdb(Images(3), tmp_path / "elsewhere", num_workers=0).close()
    (tmp_path / "elsewhere").rename(tmp_path / "cache")
    assert_same_samples(build_lmdb(Images(3), tmp_path / "cache").get(2), Images(3).sample(2))
    after = look(tmp_path)
    del after["cache"]
    assert after == before


# --- DEST and the report ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FOREIGN)
def test_the_report_is_written_through_no_other_file(kind: str, tmp_path: Path) -> None:
    """The report of errors comes to its place whole, and no file beside it is written to."""
    FOREIGN[kind](tmp_path / "cache.errors.jsonl.new")
    before = look(tmp_path)
    build_lmdb(BrokenImages(4, bad=[1]), tmp_path / "cache", num_workers=0, on_error="skip").close()
    after = look(tmp_path)

    assert after.pop("cache.errors.jsonl")[1].count(b"\n") == 1
    assert LMDBCache(tmp_path / "cache").num_cached == 3
    del after["cache"]
    assert after == before


@pytest.mark.parametrize(("kind", "shards"), [("text", 1), ("directory", 2), ("link to a file", 1)])
def test_what_came_to_the_destination_meanwhile_stays(kind: str, shards: int, tmp_path: Path) -> None:
    """A build whose destination was taken while it ran raises; what it built is kept."""

    class Late(Images):
        def sample(self, index: int) -> Any:
            if index == 2 and not os.path.lexists(tmp_path / "cache"):
                FOREIGN[kind](tmp_path / "cache")
            return super().sample(index)

    with pytest.raises(CacheError, match=r"cache was made .*cache\.partial"):
        build_lmdb(Late(3), tmp_path / "cache", num_workers=0, shards=shards)
    found = look(tmp_path)
    assert found["cache.partial/plan.json"]
    FOREIGN[kind](tmp_path / "expected")
    assert look(tmp_path)["expected"][:2] == found["cache"][:2]


def test_a_finished_cache_is_listed_beside_a_foreign_partial_file(tmp_path: Path) -> None:
    """A download tool's file of that name hides no cache, neither this one nor another."""
    for name in ("cache", "other"):
        build_lmdb(Images(3), tmp_path / name, num_workers=0)
    (tmp_path / "cache.partial").write_bytes(b"half a download")

    found = inventory.list_caches(str(tmp_path))

    assert [(os.path.basename(one.path), one.state) for one in found] == [
        ("cache", "finished"),
        ("other", "finished"),
    ]
