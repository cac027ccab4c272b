"""The store of decoded files: what comes back, how it grows and lets go, and who shares it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import shutil
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fastload.cache.file_cache import FileCache
from fastload.cache.ram import arena, registry
from fastload.cache.ram import store as ram_store
from fastload.cache.ram.store import SharedStore, Use, open_store
from fastload.cache.records import encode
from fastload.errors import SharedMemoryError
from fastload.memory import segment
from fastload.system import budget
from fastload.system.locks import flock_fd
from fastload.system.logs import say_once
from tests.kit import faults
from tests.kit.numbered_files import KB, array_of, files_in, key_of, put, right

if TYPE_CHECKING:
    from collections.abc import Iterable

MB = 1 << 20
pytestmark = pytest.mark.usefixtures("registry_folder", "small_tables")


def put_until_full(store: Any) -> list[int]:
    """Store files until some are not taken; those that were."""
    records = {number: encode((array_of(number), b"%d" % number)) for number in range(300)}
    return [
        number for number, record in records.items() if store._append(key_of(number), [record], len(record))
    ]


def refuse_to_map(*_: Any, **__: Any) -> Any:
    raise SharedMemoryError("no address space")


def no_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.DIRECTORY_VARIABLE, "/proc/no/such")


def shared() -> SharedStore:
    return SharedStore(MB)


# --- what comes back --------------------------------------------------------------------------------------


def test_files_are_stored_up_to_the_limit() -> None:
    """Then they are decoded; what is stored stays right."""
    store = shared()
    taken = put(store, range(300))
    assert 0.8 * MB < store.nbytes <= MB == store.max_bytes
    assert 80 < len(taken) < 130
    assert right(store, range(300)) == taken
    assert store.num_files == len(taken)


def test_arrays_outlive_the_store() -> None:
    """After close(), reads are misses and nothing is stored; arrays that were handed out have not changed."""
    store = shared()
    assert put(store, range(5)) == list(range(5))
    arrays = [files_in(store).get(key_of(number)).array for number in range(5)]
    store.close()
    store.poll()
    assert right(store, range(5)) == put(store, range(5)) == []
    del store
    gc.collect()
    assert all(np.array_equal(array, array_of(number)) for number, array in enumerate(arrays))


def test_the_table_takes_little_memory(monkeypatch: Any) -> None:
    """Through several levels, under 300 bytes for each file beside the pixels."""
    monkeypatch.setattr(ram_store, "_MIN_TABLE_BYTES", 16 * MB)
    store = SharedStore(16 * MB)
    pixels = np.zeros(640, np.uint8)
    numbers = range(4000)
    files = files_in(store)
    assert all(files.put(key_of(number), pixels + number % 251, (number,)) for number in numbers)
    assert len(store._tables[0]._levels) > 2
    stored: Any = [files.get(key_of(number)) for number in numbers]
    assert [each.note for each in stored] == [(number,) for number in numbers]
    assert all(store.get(key_of(-1 - number)) is None for number in numbers)
    assert store.num_files == 4000
    assert store.nbytes / 4000 - 640 < 300


def test_keys_that_share_an_entry_are_told_apart() -> None:
    """The key in the record decides; the search goes on behind another one."""
    store = shared()
    keys = [key_of(0)[:8] + bytes([number]) + key_of(0)[9:] for number in range(20)]
    sizes = store._tables[0].fields["levels"]
    assert all(len({int.from_bytes(key, "little") % size for key in keys}) == 1 for size in sizes)
    files = files_in(store)
    assert all(files.put(key, np.full(9, number), number) for number, key in enumerate(keys[1:]))
    assert [stored and stored.note for stored in map(files.get, keys)] == [None, *range(19)]


# --- several processes ------------------------------------------------------------------------------------


def opened(numbers: Iterable[int] = ()) -> Any:
    """A job opens the store and fills it."""
    store = shared()
    return store, put(store, numbers)


def told(store: Any, work: str, numbers: Any) -> Any:
    """A job stores, or reads and compares."""
    return {"put": put, "right": right}[work](store, numbers)


def num_tables(store: Any) -> int:
    store.poll()
    return len(store._tables)


def test_jobs_share_what_they_decode_in_both_directions(start: Any) -> None:
    """With no agreement about datasets; each finds the tables that the other makes later on."""
    first = start(opened, range(10))
    assert first.answer() == list(range(10))
    mine = shared()
    assert right(mine, range(12)) == list(range(10))
    assert put(mine, range(10, 60)) == list(range(10, 60))
    assert first.ask(told, "right", range(60)) == list(range(60))
    assert first.ask(told, "put", range(60, 100)) == list(range(60, 100))
    assert right(mine, range(100)) == list(range(100))
    assert len(mine._tables) == first.ask(num_tables) == 8


def work_in_worker(store: Any, pipe: Any) -> None:
    """Store files as often as the owner likes."""
    while pipe.recv():
        store._look(time.monotonic())  # interpreters that start have not been told to look at each access
        pipe.send((put(store, range(100)), right(store, range(100))))


def retire(name: str) -> None:
    """Let all processes let go of what they hold under a name."""
    for _, held in registry.arenas(name):
        held.retire()
        held.close()


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_workers_fill_the_tables_of_their_owner(method: str, monkeypatch: Any) -> None:
    """Those that they were started with, and those that it makes later on; they make none."""
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        multiprocessing.forkserver._forkserver._stop()  # it can have other limits
    store = SharedStore(2 * MB)
    pipe, other = context.Pipe()
    worker = context.Process(target=work_in_worker, args=(store, other))
    worker.start()
    other.close()
    for _ in range(2):
        pipe.send(True)
        assert pipe.recv() == (list(range(100)), list(range(100)))
        assert right(store, range(100)) == list(range(100))
        assert {entry.pid for entry in registry.entries()} == {os.getpid()}
        retire(store._name)
        assert right(store, range(100)) == []
        store.poll()
    pipe.send(False)
    worker.join()
    pipe.close()
    worker.close()


def test_a_fork_that_goes_on_by_itself_can_be_found(start: Any) -> None:
    """From its first poll on, it holds the store for others, as its parent did."""
    store = shared()
    put(store, range(5))
    job = start(lambda: (store, num_tables(store)))
    job.answer()
    store.close()
    gc.collect()
    assert {entry.pid for entry in registry.entries()} == {job.pid}
    assert right(shared(), range(5)) == list(range(5))


def test_a_pickle_that_outlives_the_process_is_the_store_of_the_machine(monkeypatch: Any) -> None:
    """A checkpoint has no handle in it; it opens what is there, with its own limit."""
    store = shared()
    put(store, range(5))
    again = pickle.loads(pickle.dumps(store))
    assert right(again, range(5)) == list(range(5))
    assert again.max_bytes == MB


def test_writers_at_the_same_time_take_different_entries(monkeypatch: Any) -> None:
    """One that comes to the same place while another writes; of the same file, either record is right."""
    one, two, write = shared(), shared(), arena.Arena.write
    keys = [key_of(0)[:8] + bytes([number]) + key_of(0)[9:] for number in range(3)]

    def meanwhile(*args: Any) -> None:
        monkeypatch.setattr(arena.Arena, "write", write)
        assert files_in(two).put(keys[1], array_of(1), 1)
        assert files_in(two).put(keys[0], array_of(0), 0)
        write(*args)

    monkeypatch.setattr(arena.Arena, "write", meanwhile)
    assert files_in(one).put(keys[0], array_of(0), 0)
    for store in (one, two):
        found: Any = [files_in(store).get(key) for key in keys]
        assert [stored and stored.note for stored in found] == [0, 1, None]
        assert np.array_equal(found[0].array, array_of(0))
        assert np.array_equal(found[1].array, array_of(1))


def test_while_somebody_holds_a_lock_files_are_read_and_stored_elsewhere() -> None:
    """Nobody waits long, as for a process that was stopped; when the locks are free, files are stored."""
    store = shared()
    put(store, range(5))
    fds = [table.segment.reopen() for table in store._tables]
    assert all(map(flock_fd, fds))
    assert put(store, range(10)) == right(store, range(10)) == list(range(5))
    os.close(fds.pop())
    assert put(store, range(7)) == list(range(7))
    for fd in fds:
        os.close(fd)
    assert put(store, range(10)) == list(range(10))
    assert store._tables[-1].num_records == 2


def test_while_somebody_holds_the_registry_a_store_opens_all_the_same(monkeypatch: Any) -> None:
    """It finds what is there; a process that polls does not wait."""
    monkeypatch.setattr(registry, "_CREATION_WAIT_S", 0.01)
    monkeypatch.setattr(ram_store, "_IDLE_S", -1.0)
    first = shared()
    stored = put_until_full(first)
    with registry.creating() as is_alone:
        assert is_alone
        assert right(shared(), range(5)) == list(range(5))
        tables = first._tables
        assert len(put(first, range(500, 520))) < 10
        assert first._tables == tables
    assert len(put(first, range(500, 600))) > 80
    assert len(right(first, stored)) < len(stored)


def test_a_process_that_sees_other_files_has_another_store(start: Any) -> None:
    """A mount namespace has a store of its own."""
    put(mine := shared(), range(5))

    def elsewhere() -> Any:
        if not faults.mount_over("/mnt"):
            return None, None
        store = shared()
        return store, (right(store, range(5)), store._name)

    answer = start(elsewhere).answer()
    if answer is None:
        pytest.skip("this user makes no namespaces")
    assert answer[0] == []
    assert answer[1] != mine._name


@pytest.mark.parametrize("limit", [2 * MB, MB // 2])
def test_the_larger_of_two_limits_holds(limit: int, start: Any) -> None:
    """A job with a smaller limit reads and fills what is there, and makes no more; it says so."""
    job = start(opened, range(200))
    stored = job.answer()
    mine = SharedStore(limit)
    assert right(mine, range(200)) == stored
    more = put(mine, range(1000, 1200))
    assert (len(more) > 80) == (limit > MB)
    assert mine.nbytes <= max(limit, MB)
    assert ("larger limit" in FileCache(mine).explain()) == (limit < MB)


# --- values of any size -----------------------------------------------------------------------------------


def test_a_value_larger_than_a_table_is_not_kept() -> None:
    """A store holds few of those at most; it makes no room for them, and small ones are stored."""
    store = shared()
    assert store._table_bytes == 128 * KB
    files = files_in(store)
    assert not files.has_room(400 * KB)
    assert not files.put(key_of(1), array_of(1, 400 * KB), 1)
    assert not store.is_short
    assert files.put(key_of(2), array_of(2, 100 * KB), 2)
    assert put(store, range(10, 50)) == list(range(10, 50))


# --- letting go -------------------------------------------------------------------------------------------


def test_a_dataset_that_nobody_reads_makes_room_for_the_next_one(monkeypatch: Any, start: Any) -> None:
    """A table that was idle goes as a whole; another job lets go of it, and arrays stay as they are."""
    job = start(opened, range(200))
    stored = job.answer()
    mine: Any = SharedStore(MB)
    held = [(number, files_in(mine).get(key_of(number)).array) for number in stored]
    assert put(mine, range(1000, 1010)) == []
    monkeypatch.setattr(ram_store, "_IDLE_S", -1.0)
    taken = put(mine, range(1000, 1200))
    assert len(taken) > 80
    assert right(mine, range(1000, 1200))
    assert len(right(mine, stored)) < 20
    assert len(job.ask(told, "right", range(1000, 1200))) > 80  # in tables that are not retired yet
    job.kill()
    gc.collect()
    assert mine.nbytes <= MB
    assert all(np.array_equal(array, array_of(number)) for number, array in held)


@pytest.fixture
def now_s(monkeypatch: Any) -> list[float]:
    """The time of stores, which passes when a test says so."""
    now_s = [time.monotonic()]
    monkeypatch.setattr(arena, "_TOUCH_EVERY_S", 0.0)
    monkeypatch.setattr(ram_store.time, "monotonic", lambda: now_s[0])
    return now_s


def read_epoch(store: Any, use: Use, now_s: list[float], numbers: Any, ended: bool = True) -> list[int]:
    """A loader reads files in an epoch of a second, and stores what has room; what is there at the end."""
    store.poll(use)
    now_s[0] += 0.5
    put(store, numbers)
    store.poll(use)
    there = right(store, numbers)
    now_s[0] += 0.5
    store.poll(use)
    if ended:
        use.end_epoch()
    return there


def test_what_a_training_used_outlives_a_long_validation(now_s: list[float]) -> None:
    """However much it reads, and although nobody hits the training's tables; they go with its loader."""
    store, training, validation = shared(), Use(), Use()
    stored = read_epoch(store, training, now_s, range(200))
    for _ in range(8):
        now_s[0] += 200
        assert read_epoch(store, validation, now_s, range(1000, 1010)) == []
    assert right(store, range(200)) == stored
    store.poll()
    del training
    gc.collect()
    now_s[0] += 301
    assert len(read_epoch(store, validation, now_s, range(1000, 1200))) > 80


