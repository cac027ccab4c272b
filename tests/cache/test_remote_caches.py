"""Caches in object stores: builds that upload their shards, and local copies that are downloaded once."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

import fastload
from fastload.cache.build import plan, upload
from fastload.cache.build.build import build_lmdb
from fastload.cache.build.upload import build_at_url
from fastload.cache.lmdb import mirror
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.cache.lmdb.manifest import Manifest, manifest_text, parse_manifest
from fastload.errors import CacheBusyError, CacheCorruptError, CacheError, CacheMismatchError
from fastload.files import retry
from tests.cache.build_zoo import BrokenImages, Calling, exit_codes, refusing
from tests.cache.zoo import Images
from tests.kit.batches import assert_same_samples
from tests.kit.remote import FaultyFileSystem, cut, raising, register, until_set
from tests.test_cli import run

if TYPE_CHECKING:
    from collections.abc import Callable


URL = "faulty://bucket/caches/train"
SHARDS = ["00000-of-00003.lmdb", "00001-of-00003.lmdb", "00002-of-00003.lmdb"]


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of this test's own for builds and copies, and an empty faulty store; no pauses."""
    monkeypatch.setenv(mirror.DIRECTORY_VARIABLE, str(tmp_path / "host"))
    monkeypatch.delenv(mirror.BYTES_VARIABLE, raising=False)
    monkeypatch.setattr(retry, "_sleep", lambda _: None)
    register()
    FaultyFileSystem.reset()
    return tmp_path / "host"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a store that other processes see, too; each read of a shard is a line of a file."""
    inner = LocalFileSystem.cat_file

    def cat_file(fs: Any, path: str, *args: Any, **options: Any) -> Any:
        if path.endswith(".lmdb"):
            with open(tmp_path / "log", "a") as file:
                file.write(f"{path}\n")
        return inner(fs, path, *args, **options)

    monkeypatch.setattr(LocalFileSystem, "cat_file", cat_file)
    return f"local://{tmp_path}/store/train"


def num_read(log: Path, url: str, num_processes: int = 1) -> int:
    """How many shards these processes read that open a cache at the same time."""
    log.unlink(missing_ok=True)
    assert exit_codes(*[lambda: exit(LMDBCache(url).get(19)[1] - 19)] * num_processes) == [0] * num_processes
    return log.read_bytes().count(b"\n")


def build(dataset: Any = None, url: str = URL, **options: Any) -> tuple[Manifest, bool]:
    options = {"num_workers": 0, "progress": False, "shards": 3, **options}
    return build_at_url(Images(20) if dataset is None else dataset, url, **options)


def names(url: str = URL) -> list[str]:
    """The names of the files at a URL."""
    root = FaultyFileSystem._strip_protocol(url)
    return sorted(path.removeprefix(f"{root}/") for path in FaultyFileSystem.store if path.startswith(root))


def content(name: str, url: str = URL) -> bytes:
    return bytes(FaultyFileSystem().cat_file(f"{url}/{name}"))


def change(name: str, data: bytes, url: str = URL) -> None:
    """Replace a file at the URL."""
    FaultyFileSystem().pipe_file(f"{url}/{name}", data)


def copied() -> list[str]:
    """The names of copies and unfinished downloads."""
    return sorted(path.name for path in Path(mirror.mirrors_directory()).glob("*"))


def copy_of(url: str = URL) -> Path:
    """Open a cache, which is right, and close it again; gives the place of its copy."""
    with contextlib.closing(LMDBCache(url)) as cache:
        assert cache.verify() == []
        assert_same_samples([cache.get(index) for index in range(20)], list(Images(20)))
        return Path(cache.path)


def reads() -> list[str]:
    """The names of the files that were read at URLs."""
    return sorted(path.rpartition("/")[2] for path in FaultyFileSystem.reads.elements())


@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_a_cache_at_a_url_gives_the_samples(mask: int, cache_dir: Path, caplog: Any) -> None:
    """Nothing of the build stays on the disk; the copy is whole, and this user's alone."""
    manifest, was_built = build()
    before = os.umask(mask)
    try:
        copy = copy_of()
    finally:
        os.umask(before)
    assert was_built
    assert names() == sorted([*SHARDS, "cache.json", "plan.json"])
    assert os.listdir(cache_dir / f"builds-{os.getuid()}") == []
    assert sorted(os.listdir(copy)) == [*SHARDS, "cache.json"]
    assert manifest.nbytes == sum((copy / name).stat().st_size for name in SHARDS)
    assert {path.name: path.stat().st_mode & 0o777 for path in cache_dir.iterdir()} == {
        f"{kind}-{os.getuid()}": 0o700 for kind in ("builds", "copies")
    }
    FaultyFileSystem.reads.clear()
    copy_of()
    assert reads() == ["cache.json"]
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


