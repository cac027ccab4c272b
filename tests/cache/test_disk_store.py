"""Decoded files on disk: what comes back, after kills, damage and full disks, and who shares it."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import resource
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from fastload.cache.disk import disk_store, index, segments, upkeep
from fastload.cache.disk.disk_store import DESCRIPTION, DiskFileStore, is_file_store
from fastload.cache.disk.rows import ROW_BYTES
from fastload.cache.plain_text import parse_plain_text, plain_text
from fastload.errors import CacheError, CacheMismatchError
from fastload.system.logs import say_once
from tests.kit.jobs import Job
from tests.kit.numbered_files import KB, array_of, key_of, put, right


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where the store is."""
    return str(tmp_path / "files")


# --- what comes back --------------------------------------------------------------------------------------

DTYPES = st.one_of(
    arrays_of.boolean_dtypes(),
    arrays_of.integer_dtypes(endianness="?"),
    arrays_of.unsigned_integer_dtypes(),
    arrays_of.floating_dtypes(endianness="?"),
    arrays_of.complex_number_dtypes(),
    arrays_of.datetime64_dtypes(),
    arrays_of.unicode_string_dtypes(min_len=1),
)
ARRAYS = DTYPES.flatmap(lambda dtype: arrays_of.arrays(dtype, arrays_of.array_shapes(min_dims=0, min_side=0)))
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary())
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers()), inner),
    ),
    max_leaves=20,
)


@settings(max_examples=60)
@given(array=ARRAYS, note=PLAIN, is_transposed=st.booleans())
def test_an_array_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, array: Any, note: Any, is_transposed: bool
) -> None:
    """With its dtype, shape and order in memory, and the note, in another process too; read-only for good."""
    array = array.T if is_transposed else array
    path = str(tmp_path_factory.mktemp("store"))
    assert DiskFileStore(path).put(key_of(1), array, note)
    stored: Any = DiskFileStore(path).get(key_of(1))
    assert (stored.array.dtype, stored.array.shape) == (array.dtype, array.shape)
    assert stored.array.tobytes() == array.tobytes()
    assert stored.array.flags.fnc == array.flags.fnc
    assert repr(stored.note) == repr(note)
    with pytest.raises(ValueError, match="WRITEABLE"):
        stored.array.flags.writeable = True


@given(PLAIN)
def test_plain_values_come_back_as_they_are(value: Any) -> None:
    """Floats bit for bit, NaN too, and each list, tuple and dict as what it was."""
    text = plain_text(value)
    assert text is not None
    assert repr(parse_plain_text(text)) == repr(value)


@pytest.mark.parametrize(
    "value",
    [np.float64(1), {1: {2, 3}}, object(), "\ud83d\ude00", [b""] * 3 + [bytearray()], 10**5000],
    ids=["numpy", "set", "object", "two halves", "bytearray", "long"],
)
def test_other_values_are_not_stored(path: str, value: Any) -> None:
    """What would come back as something else is refused, without an error."""
    assert plain_text(value) is None
    assert not DiskFileStore(path).put(key_of(1), array_of(1), value)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b'["x"]',
        b'["d",1]',
        b'["b"]',
        b'["b",1]',
        b"[]",
        b"[" * 100_000,
        b'["d",["l"],1]',
        b"\xff",
    ],
)
def test_texts_that_mean_nothing_are_value_errors(text: bytes) -> None:
    """A damaged note is told from all values."""
    with pytest.raises(ValueError, match=r"JSON|plain values|unpack|hex|zip|Expecting|codec|index"):
        parse_plain_text(text)


@pytest.mark.parametrize(
    "array", [np.array([None]), np.zeros(2, [("a", "u1")]), np.ma.zeros(3), [1, 2]], ids=str
)
def test_odd_arrays_are_not_stored(path: str, array: Any) -> None:
    """Objects, records, subclasses and lists."""
    assert not DiskFileStore(path).put(key_of(1), array, None)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=40))