def test_files_that_changed_make_room_after_five_minutes(now_s: list[float]) -> None:
    """After `chmod -R`, and for another size, the files have other keys: what is under the old ones goes."""
    store, use = shared(), Use()
    first = read_epoch(store, use, now_s, range(80))
    assert len(first) == 80
    for changed in (range(1000, 1080), range(2000, 2080)):
        at_once = read_epoch(store, use, now_s, changed)
        assert 0 < len(at_once) < 80
        for _ in range(3):
            now_s[0] += 98
            assert read_epoch(store, use, now_s, changed) == at_once
        now_s[0] += 49
        assert read_epoch(store, use, now_s, changed) == list(changed)


def test_a_loader_that_was_begun_and_left_keeps_no_more_than_it_used(now_s: list[float]) -> None:
    """As one of which a single batch was looked at."""
    store, looked_at, use = shared(), Use(), Use()
    read_epoch(store, looked_at, now_s, range(10), ended=False)
    read_epoch(store, use, now_s, range(200))
    read_epoch(store, use, now_s, range(10))
    now_s[0] += 302
    taken = read_epoch(store, use, now_s, range(1000, 1200))
    assert len(taken) > 60
    assert right(store, range(10)) == list(range(10))


def test_what_begins_to_read_keeps_what_it_finds(now_s: list[float], start: Any) -> None:
    """However long nobody has used the tables: it is given the time to use them."""
    job = start(opened, range(200))
    stored = job.answer()
    mine = shared()
    job.kill()
    now_s[0] += 1000
    use = Use()
    assert read_epoch(mine, use, now_s, range(1000, 1010)) == []
    assert right(mine, range(200)) == stored