def make_foreign(path: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a file or a directory one that another user can have written."""
    if change == "the mode":
        path.chmod(path.stat().st_mode | 0o020)
    elif change == "a link":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("elsewhere")
    else:
        own, lstat = path.lstat(), os.lstat

        def lstat_of_another(name: Any, **options: Any) -> os.stat_result:
            found = lstat(name, **options)  # a new file may have the same number, but not the same time
            is_own = (found.st_ino, found.st_mtime_ns) == (own.st_ino, own.st_mtime_ns)
            return os.stat_result([*found[:4], found.st_uid + 4321 * is_own, *found[5:]])

        monkeypatch.setattr(os, "lstat", lstat_of_another)


@pytest.mark.parametrize(
    ("name", "change"),
    [("copies", "the mode"), ("builds", "the owner"), ("copies", "a link"), ("builds", "no directory")],
)
def test_a_directory_that_is_not_this_users_is_an_error(
    name: str, change: str, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says why, and names the variable; nothing is written there."""
    build()
    shutil.rmtree(cache_dir)
    own = cache_dir / f"{name}-{os.getuid()}"
    if change == "no directory":
        cache_dir.touch()
    else:
        own.mkdir(parents=True, mode=0o700)
        make_foreign(own, change, monkeypatch)
    said = rf"cannot write|{own} is not a directory that only this user can write"
    with pytest.raises(CacheError, match=said) as error:
        LMDBCache(URL) if name == "copies" else build()

    said = "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])
    assert mirror.DIRECTORY_VARIABLE in said
    assert change == "no directory" or [*own.iterdir()] == []


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((".", change) for change in ("the mode", "the owner", "a link")),
        *((SHARDS[0], change) for change in ("the mode", "the owner", "a link", "unfinished")),
        ("cache.json", "the mode"),
        ("cache.json", "the digest of a shard"),  # it is the copy of another manifest
        (SHARDS[0], "removed"),
    ],
)
def test_a_copy_that_another_user_can_have_written_is_downloaded_again(
    name: str, change: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its files have the right names and lengths; one warning names what is not this user's."""
    build()
    copy = copy_of()
    (copy / SHARDS[0]).write_bytes(bytes((copy / SHARDS[0]).stat().st_size))
    if change == "removed":
        (copy / name).unlink()
    elif change == "the digest of a shard":
        digest = json.loads((copy / name).read_text())["shards"][0]["blake2b"]
        (copy / name).write_text((copy / name).read_text().replace(digest, "0" * len(digest)))
    elif change == "unfinished":
        (copy / name).chmod(0o666)
        copy = copy.rename(f"{copy}.partial")
    else:
        make_foreign(copy / name, change, monkeypatch)
    FaultyFileSystem.reads.clear()
    copy_of()

    assert change != "removed" or reads() == [name, "cache.json"]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (change not in ("removed", "the digest of a shard"))
    for warning in warnings:
        assert warning.startswith(f"{copy / name} could be from a different user")
        assert warning.endswith("the copy is downloaded again")


def test_a_shard_has_about_the_bytes_of_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the size of the first sample: 20 images of a bit more than 2304 bytes; it is one shard at least."""
    monkeypatch.setattr(plan, "SHARD_BYTES", 5 * 2500)
    assert build(shards=None)[0].plan.num_shards == 4
    assert [one.name for one in build(Images(2), f"{URL}2", shards=None)[0].shards] == ["00000-of-00001.lmdb"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionError("reset"), "tried 6 times"),
        (PermissionError("denied"), "PermissionError: denied"),
        (None, "bytes arrived of"),  # the store shows a part of the file
    ],
)
def test_an_upload_that_fails_is_an_error_with_the_url(error: Any, said: str, monkeypatch: Any) -> None:
    """Shards are kept: the next build reads only samples of shards that are neither here nor there."""
    inner = FaultyFileSystem.put_file

    def put_file(fs: Any, local: str, path: str) -> Any:
        if not path.endswith(SHARDS[2]):
            return inner(fs, local, path)
        if error is not None:
            raise error
        return fs.pipe_file(path, cut(Path(local).read_bytes()))

    with monkeypatch.context() as patch:
        patch.setattr(FaultyFileSystem, "put_file", put_file)
        with pytest.raises(CacheError, match=rf"{URL}/{SHARDS[2]}: .*{said}"):
            build()
    assert names() == sorted([*SHARDS[: 3 if error is None else 2], "plan.json"])
    again = Images(20)
    build(again)
    assert again.reads == [1] + [0] * 19
    copy_of()


def test_at_most_two_finished_shards_wait_on_the_disk(cache_dir: Path, monkeypatch: Any) -> None:
    """The first upload ends only after the build has begun to wait for room."""
    found, is_waiting, put_file = [], threading.Event(), FaultyFileSystem.put_file

    class Uploads(ThreadPoolExecutor):
        def submit(self, *args: Any, **_: Any) -> Any:
            return Mock(result=functools.partial(self.wait, super().submit(*args)))

        def wait(self, future: Any) -> None:
            found.append(len(list(cache_dir.rglob("*-of-*.lmdb"))))
            is_waiting.set()
            future.result()

    monkeypatch.setattr(upload, "ThreadPoolExecutor", Uploads)
    monkeypatch.setattr(FaultyFileSystem, "put_file", lambda *to: until_set(is_waiting) or put_file(*to))
    build(shards=6)
    assert (found[0], max(found)) == (2, 2)


def test_two_builds_of_the_same_samples_are_not_mixed(tmp_path: Path) -> None:
    """One of this host is told; one of another machine replaces the plan; a local one has its own id."""

    def meanwhile() -> None:
        with pytest.raises(CacheBusyError, match=rf"{URL} is being built by"):
            build()
        fields = json.loads(content("plan.json"))
        fields["plan"]["build_id"] = "abc"
        change("plan.json", json.dumps(fields).encode())

    with pytest.raises(CacheError, match=r"plan.json was removed or replaced"):
        build(Calling(20, 5, meanwhile))
    assert "cache.json" not in names()
    FaultyFileSystem.reset()
    build()
    build_lmdb(Images(20), tmp_path / "x", shards=3, num_workers=0).close()
    with pytest.raises(CacheMismatchError, match=r"has a different build from .*/x: omit the local DEST"):
        build(path=str(tmp_path / "x"))


@pytest.mark.parametrize("state", ["nothing", "finished", "unfinished"])
def test_a_cache_is_kept_and_uploaded(state: str, tmp_path: Path) -> None:
    """The local cache and the copy have the same files."""
    path = tmp_path / "local"
    if state == "finished":
        build_lmdb(Images(20), path, shards=3, num_workers=0).close()
    elif state == "unfinished":
        with contextlib.suppress(KeyboardInterrupt):
            build_lmdb(BrokenImages(20, stop=15), path, shards=3, num_workers=0)
    build(path=str(path), shards=None if state == "finished" else 3)

    cache = LMDBCache(URL)
    for name in SHARDS:
        assert (path / name).read_bytes() == Path(cache.path, name).read_bytes() == content(name)
    assert sorted(os.listdir(path)) == SHARDS
    cache.close()


# --- opening ---------------------------------------------------------------------------------------------


def test_a_cached_dataset_takes_the_url_of_a_finished_cache_of_its_samples() -> None:
    """Else the error has the URL and the command; nothing is built or uploaded that nobody asked for."""
    for _ in range(2):
        before = names()
        with pytest.raises(FileNotFoundError, match=rf"with `fastload cache build SOURCE {URL}`"):
            fastload.CachedDataset(Images(20), cache=f"lmdb:{URL}")
        assert names() == before
        with contextlib.suppress(KeyboardInterrupt):
            build(BrokenImages(20, stop=15))
    build()
    assert fastload.CachedDataset(Images(20), cache=f"lmdb:{URL}")[3][1] == 3
    instead = rf"from_cache\('{URL}'\). If the dataset is right, build its cache at a different URL"
    with pytest.raises(CacheMismatchError, match=rf"number of samples is 21 here.*{instead}"):
        fastload.CachedDataset(Images(21), cache=f"lmdb:{URL}")


def test_a_cache_that_was_built_again_gets_another_copy() -> None:
    """The old copy stays open for those who have it."""
    build()
    old = LMDBCache(URL)
    FaultyFileSystem.reset()
    build(Images(10))
    new = LMDBCache(URL)
    assert (old.num_samples, new.num_samples) == (20, 10)
    assert len(copied()) == 2
    old.close()
    new.close()


DOWN, NO, GONE = ConnectionError("no route"), PermissionError("denied"), FileNotFoundError("gone")


@pytest.mark.parametrize(
    ("copy", "fault", "raised"),
    [
        ("complete", DOWN, None),
        ("another user's", DOWN, (CacheError, "no route")),
        ("none", DOWN, (CacheError, rf"cannot read {URL}/cache.json: .*no route.*tried 6 times")),
        ("complete", NO, (CacheError, URL)),
        ("complete", GONE, (FileNotFoundError, URL)),
    ],
)
def test_a_complete_copy_is_opened_while_the_network_is_down(
    copy: str, fault: Exception, raised: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """With a warning; a store that answers no is an error, although a copy is there."""
    build()
    if copy != "none":
        (copy_of() / SHARDS[0]).chmod(0o600 if copy == "complete" else 0o666)
    FaultyFileSystem.faults["cache.json"] = [raising(fault)] * 20
    if raised is None:
        copy_of()
        assert "no route" in caplog.text
        assert "Using the local copy of the cache" in caplog.text
    else:
        with pytest.raises(raised[0], match=raised[1]):
            LMDBCache(URL)
    FaultyFileSystem.faults.clear()  # the error keeps the frames that it went through
    fault.__traceback__ = None


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: bytes(len(data)), f"{SHARDS[1]} is damaged: its digest is .* open the cache again"),
        (lambda data: data[:-1], f"{SHARDS[1]}: .* bytes arrived"),
        (lambda data: None, f"there is no file at .*{SHARDS[1]}"),
    ],
)
def test_a_damaged_shard_is_an_error_and_never_a_copy(damage: Any, said: str, monkeypatch: Any) -> None:
    """Good shards are kept for the next attempt; faults that pass are tried again, each part by itself."""
    build()
    data = content(SHARDS[1])
    FaultyFileSystem().rm_file(f"{URL}/{SHARDS[1]}")
    if (damaged := damage(data)) is not None:
        change(SHARDS[1], damaged)
    with pytest.raises(CacheError, match=said):
        LMDBCache(URL)

    assert [name.endswith(".partial") for name in copied() if not name.endswith(".lock")] == [True]
    change(SHARDS[1], data)
    monkeypatch.setattr(mirror, "_PART_BYTES", len(data) // 3)
    FaultyFileSystem.reads.clear()
    FaultyFileSystem.faults[SHARDS[1]] = [raising(ConnectionError("reset")), cut, cut]
    copy_of()
    assert reads().count(SHARDS[1]) >= 3 + 3


def test_a_forged_manifest_is_refused() -> None:
    """Nothing is downloaded; the format of a later release is told as such."""
    build()
    good = json.loads(content("cache.json"))
    (shard, *others), damaged = good["shards"], (CacheCorruptError, rf"{URL}/cache.json is damaged")
    forged = [
        *(({name: value for name, value in good.items() if name != lacks}, *damaged) for lacks in good),
        ({**good, "shards": [{**shard, "name": "../../evil.lmdb"}, *others]}, *damaged),
        ({**good, "shards": [{**shard, "nbytes": -1}, *others]}, *damaged),
        ({**good, "plan": {**good["plan"], "build_id": "../../evil"}}, *damaged),
        ({**good, "version": 99}, CacheMismatchError, rf"{URL} is a cache of format 99"),
    ]
    for fields, kind, said in forged:
        change("cache.json", json.dumps(fields).encode())
        with pytest.raises(kind, match=said):
            LMDBCache(URL)
    assert copied() == []


def test_a_full_disk_ends_a_download(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variable; with more space the download goes on."""
    build()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refusing(errno.ENOSPC))
        with pytest.raises(CacheError, match=r"No space left on device.*FASTLOAD_CACHE_DIR names a diff"):
            LMDBCache(URL)
    copy_of()