def test_what_is_held_does_not_change_while_others_are_read(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int]]
) -> None:
    """Memory is read to again only when nothing views it, not even a view of a view."""
    store = DiskFileStore(str(tmp_path_factory.mktemp("store")))
    put(store, range(10))
    held: dict[int, tuple[int, Any]] = {}
    for number, place in steps:
        stored: Any = store.get(key_of(number))
        held[place] = number, memoryview(stored.array[3:][1:]) if place % 2 else stored.array[4:]
        del stored
        for other, view in held.values():
            assert bytes(view) == array_of(other)[4:].tobytes()


# --- the index --------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(
    counts=st.lists(st.integers(1, 40), max_size=12),
    max_recent=st.integers(0, 30),
    chunk_rows=st.integers(1, 20),
)
def test_the_index_finds_what_a_dict_would_find(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], max_recent: int, chunk_rows: int
) -> None:
    """However rows come in: one by one or many at once, of several writers, into small and large runs."""
    patch = pytest.MonkeyPatch()
    patch.setattr(index, "_MAX_RECENT", max_recent)
    patch.setattr(index, "_CHUNK_ROWS", chunk_rows)
    path = str(tmp_path_factory.mktemp("store"))
    writers, reader = [DiskFileStore(path) for _ in range(3)], DiskFileStore(path)
    first = 0
    try:
        for turn, count in enumerate(counts):
            numbers = range(first, first + count)
            assert put(writers[turn % 3], numbers) == [*numbers]
            first += count
            assert right(reader, range(first + 5)) == [*range(first)]
        assert right(DiskFileStore(path), range(first)) == [*range(first)]
        assert reader.num_files == first
    finally:
        patch.undo()


def test_keys_with_equal_first_words_are_told_apart(path: str) -> None:
    """In memory only the first word is kept."""
    keys = [b"\7" * 8 + bytes([number]) * 8 for number in range(50)]
    store = DiskFileStore(path)
    for number, key in enumerate(keys):
        assert store.put(key, array_of(number), number)
    assert [store.get(key).note for key in keys] == [*range(50)]  # type: ignore[union-attr]
    assert store.get(b"\7" * 16) is not None
    assert store.get(b"\7" * 8 + b"\xff" * 8) is None


# --- many processes ---------------------------------------------------------------------------------------


def opened(path: str) -> Any:
    """A job's store."""
    return DiskFileStore(path), None


def test_two_builders_share_the_work_and_wait_for_nothing(path: str) -> None:
    """Each writes while the other one could, each finds the other's files, and both may be killed."""
    mine, other = DiskFileStore(path), Job(opened, path)
    other.answer()
    try:
        assert other.ask(put, range(10)) == [*range(10)]
        assert right(mine, range(10)) == [*range(10)]
        assert put(mine, range(5, 20)) == [*range(5, 20)]
        assert other.ask(right, range(30)) == [*range(20)]
        assert mine.num_files == 20  # nothing is stored twice
        assert len(segments.names_in(path)) == 2
    finally:
        other.end()
    assert right(DiskFileStore(path), range(20)) == [*range(20)]


def test_a_segment_is_continued_when_its_writer_has_ended(path: str) -> None:
    """Twenty jobs, one after another, leave one segment."""
    for number in range(20):
        job = Job(opened, path)
        job.answer()
        assert job.ask(put, [number]) == [number]
        job.end()
    assert segments.names_in(path) == {"00000"}
    assert right(DiskFileStore(path), range(20)) == [*range(20)]


def test_a_forked_child_writes_a_segment_of_its_own(path: str) -> None:
    """A fork has the descriptors of its parent, and both go on."""
    store = DiskFileStore(path)
    put(store, [0])
    child = Job(lambda: (store, put(store, [1, 2])))
    try:
        assert child.answer() == [1, 2]
        assert put(store, [3]) == [3]
        assert child.ask(put, [4]) == [4]
        assert right(store, range(5)) == child.ask(right, range(5)) == [*range(5)]
    finally:
        child.end()
    assert len(segments.names_in(path)) == 2