def test_workers_use_tables_for_their_owner(start: Any, now_s: list[float]) -> None:
    """When they have ended, its loader still needs the tables, for as long as it lives."""
    store, use = shared(), Use()
    store.poll(use)
    now_s[0] += 1
    use_in_worker(store)
    store.poll(use)
    assert store._tables[0].hit_s == pytest.approx(now_s[0], abs=0.01)
    now_s[0] += 1
    store.poll(use)
    assert store._tables[0].used_s == pytest.approx(now_s[0], abs=0.01)


def use_in_worker(store: Any) -> None:
    """A fork stores some files, looks, and ends."""
    pid = os.fork()
    if pid == 0:
        put(store, range(20))
        store._look(time.monotonic())
        os._exit(0)
    os.waitpid(pid, 0)


def test_an_entry_that_a_cleaner_removed_is_put_back(registry_folder: Any, start: Any) -> None:
    """By its owner, at its next look, also if the folder went; so later jobs find the files."""
    store = shared()
    put(store, range(5))
    for path in registry_folder.iterdir():
        path.unlink()
    store.poll()
    assert start(lambda: (other := shared(), right(other, range(5)))).answer() == list(range(5))
    shutil.rmtree(registry_folder)
    store.poll()
    assert start(lambda: (other := shared(), right(other, range(5)))).answer() == list(range(5))
    names = os.listdir(registry_folder)
    store.poll()
    assert os.listdir(registry_folder) == names


