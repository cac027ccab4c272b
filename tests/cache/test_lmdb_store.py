"""LmdbStore: the contract of stores, and what is LMDB's own: locks, programs, power failures, damage."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lmdb
import numpy as np
import pytest

from fastload.cache import lmdb_file, lmdb_store
from fastload.cache.build import build_files
from fastload.cache.file_cache import forget_stores, open_file_cache
from fastload.cache.inventory import list_caches
from fastload.cache.lmdb_file import META_KEY, problems_of
from fastload.cache.lmdb_store import open_store
from fastload.cache.records import decode, encode, is_intact
from fastload.errors import CacheCorruptError, CacheError, CacheMismatchError
from fastload.system.locks import flocked
from tests.cache.store_contract import StoreContract, array_of, key_of, put, record_of, right
from tests.kit.jobs import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class TestLmdbStore(StoreContract):
    """The contract, with decoded files."""

    def make(self, folder: Any) -> Any:
        return open_store(str(folder / "files.lmdb"), {"kind": "files"})


def stored(store: Any, numbers: Iterable[int]) -> list[int]:
    """Put and commit; what is there then."""
    put(store, numbers)
    store.flush()
    return right(store, numbers)


def opened(path: str) -> Any:
    """A job's store."""
    return open_store(path, {"kind": "files"}), None


def job(path: str) -> Job:
    """Another process that has the store open."""
    other = Job(opened, path)
    other.answer()
    return other


def problem(store: Any) -> Any:
    return store.problem


def in_child(work: Callable[[], Any]) -> None:
    """Run in a process of its own, which must end as usual."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            logging.exception("in a child")
        os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where the store is."""
    return str(tmp_path / "files.lmdb")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    """The warnings so far."""
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --- it is LMDB -------------------------------------------------------------------------------------------


def test_any_lmdb_program_reads_it(path: str) -> None:
    """A key has its record, and b"meta" says what it is."""
    store = open_store(path, {"kind": "files", "note": "x"})
    stored(store, range(4))
    store.finish({"more": [1]})
    store.close()
    with lmdb.open(path, subdir=False, readonly=True, lock=False) as env, env.begin() as txn:
        assert env.stat()["entries"] == 5
        assert txn.get(key_of(2)) == record_of(2)
        meta = json.loads(txn.get(META_KEY).splitlines()[0])
    assert meta == store.meta
    assert (meta["kind"], meta["note"], meta["more"], meta["finished"]) == ("files", "x", [1], True)


def test_a_process_has_one_store_for_a_file(path: str) -> None:
    """LMDB may not open one twice."""
    store = open_store(path, {"kind": "files"})
    assert open_store(path) is store
    assert pickle.loads(pickle.dumps(store)) is store
    os.symlink(path, path + "2")
    assert open_store(path + "2") is store


# --- a finished file --------------------------------------------------------------------------------------


def test_a_finished_file_is_read_and_never_written(path: str) -> None:
    """By those who had it open, too; nothing lies beside it, and nothing is made there."""
    store, other = open_store(path, {"kind": "files"}), job(path)
    try:
        stored(store, range(4))
        assert other.ask(right, range(4)) == [*range(4)]
        store.finish()
        assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]
        before = Path(path).read_bytes()
        assert put(store, [7]) == []
        assert other.ask(stored, [7, 8]) in ([], [7, 8])
        assert other.ask(right, range(9)) == [*range(4)]
    finally:
        other.end()
    assert right(store, range(9)) == [*range(4)]
    assert not store.has_room(1)
    assert Path(path).read_bytes() == before


def test_a_finished_file_is_kept_by_those_who_have_it_open(path: str) -> None:
    """Whatever is at its path: another finished file, or none; a pickled one is told that it is another."""
    store = open_store(path, {"kind": "files"})
    stored(store, range(4))
    store.finish()
    store.close()
    text = pickle.dumps(store)
    new = open_store(path + ".new", {"kind": "files"})
    stored(new, [9])
    new.finish()
    new.close()
    os.rename(path + ".new", path)
    assert right(store, range(10)) == [*range(4)]
    in_child(lambda: right(store, range(10)) == [*range(4)] or os._exit(3))
    assert "replaced" in pickle.loads(text).problem
    assert right(pickle.loads(text), range(10)) == []