@given(st.integers(0, 5000), st.binary(max_size=3))
@settings(max_examples=60)
def test_a_manifest_with_any_damage_is_refused_or_names_its_shards(position: int, noise: bytes) -> None:
    """Some bytes take the place of one; no other error than ValueError comes from damage."""
    if not FaultyFileSystem.store:
        build()
    data = content("cache.json")
    position %= len(data)
    with contextlib.suppress(ValueError):
        found = parse_manifest(data[:position] + noise + data[position + 1 :])
        assert [shard.name for shard in found.shards] == SHARDS
        assert parse_manifest(manifest_text(found)) == found


# --- several processes -----------------------------------------------------------------------------------


def test_processes_that_open_at_once_download_once(store: str, tmp_path: Path) -> None:
    """One downloads, and the others wait for it."""
    build(url=store)
    assert num_read(tmp_path / "log", store, 3) == 3
    assert len(copied()) == 1


@pytest.mark.parametrize("moment", ["removed before", "removed after", "exchanged"])
def test_a_copy_that_changes_at_its_opening_is_downloaded_again(moment: str, monkeypatch: Any) -> None:
    """Whoever may write in the directory of several users can also rename the directories in it."""
    build()
    copy, inner, opened = copy_of(), mirror.open_files, []
    good, shard = Path(shutil.copy(copy / SHARDS[0], f"{copy}.good")), copy / SHARDS[0]
    before = {"removed before": lambda: shutil.rmtree(copy), "exchanged": lambda: shard.chmod(0o666)}
    after = {"removed after": lambda: shutil.rmtree(copy), "exchanged": lambda: good.replace(shard)}

    def open_cache(path: str) -> Any:
        opened.append(path)
        if len(opened) > 1:
            return inner(path)
        before.get(moment, str)()
        found = inner(path)  # if exchanged, this has another mode than what is there later
        after.get(moment, str)()
        return found

    monkeypatch.setattr(mirror, "open_files", open_cache)
    assert copy_of() == copy
    assert opened == [str(copy)] * 2