def test_threads_share_a_writer(path: str) -> None:
    """All that they store is there."""
    store = DiskFileStore(path)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: put(store, [number]), range(100)))
        assert right(store, range(100)) == [*range(100)]
        assert sum(map(len, threads.map(lambda _: right(store, range(100)), range(8)))) == 800
    assert segments.names_in(path) == {"00000"}


def test_a_pickled_store_is_its_path(path: str) -> None:
    """For spawned workers and checkpoints."""
    store = DiskFileStore(path)
    put(store, range(3))
    again = pickle.loads(pickle.dumps(store))
    assert right(again, range(3)) == [*range(3)]
    assert len(pickle.dumps(store)) < 500


# --- kills ------------------------------------------------------------------------------------------------


def store_for_ever(path: str) -> Any:
    """A builder that tells how far it is, until it is killed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    try:
        store, number = DiskFileStore(path), 0
        while True:
            put(store, [number])
            os.write(writer, b".")
            number += 1
    finally:
        os._exit(1)


@pytest.mark.parametrize("progress", [0, 1, 7, 60])
def test_a_killed_builder_leaves_a_valid_cache(path: str, progress: int) -> None:
    """What it had stored is there, and the next one goes on in the same segment."""
    pid, reader = store_for_ever(path)
    try:
        for _ in range(progress):
            os.read(reader, 1)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os.set_blocking(reader, False)
    with open(reader, "rb") as rest:
        told = progress + len(rest.read() or b"")
    store = DiskFileStore(path)
    assert right(store, range(told + 2))[:told] == [*range(told)]
    assert put(store, range(told + 5)) == [*range(told + 5)]
    assert right(DiskFileStore(path), range(told + 5)) == [*range(told + 5)]
    assert len(segments.names_in(path)) == 1
    assert upkeep.verify(path).num_damaged == 0


def test_a_kill_between_any_two_bytes_leaves_a_valid_cache(tmp_path: Path) -> None:
    """Files that end anywhere: what is whole comes back, and what is stored then is found."""
    whole = tmp_path / "whole"
    put(DiskFileStore(str(whole)), range(3))
    rows, pixels = whole / "00000.rows", whole / "00000.pixels"
    rng = np.random.default_rng(0)
    cuts = [(length, pixels.stat().st_size) for length in range(0, rows.stat().st_size + 1, 13)]
    cuts += [(rows.stat().st_size, int(at)) for at in rng.integers(0, pixels.stat().st_size, 20)]
    for number, (rows_bytes, pixels_bytes) in enumerate(cuts):
        path = tmp_path / f"cut{number}"
        shutil.copytree(whole, path)
        os.truncate(path / rows.name, rows_bytes)
        os.truncate(path / pixels.name, pixels_bytes)
        store = DiskFileStore(str(path))
        there = right(store, range(3))
        if pixels_bytes == pixels.stat().st_size:
            assert len(there) == max(0, rows_bytes // ROW_BYTES - 1)
        assert put(store, range(5)) == [*range(5)]
        assert right(DiskFileStore(str(path)), range(5)) == [*range(5)]


def test_a_directory_whose_maker_was_killed_is_made(path: str) -> None:
    """Before its description had its name."""
    os.mkdir(path)
    Path(path, f"{DESCRIPTION}.0a1b").write_bytes(b"{")
    assert put(DiskFileStore(path), [1]) == [1]
    assert is_file_store(path)


# --- damage -----------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.data())
def test_damage_is_never_a_wrong_result(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Any bytes of any file are changed: what comes back is right, and what does not is stored again."""
    path = tmp_path_factory.mktemp("store")
    put(DiskFileStore(str(path)), range(4))
    for _ in range(data.draw(st.integers(1, 5))):
        file = path / data.draw(st.sampled_from(["00000.rows", "00000.pixels"]))
        content = bytearray(file.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        new = data.draw(st.one_of(st.binary(min_size=1, max_size=80), st.just(bytes(4096))))
        content[at : at + len(new)] = new
        file.write_bytes(content)
    for _ in range(2):
        store = DiskFileStore(str(path))
        right(store, range(4))
        assert put(store, range(6)) == [*range(6)]
    assert right(DiskFileStore(str(path)), range(6)) == [*range(6)]


def test_a_file_that_is_truncated_while_it_is_open_ends_no_process(path: str) -> None:
    """As a mount that fails: a mapping would be a bus error."""
    store = DiskFileStore(path)
    put(store, range(4))
    os.truncate(Path(path, "00000.pixels"), 10)
    assert right(store, range(4)) == []
    os.truncate(Path(path, "00000.rows"), 10)
    assert right(store, range(4)) == []
    shutil.rmtree(path)
    assert right(store, range(4)) == []


def test_damage_is_told_once_and_found_by_verify(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """The record and the row that are damaged are counted."""
    say_once.cache_clear()
    put(DiskFileStore(path), range(4))
    for name, at in (("00000.rows", ROW_BYTES + 3), ("00000.pixels", 20 * KB)):
        with open(Path(path, name), "r+b") as file:
            file.seek(at)
            file.write(b"\x5a\xa5")
    assert upkeep.verify(path) == (3, 2)
    caplog.clear()
    store = DiskFileStore(path)
    assert right(store, range(4)) == [1, 3]
    assert right(store, range(4)) == [1, 3]
    assert [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()] == [
        f"cache: {path}/00000.pixels is damaged: what is stored there is decoded and stored again"
    ]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b'{"kind": "decoded files"}', b'{"kind": 1, "version": 1, "created_s": 1}', b"\xff"],
)
def test_a_damaged_description_is_an_error_that_says_so(path: str, content: bytes) -> None:
    """Nothing is read or written."""
    put(DiskFileStore(path), [1])
    Path(path, DESCRIPTION).write_bytes(content)
    with pytest.raises(CacheMismatchError, match="damaged"):
        DiskFileStore(path)