@pytest.mark.parametrize("mode", [0o444, 0o400])
def test_a_finished_file_is_read_where_nothing_can_be_written(path: str, mode: int) -> None:
    """On a read-only or a network disk: without locks."""
    store = open_store(path, {"kind": "files"})
    stored(store, range(4))
    store.finish()
    del store
    os.chmod(path, mode)
    patch = pytest.MonkeyPatch()
    patch.setattr(lmdb_store, "file_system_of", lambda _: "nfs4")

    def refuse(*_: Any, **__: Any) -> bool:
        raise OSError(37, "No locks available")

    patch.setattr(lmdb_file, "flock_fd", refuse)
    try:
        store = open_store(path)
        assert right(store, range(5)) == [*range(4)]
        in_child(lambda: right(store, range(4)) == [*range(4)] or os._exit(3))
    finally:
        patch.undo()
    assert store.problem is None


# --- LMDB's lock file -------------------------------------------------------------------------------------


def _remove(path: str) -> None:
    os.unlink(path + "-lock")


def _open_and_close(path: str) -> None:
    with open(path + "-lock", "rb"):
        pass


def _replace_by_copy(path: str) -> None:
    shutil.copy(path + "-lock", path + "-copy")
    os.replace(path + "-copy", path + "-lock")


@pytest.mark.parametrize("change", [_remove, _open_and_close, _replace_by_copy])
def test_a_changed_lock_file_lets_no_commit_be_lost(path: str, change: Any, lines: Any) -> None:
    """Each of these lets two writers in, as LMDB alone has it; commits of both are there, in any order."""
    store, other = open_store(path, {"kind": "files"}), job(path)
    third = None
    try:
        stored(store, range(3))
        other.ask(stored, range(3, 6))
        change(path)
        third = job(path)
        assert third.ask(stored, range(6, 9)) == [6, 7, 8]
        assert right(store, range(9)) == [*range(9)]
        for turn in range(3):
            first = 9 + 9 * turn
            for who, numbers in zip((0, other, third), np.split(np.arange(first, first + 9), 3), strict=True):
                numbers = numbers.tolist()
                assert (who.ask(stored, numbers) if who else stored(store, numbers)) == numbers
            change(path)
        everything = [*range(36)]
        assert right(store, everything) == everything
        assert other.ask(right, everything) == third.ask(right, everything) == everything
    finally:
        other.end()
        if third is not None:
            third.end()
    assert problems_of(store._fd) == []
    assert lines() == []


def test_a_lock_file_of_an_older_state_overwrites_no_commit(path: str) -> None:
    """Copied back in place, it names an old transaction, from which LMDB would go on."""
    store = open_store(path, {"kind": "files"})
    stored(store, [0])
    old = Path(path + "-lock").read_bytes()
    for number in range(1, 5):
        stored(store, [number])
    with open(path + "-lock", "r+b") as file:  # as rsync --inplace
        file.write(old)
    assert stored(store, [5]) in ([], [5])
    store.close()
    del store
    assert right(open_store(path), range(5)) == [*range(5)]
    assert problems_of(open_store(path)._fd) == []


def test_copies_of_both_files_are_a_store_of_their_own(path: str) -> None:
    """Also while the original is open."""
    store = open_store(path, {"kind": "files"})
    stored(store, range(3))
    shutil.copy(path, path + "2")
    shutil.copy(path + "-lock", path + "2-lock")
    copy = open_store(path + "2")
    assert stored(copy, [3]) == [3]
    assert stored(store, [4]) == [4]
    assert right(store, range(6)) == [0, 1, 2, 4]
    assert right(copy, range(6)) == [0, 1, 2, 3]


# --- another file, or another name ------------------------------------------------------------------------