def die_at(calls: int, method: str, run: Callable[..., Any], *args: Any) -> None:
    """Run a function, and die at a call of a method of the store's client, or of rmtree()."""
    owner: Any = upload.shutil if method == "rmtree" else LocalFileSystem
    inner, left = getattr(owner, method), [calls]

    def call(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(*args, **options)

    setattr(owner, method, call)
    run(*args)


@pytest.mark.usefixtures("needs_lmdb")
@pytest.mark.parametrize(
    ("method", "calls"),
    [
        *(("cat_file", 0), ("cat_file", 4), ("put_file", 0), ("put_file", 2), ("pipe_file", 1)),
        *(pytest.param("pipe_file", calls, marks=pytest.mark.thorough) for calls in (0, 2, 3)),
        *(("pipe_file", 4), ("rmtree", 0)),  # its own files go at the very end
    ],
)
def test_a_download_or_a_build_that_was_killed_continues(
    calls: int, method: str, store: str, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any read or upload; shards that a download has finished are not read again."""
    monkeypatch.setattr(mirror, "_AT_ONCE", 1)
    is_download = method == "cat_file"
    if is_download:
        build(url=store, shards=6)
    run = (LMDBCache, store) if is_download else (build, None, store)
    dying = functools.partial(die_at, calls, method, *run)
    assert exit_codes(dying) == [-signal.SIGKILL]
    kept = len(list(Path(mirror.mirrors_directory()).rglob("*.lmdb"))) if is_download else 0
    assert kept == (max(0, calls - 1) if is_download else 0)  # one call reads the manifest

    build(url=store, shards=None)
    # The first file that is written is the plan: without it, the next build has a plan of its own.
    num_shards = 1 if (method, calls) == ("pipe_file", 0) else 3
    assert num_read(tmp_path / "log", store) == (6 - kept if is_download else num_shards)
    copy_of(store)
    assert [name for name in copied() if "." in name] == []
    assert os.listdir(cache_dir / f"builds-{os.getuid()}") == []


# --- room ------------------------------------------------------------------------------------------------


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three URLs with caches of the same size, with room for two copies and a half."""
    urls = [f"faulty://bucket/{name}" for name in "abc"]
    nbytes = [build(url=url)[0].nbytes for url in urls]
    monkeypatch.setenv(mirror.BYTES_VARIABLE, str(nbytes[0] * 5 // 2))
    return urls


def has_copy(url: str) -> bool:
    return any(name.startswith(mirror.digest_of_url(url)) for name in copied())


def test_a_check_of_a_damaged_copy_names_its_url() -> None:
    """The name of a copy is a digest, from which nobody sees the URL; it is downloaded again."""
    build()
    shard = copy_of() / SHARDS[0]
    shard.write_bytes(shard.read_bytes().replace(Images(20).sample(0)[0].tobytes()[:9], bytes(9)))
    result = run("verify", str(shard.parent))
    assert (result.exit_code, "build" in result.stdout) == (1, False)
    assert f"`fastload cache rm {shard.parent}`, and open {URL} again" in result.stdout


def test_prune_removes_the_copies_that_nobody_uses(three: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted downloads too; not the copy that is open, nor one that was opened lately."""
    monkeypatch.delenv(mirror.BYTES_VARIABLE)
    opened = LMDBCache(three[0])
    copy_of(three[1])
    unfinished = copy_of(three[2])
    unfinished.rename(f"{unfinished}.partial")

    assert json.loads(run("prune", "--days", "1", "--yes", "--json").stdout) == {"copies": []}
    pruned = run("prune", "--yes")

    assert "removed 2 of 3 local copies" in pruned.stdout
    assert "in use" in pruned.stdout
    assert [has_copy(url) for url in three] == [True, False, False]
    opened.close()
    assert run("prune").exit_code == 2  # nobody to ask
    assert run("prune", "--yes").exit_code == 0
    assert "no local copies" in run("prune").stdout


@pytest.mark.parametrize("used", ["again", "here", "by a fork", "no more"])
def test_the_copy_that_was_not_used_for_longest_is_removed(used: str, three: list[str], start: Any) -> None:
    """The first, unless it was opened again since, or a process has it open."""
    with contextlib.closing(LMDBCache(three[0])) as first:
        second = copy_of(three[1])
        os.utime(first.path, (1, 1))
        os.utime(second, (2, 2))
        if used == "by a fork":  # the lock belongs to the open file, which the child has inherited
            start(lambda: (None, None)).answer()
        if used != "here":
            first.close()
        if used == "again":
            copy_of(three[0])
        copy_of(three[2])
        assert [has_copy(url) for url in three] == [used != "no more", used == "no more", True]


def test_no_room_is_an_error_with_the_numbers(three: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All copies are in use, or none would make enough room; what a failed download has left does."""
    FaultyFileSystem.faults[f"a/{SHARDS[2]}"] = [raising(PermissionError("denied"))]
    with pytest.raises(CacheError, match="denied"):
        LMDBCache(three[0])
    assert has_copy(three[0])
    with contextlib.closing(LMDBCache(three[1])), contextlib.closing(LMDBCache(three[2])):
        assert [has_copy(url) for url in three] == [False, True, True]
        numbers = r"takes 1\d\d\.\d kB, and all copies in .* can take .* in use take .*FASTLOAD_CACHE_BYTES"
        with pytest.raises(CacheError, match=numbers):
            LMDBCache(three[0])
    monkeypatch.setenv(mirror.BYTES_VARIABLE, "1000")
    with pytest.raises(CacheError, match=r"can take 1\.0 kB"):
        LMDBCache(three[0])
    assert [has_copy(url) for url in three] == [False, True, True]


def test_the_limit_has_the_forms_of_sizes(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default it is 80% of what is free and what copies take; what is no size names the variable."""
    build()
    os.makedirs(mirror.mirrors_directory())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 900))  # type: ignore[attr-defined]
    for text, nbytes in {"1000": 1000, "2kB": 2000, "1MiB": 1 << 20, "auto": 800, "": 800}.items():
        monkeypatch.setenv(mirror.BYTES_VARIABLE, text)
        assert mirror.quota_bytes(100) == nbytes
    for text in ("0", "-1", "many", "5 parsecs"):
        monkeypatch.setenv(mirror.BYTES_VARIABLE, text)
        with pytest.raises(ValueError, match=rf"FASTLOAD_CACHE_BYTES='{text}' is not a size"):
            LMDBCache(URL)


def test_a_copy_that_stays_is_not_locked_by_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was locked to be removed, and is kept, opens while a child has a copy of the descriptor."""
    build()
    path, copies, real = copy_of(), [], fcntl.flock
    (found,) = mirror.mirrors()
    with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(fcntl, "flock", lambda fd, how: copies.append(os.dup(fd)) or real(fd, how))
        assert mirror._locked(found, stack)
    assert LMDBCache(path).num_cached == 20
    for fd in copies:
        os.close(fd)