def test_another_format_is_an_error(path: str) -> None:
    """Of a later release."""
    put(DiskFileStore(path), [1])
    Path(path, DESCRIPTION).write_text(json.dumps({"kind": "decoded files", "version": 2, "created_s": 1.0}))
    with pytest.raises(CacheMismatchError, match="format 2, but this release reads 1"):
        DiskFileStore(path)


def test_a_segment_of_another_format_is_left_alone(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither read nor continued."""
    put(DiskFileStore(path), range(2))
    monkeypatch.setattr("fastload.cache.disk.rows.FORMAT_VERSION", 2)
    store = DiskFileStore(path)
    assert right(store, range(2)) == []
    assert put(store, [5]) == [5]
    assert segments.names_in(path) == {"00000", "00001"}


@pytest.mark.parametrize("what", ["file", "folder"])
def test_something_else_at_the_path_is_an_error(path: str, what: str) -> None:
    """And it stays as it was."""
    if what == "file":
        Path(path).write_text("mine")
    else:
        Path(path).mkdir()
        Path(path, "mine.txt").write_text("mine")
    with pytest.raises(CacheMismatchError, match="use a different path"):
        DiskFileStore(path)
    assert (Path(path) if what == "file" else Path(path, "mine.txt")).read_text() == "mine"


def test_a_path_that_cannot_be_made_is_an_error() -> None:
    """It names the path and the reason."""
    with pytest.raises(CacheError, match="cannot make the cache of decoded files /proc/no/such"):
        DiskFileStore("/proc/no/such")


# --- disks that are full, and directories that cannot be written ------------------------------------------


def full(path: str, limit_bytes: int) -> Any:
    """A store whose files cannot become larger, as with `ulimit -f`."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    return DiskFileStore(path), None


@pytest.mark.parametrize("limit_bytes", [30, 200, 20_000, 100_003])
def test_a_full_disk_ends_storing_and_nothing_else(path: str, limit_bytes: int) -> None:
    """What was stored is right there and later, and others go on when there is space."""
    DiskFileStore(path)
    job = Job(full, path, limit_bytes)
    job.answer()
    try:
        stored = job.ask(put, range(40))
        assert len(stored) < 20
        assert job.ask(right, range(40)) == stored
    finally:
        job.end()
    store = DiskFileStore(path)
    assert right(store, range(40)) == stored
    assert put(store, range(40)) == [*range(40)]
    assert upkeep.verify(path).num_damaged == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_is_told_in_one_line_and_tried_again(
    path: str, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a while, in case there is space."""
    say_once.cache_clear()
    store, real = DiskFileStore(path), os.pwritev
    put(store, range(3))

    def refuse(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwritev", refuse)
    assert put(store, range(6)) == [0, 1, 2]
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert "no more files are stored" in lines[0]
    assert os.strerror(code) in lines[0]
    monkeypatch.setattr(os, "pwritev", real)
    assert put(store, range(6)) == [0, 1, 2]
    store._write_at_s = 0.0
    assert put(store, range(6)) == [*range(6)]


def test_a_part_of_the_disk_stays_free(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For checkpoints, say."""
    say_once.cache_clear()
    monkeypatch.setattr(segments, "FREE_SHARE", 1.0)
    monkeypatch.setattr(segments, "FREE_MAX_BYTES", 1 << 62)
    assert put(DiskFileStore(path), range(3)) == []
    assert "a twentieth of the disk" in caplog.text
    assert segments.names_in(path) == set()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_directory_that_cannot_be_written_is_read(
    path: str, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a warning, and without trying each time."""
    put(DiskFileStore(path), range(3))
    tries = []

    def refuse(*_: Any) -> None:
        tries.append(1)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(segments, "_continued", refuse)
    store = DiskFileStore(path)
    assert put(store, range(6)) == [0, 1, 2]
    assert len(tries) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_file_system_without_locks_is_written(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody continues a segment there."""

    def refuse(*_: Any, **__: Any) -> bool:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(segments, "flock_fd", refuse)
    for number in range(3):
        assert put(DiskFileStore(path), [number]) == [number]
    assert len(segments.names_in(path)) == 3
    assert right(DiskFileStore(path), range(3)) == [0, 1, 2]


def test_a_remote_directory_is_asked_once_in_a_while(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And one line says that a local disk is faster."""
    say_once.cache_clear()
    monkeypatch.setattr(disk_store, "file_system_of", lambda _: "nfs4")
    store = DiskFileStore(path)
    assert "of kind nfs4" in caplog.text
    put(DiskFileStore(path), [1])
    store._look_at_s = float("inf")
    assert right(store, [1]) == []
    store._look_at_s = 0.0
    assert right(store, [1]) == [1]


# --- removing ---------------------------------------------------------------------------------------------


def test_a_removed_cache_stays_readable_for_those_who_have_it_open(path: str) -> None:
    """And they store nothing where it was."""
    store = DiskFileStore(path)
    put(store, range(3))
    files = upkeep.files_of(path)
    assert files[-2:] == [str(Path(path, DESCRIPTION)), path]
    shutil.rmtree(path)
    assert right(store, range(3)) == [0, 1, 2]
    assert put(store, range(5)) == [*range(5)]  # into files that go with the process
    assert not os.path.exists(path)


def test_a_foreign_file_is_not_removed(path: str) -> None:
    """Nor is anything beside it."""
    put(DiskFileStore(path), [1])
    Path(path, "mine.txt").write_text("mine")
    with pytest.raises(CacheMismatchError, match=r"mine\.txt: nothing was removed"):
        upkeep.files_of(path)