def test_a_hard_link_is_not_filled(path: str, lines: Any) -> None:
    """By two names, it would have two lock files. One line, and no cache."""
    store = open_store(path, {"kind": "files"})
    stored(store, range(3))
    os.link(path, path + "2")
    assert stored(store, [5]) == []
    assert right(store, range(3)) == []
    in_child(lambda: stored(open_store(path + "2"), [6]) == [] or os._exit(3))
    assert lines() == [f"cache: {path} is not used: it has a hard link"]


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_file_that_is_filled_is_left_when_another_one_is_in_its_place(
    path: str, is_removed: bool, lines: Any
) -> None:
    """It is not written, and after a fork it is not read, since its path is all that leads to it."""
    store = open_store(path, {"kind": "files"})
    stored(store, range(3))
    os.rename(path, path + ".old")
    if not is_removed:
        shutil.copy(path + ".old", path)
    before = None if is_removed else Path(path).read_bytes()
    assert right(store, range(3)) == [*range(3)]
    in_child(lambda: right(store, range(3)) == [] or os._exit(3))
    assert stored(store, [5]) == []
    assert os.path.exists(path) is not is_removed
    assert before is None or Path(path).read_bytes() == before
    assert store.problem == ("it was removed" if is_removed else "another file is in its place")
    assert len(lines()) <= 1  # the child has told it


def test_a_file_that_the_user_has_open_here_is_not_used(path: str, lines: Any) -> None:
    """Through py-lmdb: before, and between a fork and the next access."""
    stored(open_store(path, {"kind": "files"}), range(3))
    with lmdb.open(path, subdir=False):
        cache = open_file_cache(f"lmdb:{path}")
        assert "now 0 decoded files" in cache.explain()
        store = cache.store
        assert right(store, range(3)) == stored(store, range(3)) == []
        cache.close()
        forget_stores()
        in_child(lambda: right(store, range(3)) == [] or os._exit(3))
    assert lines() == [
        f"cache: {path} is not used: it is open in this process through py-lmdb, so close it there"
    ]
    del store, cache
    store = open_store(path)
    store.close()
    with lmdb.open(path, subdir=False):
        assert right(store, range(3)) == []
    assert "py-lmdb" in store.problem


_MAKES_ONE = (
    "import sys; from fastload.cache.decoded_files import open_files; open_files(sys.argv[1]).close()"
)


def test_a_file_that_the_user_has_open_here_is_listed_and_not_built_on(path: str) -> None:
    """With the reason; a build is refused, and changes nothing."""
    subprocess.run([sys.executable, "-c", _MAKES_ONE, path], check=True)
    with lmdb.open(path, subdir=False):
        (found,) = list_caches(path)
        assert (found.state, found.store) == ("unreadable", None)
        assert "open in this process through py-lmdb" in str(found.problem)
        with pytest.raises(CacheError, match="open in this process through py-lmdb"):
            build_files([1], path, num_workers=0, progress=False)


# --- namespaces, limits, other disks ----------------------------------------------------------------------


def test_another_pid_namespace_is_refused(path: str) -> None:
    """LMDB knows processes by their ids. Once nobody of the first one is left, the next one takes over."""
    libc = ctypes.CDLL(None)

    def namespaced(work: Callable[[], Any]) -> None:
        def enter() -> None:
            if libc.unshare(0x20000000):  # CLONE_NEWPID, for children
                os._exit(0)
            in_child(work)

        in_child(enter)

    def is_refused() -> None:
        other = open_store(path)
        assert stored(other, [4]) == []
        assert "PID namespace" in str(other.problem)

    store = open_store(path, {"kind": "files"})
    stored(store, range(3))
    namespaced(is_refused)  # inherits the store
    del store
    holder = job(path)
    holder.ask(right, [0])
    namespaced(is_refused)  # inherits nothing
    assert holder.ask(stored, [5]) == [5]
    holder.end()
    namespaced(lambda: stored(open_store(path), [6]) == [6] or os._exit(3))
    assert right(open_store(path), range(7)) in (
        [0, 1, 2, 5, 6],
        [0, 1, 2, 5],
    )  # without the right to unshare