def test_memory_that_others_take_stops_the_store_and_idle_tables_go(monkeypatch: Any, caplog: Any) -> None:
    """It leaves free what it promised, says so, and goes on when memory is free again."""
    free_bytes = [1 << 40]
    monkeypatch.setattr(arena, "unused_bytes", lambda: free_bytes[0])
    monkeypatch.setattr(budget, "_CHECK_EVERY_S", 0.0)
    store = shared()
    assert len(put(store, range(30))) == 30
    say_once.cache_clear()
    free_bytes[0] = 0
    tables = store._tables
    for _ in range(5):
        assert put(store, range(100, 120)) == []
        store.poll()
    assert store._tables == tables
    assert sum("until memory becomes free" in text for text in caplog.messages) == 1
    assert right(store, range(30)) == list(range(30))
    free_bytes[0] = 1 << 40
    assert len(put(store, range(100, 120))) == 20


# --- systems that refuse ----------------------------------------------------------------------------------


def test_without_a_registry_workers_share_the_tables_of_their_owner(monkeypatch: Any, start: Any) -> None:
    """Those that they were started with stay; other jobs have their own."""
    monkeypatch.setattr(ram_store, "_IDLE_S", -1.0)
    no_registry(monkeypatch)
    store = shared()
    tables = store._tables
    job = start(lambda: (store, put(store, range(20))))
    job.answer()
    assert right(store, range(20)) == list(range(20))
    assert 80 < len(put(store, range(300))) < 130
    store.poll()
    assert store._tables == tables
    assert right(shared(), range(20)) == []