def limited(path: str, free_bytes: int) -> Any:
    """A store in a process that has so much address space left."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit_bytes = pages * resource.getpagesize() + free_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    return open_store(path, {"kind": "files"}), None


def test_little_address_space_is_enough_or_no_cache(path: str) -> None:
    """The map is small, grows when another process has outgrown it, and ends in no cache, not in an error."""
    store, small = open_store(path, {"kind": "files"}), Job(limited, path, 96 << 20)
    small.answer()
    try:
        assert small.ask(stored, range(4)) == [*range(4)]
        stored(store, range(4, 60))  # 24 MB
        assert small.ask(right, range(60)) == [*range(60)]
        assert small.ask(stored, [60, 61]) == [60, 61]
        assert right(store, range(62)) == [*range(62)]
        assert small.ask(problem) is None
        os.truncate(path, 1 << 33)  # sparse; and the tree outgrows the address space
        number = 62
        while os.stat(path).st_blocks * 512 < 110 << 20:
            assert len(stored(store, range(number, number + 40))) == 40
            number += 40
        assert small.ask(right, [0]) == []
        assert small.ask(stored, [1]) == []
        assert "ulimit -v" in small.ask(problem)
    finally:
        small.end()


def test_a_file_on_a_network_disk_is_not_filled(
    path: str, lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, and no cache; nothing is made beside it."""
    stored(open_store(path, {"kind": "files"}), range(3))
    monkeypatch.setattr(lmdb_store, "file_system_of", lambda _: "nfs4")
    for name in os.listdir(os.path.dirname(path)):
        if name != os.path.basename(path):
            os.unlink(os.path.join(os.path.dirname(path), name))
    store = open_store(path)
    assert right(store, range(3)) == stored(store, [5]) == []
    assert not store.has_room(1)
    assert len(lines()) == 1
    assert "on a file system of kind nfs4" in lines()[0]
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]


def test_more_processes_than_readers_are_no_error(
    path: str, lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that find no place read nothing."""
    monkeypatch.setattr(lmdb_store, "_MAX_READERS", 1)
    store = open_store(path, {"kind": "files"})
    stored(store, range(3))
    right(store, [0])
    other = job(path)
    try:
        assert other.ask(right, [0]) in ([], [0])
        other.ask(stored, [4])
    finally:
        other.end()
    assert right(store, [0]) == [0]


# --- turns, and what is pending ---------------------------------------------------------------------------


class OtherCommits:
    """Another process that takes its turn, until the end of the block."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        self._job = Job(held, self._path)
        self._job.answer()

    def __exit__(self, *_: object) -> None:
        self._job.end()


def held(path: str) -> Any:
    """A job that holds the lock of a file."""
    fd = os.open(path, os.O_RDONLY)
    lmdb_file.flock_fd(fd)
    return fd, None


def test_nobody_waits_for_the_commit_of_another_process(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records stay pending, and are read here, until there is a turn; above a limit they are not kept."""
    monkeypatch.setattr(lmdb_store, "_PENDING_BYTES", 1 << 20)
    store = open_store(path, {"kind": "files"})
    stored(store, [0])
    with OtherCommits(path):
        kept = put(store, range(1, 40))
        assert 3 < len(kept) < 39
        assert right(store, range(40)) == [0, *kept]
        assert store._pending_bytes <= 1 << 20
        assert not store.has_room(1 << 20)
    in_child(lambda: right(store, range(40)) == [0] or os._exit(3))  # nothing was committed
    store._try_at_s = 0.0
    assert right(store, [0]) == [0]  # which commits the rest
    in_child(lambda: right(store, range(40)) == [0, *kept] or os._exit(3))
    assert put(store, range(1, 40)) == [*range(1, 40)]


@pytest.mark.parametrize("state", ["filled", "after a power failure", "new"])
def test_a_file_whose_lock_is_never_free_is_not_used(
    state: str, path: str, lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a stopped process: a job says why it waits, at last does without, and changes nothing."""
    monkeypatch.setattr(lmdb_file, "_QUIET_S", 0.0)
    monkeypatch.setattr(lmdb_file, "WAIT_S", 0.01)
    if state == "new":
        Path(path).touch()
    else:
        stored(open_store(path, {"kind": "files"}), [0])
    if state == "after a power failure":
        Path(path + "-boot").write_text("another boot")
    before = Path(path).read_bytes()
    with OtherCommits(path):
        cache = open_file_cache(f"lmdb:{path}")
    forget_stores()
    assert "lock" in str(problem(cache.store))
    assert [path in line for line in lines()] == [True, True]
    assert "stopped" in lines()[0]
    assert Path(path).read_bytes() == before


def test_pending_records_of_all_processes_take_a_share_of_the_free_memory(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sixteenth, of all processes that have the file open."""
    monkeypatch.setattr(lmdb_store, "available_bytes", lambda: 64 << 20)
    jobs = [job(path) for _ in range(4)]
    try:
        for each in jobs:
            each.ask(right, [0])
        limits = [each.ask(max_pending) for each in jobs]
        store = open_store(path)
        right(store, [0])
        assert max_pending(store) <= (4 << 20) // 5
        assert sum(sorted(limits)[:-1]) <= 4 << 20
    finally:
        for each in jobs:
            each.end()


def max_pending(store: Any) -> int:
    """How many bytes of a process may be pending."""
    return int(store._max_pending_bytes)


def test_a_fork_commits_nothing(path: str) -> None:
    """Neither before, nor in the child; the parent's pending records are its own."""
    store = open_store(path, {"kind": "files"})
    stored(store, [0])
    put(store, [1])

    def child() -> None:
        assert right(store, [0, 1]) == [0]
        store.flush()
        assert right(store, [0, 1]) == [0]

    in_child(child)
    assert store._pending
    assert right(store, [0, 1]) == [0, 1]


def test_a_process_that_ends_does_not_wait_for_ever(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its turn: a second, then what is pending is not stored."""
    monkeypatch.setattr(lmdb_store, "_CLOSE_S", 0.01)
    store = open_store(path, {"kind": "files"})
    stored(store, [0])
    put(store, [1])
    with OtherCommits(path):
        store.close()
        in_child(lambda: right(store, [0, 1]) == [0] or os._exit(3))


# --- kills ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["in the transaction", "before it", "behind it"])
def test_a_kill_within_a_commit_leaves_the_file_whole(path: str, place: str) -> None:
    """The next process takes its turn, and finds all that was committed."""
    store = open_store(path, {"kind": "files"})
    stored(store, range(3))

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def killed() -> None:
        written, put_pending = store._written, store._put_pending
        if place == "before it":
            store._written = lambda _: kill()
        elif place == "behind it":
            store._written = lambda change: (written(change), kill())
        else:
            store._put_pending = lambda txn: (put_pending(txn), kill())
        put(store, range(3, 20))
        store.flush()

    for _ in range(2):
        pid = os.fork()
        if not pid:
            killed()
            os._exit(1)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
        there = right(store, range(20))
        assert there == ([*range(20)] if place == "behind it" else [0, 1, 2])
    assert stored(store, range(20)) == [*range(20)]
    assert problems_of(store._fd) == []


def writes_for_ever(path: str, seed: int) -> None:
    """Store and read at random; anything wrong ends the process with 1."""
    rng, store, parent = random.Random(seed), open_store(path), os.getppid()
    while os.getppid() == parent:
        number = rng.randrange(200)
        if not right(store, [number]):
            put(store, [number])
        if rng.random() < 0.1:
            store.flush()
        if rng.random() < 0.02:
            pid = os.fork()
            if not pid:
                os._exit(right(store, [number]) not in ([], [number]))
            os.waitpid(pid, 0)


@pytest.mark.slow
def test_kills_at_random_moments_leave_the_file_whole(path: str) -> None:
    """Of processes that read, write and fork; nobody else ends, and nothing is wrong."""
    store, rng = open_store(path, {"kind": "files"}), random.Random(0)
    stored(store, [0])
    pids: list[int] = []
    try:
        for _ in range(15):
            while len(pids) < 3:
                seed, pid = rng.randrange(1 << 30), os.fork()
                if not pid:
                    try:
                        writes_for_ever(path, seed)
                    finally:
                        os._exit(1)
                pids.append(pid)
            before = len(right(store, range(200)))
            pid = pids.pop(rng.randrange(3))
            os.kill(pid, signal.SIGKILL)
            assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
            assert len(right(store, range(200))) >= before
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert problems_of(store._fd) == []


def reads(path: str, until: int) -> None:
    """Read until all is there; each is right."""
    store = open_store(path)
    while len(right(store, range(0, until, 7))) < len(range(0, until, 7)):
        time.sleep(0.001)


def writes(path: str, numbers: range) -> None:
    """Store some numbers."""
    store = open_store(path)
    for number in numbers:
        put(store, [number])
    store.flush()  # close() gives up after a second, and readers would wait for ever
    store.close()


def test_nothing_is_lost_while_another_process_commits(path: str) -> None:
    """Not even what a process puts before it has opened the file."""
    store = open_store(path, {"kind": "files"})
    with flocked(store._turn):
        assert put(store, range(3)) == [0, 1, 2]
    assert stored(store, range(3)) == [0, 1, 2]


@pytest.mark.slow
def test_sixty_four_readers_and_sixteen_writers_share_a_file(path: str) -> None:
    """All that was written is there, and nothing is wrong."""
    stored(open_store(path, {"kind": "files"}), [0])
    pids = []
    for number in range(80):
        pid = os.fork()
        if not pid:
            try:
                reads(path, 160) if number < 64 else writes(path, range(number - 64, 160, 16))
                os._exit(0)
            finally:
                os._exit(1)
        pids.append(pid)
    try:
        while pids:  # first the writers, or readers would wait for what failed
            assert os.waitpid(pids[-1], 0)[1] == 0
            pids.pop()
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    store = open_store(path)
    assert right(store, range(160)) == [*range(160)]
    assert problems_of(store._fd) == []


# --- power failures ---------------------------------------------------------------------------------------


def damage(path: str, record: bytes) -> None:
    """Change a byte in the middle of a record."""
    content = bytearray(Path(path).read_bytes())
    content[content.index(record) + len(record) // 2] ^= 0x55
    Path(path).write_bytes(content)


def test_a_marker_is_there_while_commits_are_not_synced(path: str) -> None:
    """It names the boot of the system."""
    store, marker = open_store(path, {"kind": "files"}), Path(path + "-boot")
    assert not marker.exists()
    stored(store, [0])
    assert marker.read_bytes().decode() in Path("/proc/sys/kernel/random/boot_id").read_text()
    store.sync()
    assert not marker.exists()
    stored(store, [1])
    assert marker.exists()
    store.finish()
    assert not marker.exists()


@pytest.mark.parametrize("what", ["nothing", "a record", "the tree", "the end"])
def test_after_a_power_failure_only_what_is_damaged_is_discarded(path: str, what: str, lines: Any) -> None:
    """Before LMDB reads the file."""
    store = open_store(path, {"kind": "files"})
    stored(store, range(8))
    store.close()
    del store
    Path(path + "-boot").write_text("another boot")
    if what == "a record":
        damage(path, record_of(2))
    elif what == "the tree":
        content = bytearray(Path(path).read_bytes())
        content[2 * 4096 : 2 * 4096 + 4096] = bytes(4096)
        content[content.index(key_of(5)) - 8 :][:8] = b"\xff" * 8
        for at in range(2 * 4096, len(content), 4096):
            if key_of(5) in content[at : at + 4096] and content[at + 10] == 2:  # its leaf
                content[at : at + 4096] = bytes(4096)
        Path(path).write_bytes(content)
    elif what == "the end":
        os.truncate(path, os.path.getsize(path) // 2)
    if what in ("the tree", "the end"):
        with pytest.raises(CacheCorruptError, match="when the system went down"):
            open_store(path)
    store = open_store(path, {"kind": "files"})
    left = {"nothing": [*range(8)], "a record": [0, 1, *range(3, 8)]}.get(what, [])
    assert right(store, range(8)) == left
    assert not os.path.exists(path + "-boot")
    assert stored(store, range(8)) == [*range(8)]
    assert len(lines()) == (3 if what in ("the tree", "the end") else 2)


def test_a_file_whose_maker_was_killed_is_made(path: str) -> None:
    """It is empty, or has no `meta`."""
    Path(path).touch()
    assert stored(open_store(path, {"kind": "files"}), [1]) == [1]
    os.unlink(path)
    lmdb.open(path, subdir=False, lock=False).close()
    assert stored(open_store(path, {"kind": "files"}), [1]) == [1]


# --- damage, and other files ------------------------------------------------------------------------------


def opening(path: str) -> str:
    """What opening a file and reading it comes to."""
    try:
        store = open_store(path, {"kind": "files"})
        for number in range(8):
            record = store.get(key := key_of(number))
            if record is not None and is_intact(record, key):
                assert np.array_equal(decode(record), array_of(number))
    except CacheError as error:
        cures = "remove it", "different path"
        return "error" if path in str(error) and any(cure in str(error) for cure in cures) else repr(error)
    return "read"


def test_a_truncated_file_is_an_error_that_says_so(path: str) -> None:
    """At any size; LMDB would crash."""
    store = open_store(path, {"kind": "files"})
    stored(store, range(8))
    store.finish()
    nbytes = os.path.getsize(path)
    del store
    whole = Path(path).read_bytes()

    def opens() -> None:
        for size in (1, 100, 4096, 8191, 8192, 8193, 12288, nbytes // 2, nbytes - 4096, nbytes - 1):
            Path(path).write_bytes(whole[:size])
            assert opening(path) == "error"

    in_child(opens)


@pytest.mark.parametrize("what", ["text", "zeros", "noise", "database", "older", "newer", "folder"])
def test_something_else_at_the_path_is_an_error(path: str, what: str) -> None:
    """It names the file and what to do, and the file stays as it was."""
    rng = random.Random(0)
    if what == "folder":
        os.mkdir(path)
    elif what in ("text", "zeros", "noise"):
        content = {"text": b"mine\n" * 5000, "zeros": bytes(50_000), "noise": rng.randbytes(50_000)}[what]
        Path(path).write_bytes(content)
    else:
        meta = {"older": {"version": 4}, "newer": {"version": 99, "uuid": "0", "finished": True}}.get(what, 1)
        with lmdb.open(path, subdir=False, lock=False) as env, env.begin(write=True) as txn:
            txn.put(META_KEY if what != "database" else b"key", json.dumps(meta).encode())
    before = None if what == "folder" else Path(path).read_bytes()
    with pytest.raises(CacheMismatchError, match="use a different path") as raised:
        open_store(path, {"kind": "files"})
    assert path in str(raised.value)
    assert before is None or Path(path).read_bytes() == before


def test_a_missing_file_is_an_error_that_names_it(path: str) -> None:
    """And so is a folder that is missing."""
    with pytest.raises(FileNotFoundError, match=path):
        open_store(path)
    with pytest.raises(CacheError, match="No such file or directory: check that the directory"):
        open_store(path + "/a/b", {"kind": "files"})


def test_a_damaged_record_is_replaced(path: str, lines: Any) -> None:
    """After whoever read it has said so; one line."""
    store = open_store(path, {"kind": "files"})
    stored(store, range(4))
    damage(path, record_of(1))
    store.discard(key_of(1))
    assert right(store, range(4)) == [0, 2, 3]
    assert put(store, [1]) == [1]
    assert right(store, range(4)) == [*range(4)]
    store.flush()
    in_child(lambda: right(store, range(4)) == [*range(4)] or os._exit(3))
    store.discard(key_of(2))
    assert len(lines()) == 1
    assert "damaged" in lines()[0]


def test_all_records_are_checked(path: str) -> None:
    """Each with its key, its size, and whether it is intact."""
    store = open_store(path, {"kind": "files"})
    stored(store, range(4))
    damage(path, record_of(1))
    found = {key: (nbytes, is_right) for key, nbytes, is_right in store.checked()}
    assert found == {key_of(number): (len(record_of(number)), number != 1) for number in range(4)}


# --- a full disk ------------------------------------------------------------------------------------------


def full(path: str, limit_bytes: int) -> Any:
    """A store whose file cannot become larger, as with `ulimit -f`."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    return open_store(path, {"kind": "files"}), None


@pytest.mark.parametrize("limit_bytes", [30_000, 3 << 20])
def test_a_full_disk_ends_storing_and_nothing_else(path: str, limit_bytes: int) -> None:
    """What was stored is there and later, and others go on when there is space."""
    open_store(path, {"kind": "files"}).close()
    small = Job(full, path, limit_bytes)
    small.answer()
    try:
        there = small.ask(stored, range(3))
        assert small.ask(stored, range(3, 40)) == []
        assert small.ask(right, range(3)) == there
        assert small.ask(problem) is not None
    finally:
        small.end()
    store = open_store(path)
    assert right(store, range(40)) == there
    assert stored(store, range(40)) == [*range(40)]
    assert problems_of(store._fd) == []


def test_a_full_disk_ends_no_process_that_opens_a_file(
    path: str, monkeypatch: pytest.MonkeyPatch, lines: Any
) -> None:
    """LMDB writes to a mapping of its lock file, for which there is no room; one that has room is used."""
    stored(open_store(path, {"kind": "files"}), range(3))
    real = os.fstatvfs
    monkeypatch.setattr(os, "fstatvfs", lambda fd: os.statvfs_result((*real(fd)[:3], 0, 0, *real(fd)[5:])))
    for num_found, size in ((3, None), (0, 8192)):
        open_store(path).close()
        if size is not None:
            Path(path + "-lock").write_bytes(b"")
            os.truncate(path + "-lock", size)
        assert len(right(open_store(path), range(3))) == num_found
    assert len(lines()) == 1
    assert "its disk is full" in lines()[0]
    assert os.stat(path + "-lock").st_size == 8192


def test_a_file_that_the_disk_has_no_room_for_is_not_called_damaged(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the directory, and how much is free there."""

    def denied(*_: Any, **options: Any) -> Any:
        raise lmdb.DiskError("No space left on device")

    monkeypatch.setattr(lmdb, "open", denied)
    with pytest.raises(CacheError, match="No space left on device: check that the directory") as raised:
        open_store(path, {"kind": "files"})
    assert type(raised.value) is CacheError


def test_a_part_of_the_disk_stays_free(path: str, monkeypatch: pytest.MonkeyPatch, lines: Any) -> None:
    """For checkpoints, say. One line, and after a while it is tried again."""
    store = open_store(path, {"kind": "files"})
    monkeypatch.setattr(lmdb_store, "FREE_SHARE", 1.0)
    monkeypatch.setattr(lmdb_store, "FREE_MAX_BYTES", 1 << 62)
    assert stored(store, range(3)) == []
    assert put(store, range(3)) == []
    assert len(lines()) == 1
    assert "a twentieth of the disk" in lines()[0]
    monkeypatch.undo()
    store._write_at_s = 0.0
    assert stored(store, range(3)) == [*range(3)]
    assert store.problem is None
    monkeypatch.setattr(lmdb_store, "FREE_SHARE", 1.0)
    monkeypatch.setattr(lmdb_store, "FREE_MAX_BYTES", 1 << 62)
    with pytest.raises(CacheError, match="cannot finish"):
        store.finish()


def test_a_record_that_lmdb_cannot_hold_is_not_kept(path: str, lines: Any) -> None:
    """A key that is too long; the other records are not lost."""
    store = open_store(path, {"kind": "files"})
    key = b"k" * 1000
    store.put(key, [encode(1, key)])
    assert stored(store, range(3)) in ([], [*range(3)])
    assert store.get(key) is None