def test_without_shared_memory_nothing_is_stored(monkeypatch: Any, caplog: Any) -> None:
    """In a worker neither, and nothing is prepared for it; a warning says what works."""
    say_once.cache_clear()
    monkeypatch.setattr(segment, "why_unsupported", lambda: "a test")
    store = open_store(MB)
    store.poll()
    elsewhere = pickle.loads(pickle.dumps(store))
    monkeypatch.setattr(segment, "is_for_child", lambda: True)
    for each in (store, elsewhere, pickle.loads(pickle.dumps(store))):
        assert not each.has_room(1)
        assert put(each, range(5)) == right(each, range(5)) == []
    assert (store.num_files, store.nbytes, store.max_bytes, store.is_owner) == (0, 0, 0, False)
    assert 'shared memory is not available: a test. cache="lmdb:PATH"' in caplog.text
    with pytest.raises(ValueError, match="not an amount"):
        open_store("much")


def test_what_the_system_refuses_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the system while a file is stored costs that file; all others stay right."""
    store = shared()
    put(store, range(5))

    def refuse(*_: Any) -> None:
        raise OSError(12, "no memory")

    with monkeypatch.context() as patch:
        patch.setattr(arena.Arena, "write", refuse)
        assert put(store, range(5, 10)) == []
    assert right(store, range(10)) == list(range(5))


def test_tables_of_another_job_leave_address_space_to_this_one(start: Any, caplog: Any) -> None:
    """Beside tables that it cannot map, a job has small ones of its own; one warning says so."""
    import resource

    job = start(lambda: (store := SharedStore("8GB"), put(store, range(3))))
    job.answer()
    say_once.cache_clear()
    with (
        faults.limited(resource.RLIMIT_AS, faults.mapped_bytes() + 300 * MB),
        caplog.at_level("WARNING", "fastload"),
    ):
        store = SharedStore("8GB")
        assert store.num_files == 0
        assert put(store, range(3, 9)) == list(range(3, 9)) == right(store, range(9))
        assert np.ones(16 * MB, np.uint8).all()
    (line,) = caplog.messages
    assert "RLIMIT_AS" in line


def test_explain_tells_the_bytes_of_jobs_with_a_larger_limit(start: Any) -> None:
    """They are not said to be within the limit of this job."""
    before = FileCache(SharedStore(100_000))
    assert "at most 100.0 kB" in before.explain()
    before.close()
    start(lambda: (store := SharedStore(2 * MB), put_until_full(store))).answer()
    small = FileCache(SharedStore(100_000))
    assert "stored by jobs with a larger limit than the 100.0 kB of this one" in small.explain()
    small.close()


def test_a_worker_that_cannot_map_a_table_asks_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stores nothing, and the job goes on with its tables."""
    store = shared()
    with monkeypatch.context() as patch:
        patch.setattr(segment, "is_for_child", lambda: True)
        function, (tables, *arguments) = store.__reduce__()
        patch.setattr(segment.Segment, "map", refuse_to_map)
        worker = function(
            [arena.Arena(segment.Segment.attach(os.dup(each.segment.fd)), each.fields) for each in tables],
            *arguments,
        )
        assert put(worker, range(3)) == []
    assert not store._tables[-1].is_short
    assert put(store, range(3)) == [0, 1, 2]


def test_damaged_memory_is_a_miss() -> None:
    """Bytes that a bug wrote over a record give no error."""
    store = shared()
    put(store, range(3))
    table = store._tables[0]
    for offset in range(table._records_at + 32, table._records_at + 200):
        table.segment.write(b"\xff", offset)
        files_in(store).get(key_of(0))
    assert files_in(store).get(key_of(0)) is None
    assert right(store, range(1, 3)) == [1, 2]


# --- the command line's view ------------------------------------------------------------------------------


def test_stores_are_listed_and_let_go(start: Any) -> None:
    """With their files, bytes and holders; every process drops what was removed, and can store it again."""
    job = start(opened, range(30))
    job.answer()
    mine = shared()
    (listed,) = registry.live()
    assert (listed["kind"], listed["num_cached"], listed["nbytes"]) == ("files", 30, mine.nbytes)
    assert listed["users"] == sorted([os.getpid(), job.pid])
    retire(listed["name"])
    assert registry.live() == []
    assert right(mine, range(30)) == job.ask(told, "right", range(30)) == []
    assert put(mine, range(30)) == job.ask(told, "right", range(30)) == list(range(30))


def test_a_store_that_is_only_held_makes_room(start: Any) -> None:
    """`cache hold` keeps what others store, and uses none."""
    holder = shared()
    job = start(opened, range(60))
    job.answer()
    holder.poll()
    job.kill()
    assert right(shared(), range(60)) == list(range(60))
    before = holder._tables[0].used_s
    holder.poll()
    assert holder._tables[0].used_s == before
