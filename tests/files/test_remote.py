"""Files of a remote folder: retried errors, complete bodies, saved lists, damaged ones; files read ahead."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import pickle
import random
import sys
import threading
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock, Mock

import aiohttp
import fsspec
import obstore.exceptions
import pytest
from botocore.exceptions import NoCredentialsError
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fastload
from fastload.files import retry
from fastload.files.listing import SAVED_NAME, UNKNOWN_BYTES, RemoteFile, arrange, from_bytes, to_bytes
from fastload.files.read_ahead import ReadAhead
from fastload.files.remote import RemoteFolder
from fastload.system.paths import is_url
from tests.kit.remote import TIMEOUT_S, FaultyFileSystem, cut, meet, raising, register, until_set

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


URL = "faulty://bucket/train"


@pytest.fixture
def folder(faulty: type[FaultyFileSystem]) -> RemoteFolder:
    """A folder with two classes, one of which has a folder inside."""
    files = {"cat/1.jpg": b"one", "cat/more/2.jpg": b"two", "dog/3.jpg": b"three", "notes.txt": b"-"}
    for name, data in files.items():
        fsspec.filesystem("faulty").pipe_file(f"{URL}/{name}", data)
    return RemoteFolder(URL)


def http(status: int) -> Any:
    """The fault that the HTTP client raises."""
    return raising(aiohttp.ClientResponseError(Mock(), (), status=status))


DENIED = "Check the credentials for faulty://"


@pytest.mark.parametrize(
    ("faults", "num_pauses", "said"),
    [
        *(([raising(kind("x")), cut], 2, None) for kind in (ConnectionResetError, TimeoutError, EOFError)),
        ([http(429), raising(OSError("x"))], 2, None),  # only two of the client errors are about credentials
        ([cut] * 10, 5, "2 bytes.*of the 5 that"),
        ([raising(ConnectionError(f"attempt {n}")) for n in range(10)], 5, "attempt 5 .tried 6 times in "),
        ([raising(FileNotFoundError("gone"))], 0, "FileNotFoundError: "),
        *(([fault] * 2, 0, DENIED) for fault in (http(401), http(403), raising(PermissionError("no")))),
        ([raising(NoCredentialsError())] * 2, 0, DENIED),
        ([raising(obstore.exceptions.UnauthenticatedError("no key"))] * 2, 0, DENIED),
    ],
)
def test_a_fault_passes_or_is_an_error_with_its_url(
    folder: RemoteFolder, faulty: Any, pauses: list[float], faults: list[Any], num_pauses: int, said: Any
) -> None:
    """At most six attempts, none where an error cannot pass; pauses grow, and draw no random numbers."""
    faulty.faults["3.jpg"] = list(faults)
    state = random.getstate()
    if said is None:
        assert folder.read("dog/3.jpg", 5) == b"three"
    else:
        with pytest.raises(fastload.errors.ImageReadError, match=said) as info:
            folder.read("dog/3.jpg", 5)
        assert info.value.path == f"{URL}/dog/3.jpg"
        assert info.value.path in str(info.value)
        assert retry.is_transient(info.value) == bool(num_pauses)
    if said == DENIED:
        with pytest.raises(fastload.errors.RemoteFolderError, match=said):
            folder.load("dog/3.jpg", 0)
    assert len(pauses) == num_pauses
    assert all(0.05 * 2**number <= pause <= 0.1 * 2**number for number, pause in enumerate(pauses))
    assert random.getstate() == state


@pytest.mark.usefixtures("pauses")
@pytest.mark.parametrize(("each_s", "level"), [(1.0, "INFO"), (6.0, "WARNING")])
def test_a_store_that_does_not_answer_for_long_is_a_warning(
    each_s: float, level: str, folder: RemoteFolder, faulty: Any, monkeypatch: Any, caplog: Any
) -> None:
    """Clients have retries of their own, so six attempts may take a minute; two reads give one warning."""
    clock = itertools.count(0.0, each_s)
    monkeypatch.setattr(retry, "_now_s", lambda: next(clock))
    monkeypatch.setattr(retry, "_warned", {"at_s": float("-inf")})
    monkeypatch.setattr(retry, "_WARN_EVERY_S", 1000.0)
    faulty.faults[".jpg"] = [raising(ConnectionError("no route"))] * 2
    caplog.set_level("INFO", "fastload")
    assert folder.read("cat/1.jpg", 3) == b"one"
    faulty.faults[".jpg"] = [raising(ConnectionError("no route"))] * 2
    assert folder.read("dog/3.jpg", 5) == b"three"

    assert len(caplog.records) == 4
    assert [record.levelname for record in caplog.records].count("WARNING") == (level == "WARNING")
    assert caplog.records[0].levelname == level
    assert "faulty://bucket/train/cat/1.jpg" in caplog.text
    assert "no route (attempt 1 of 6, after" in caplog.text


def test_the_list_has_folders_and_files_with_lengths_and_versions(
    folder: RemoteFolder, faulty: type[FaultyFileSystem], pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not files beside the folders. An error that may pass is tried again; another names the folder."""
    original, errors = faulty.find, [PermissionError("forbidden"), ConnectionError("reset")]

    def find(self: Any, *args: Any, **kwargs: Any) -> Any:
        if errors:
            raise errors.pop()
        return original(self, *args, **kwargs)

    monkeypatch.setattr(faulty, "find", find)
    said = r"cannot list faulty://bucket/train: PermissionError"
    with pytest.raises(fastload.errors.RemoteFolderError, match=said):
        folder.list_files()
    assert len(pauses) == 1
    classes, files = folder.list_files()
    assert classes == ["cat", "dog"]
    found = sorted((file.name, file.nbytes) for file in files)
    assert found == [("cat/1.jpg", 3), ("cat/more/2.jpg", 3), ("dog/3.jpg", 5)]
    assert all(file.version for file in files)


def test_a_saved_list_comes_back(folder: RemoteFolder, faulty: Any, monkeypatch: Any) -> None:
    """With all files, lengths and versions; an error of the store is one, as the user asked for the list."""
    classes, files = folder.list_files()
    assert folder.saved_list() is None
    assert folder.read("cat/1.jpg", UNKNOWN_BYTES) == b"one"  # as on web servers
    with monkeypatch.context() as patch:
        patch.setattr(faulty, "pipe_file", Mock(side_effect=PermissionError("read-only bucket")))
        said = rf"cannot write {URL}/{SAVED_NAME}.*read-only bucket"
        with pytest.raises(fastload.errors.RemoteFolderError, match=said):
            folder.save_list(classes, files)

    folder.save_list(classes, files)
    saved = folder.saved_list()

    assert saved is not None
    assert saved[1:] == (classes, sorted(files))
    assert folder.list_files() == (classes, files)  # the list itself is not among them


def test_copies_and_forked_processes_make_their_own_file_system(folder: RemoteFolder) -> None:
    """File systems of fsspec must not be used after a fork, and connections do not travel."""
    folder.read("cat/1.jpg", 3)
    copy = pickle.loads(pickle.dumps(folder))
    assert copy._connection is None
    assert copy.read("cat/1.jpg", 3) == b"one"
    parents, _ = folder.file_system()
    pid = os.fork()
    if pid == 0:
        own, _ = folder.file_system()
        os._exit(5 if own is not parents and folder.read("cat/1.jpg", 3) == b"one" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5


def test_threads_share_one_file_system(folder: RemoteFolder, faulty: type[FaultyFileSystem]) -> None:
    """The first read is finished before others begin; those are made at the same time."""
    opened, together, num_alone = folder._connect(), meet(7, alone=0), 0
    lock, come = threading.Lock(), threading.Semaphore(0)
    opened._reading = MagicMock(  # it tells when a thread has come to it
        __enter__=lambda _: (come.release(), lock.acquire()), __exit__=lambda *_: lock.release()
    )

    def gate(path: str) -> None:
        nonlocal num_alone
        if opened._is_connected:
            together()
        else:
            num_alone += 1
            assert all(come.acquire(timeout=TIMEOUT_S) for _ in range(8))  # they would begin now

    faulty.gate = staticmethod(gate)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: (folder.read("cat/1.jpg", 3), id(folder._connect().fs)), range(8)))
    assert found == [(b"one", id(opened.fs))] * 8
    assert num_alone == 1


def test_without_fsspec_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the other extras."""
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ImportError, match=r"pip install \"fastload-torch\[remote\]\""):
        fastload.ImageFolder(URL)


def test_urls_are_told_from_paths() -> None:
    """A colon alone makes no URL."""
    urls = ["s3://bucket/train", "memory://x", "zip://train::s3://bucket/train.zip", "simplecache::s3://b"]
    paths = ["file:///data/train", "/data/train", "train", "a:b", "./s3:/x"]
    assert [is_url(text) for text in urls + paths] == [True] * len(urls) + [False] * len(paths)


# --- saved lists ---------------------------------------------------------------------------------------


CLASSES = ["cat", "döner", "empty"]
FILES = [
    RemoteFile("cat/1.jpg", 3, "v"),
    RemoteFile('cat/more/"2" \\u00e9.jpg', 0, ""),
    RemoteFile("döner/\udcff.jpg", -1, "a \\ b"),
]
GOOD = to_bytes(CLASSES, FILES)
TEXT = gzip.decompress(GOOD)
HEAD, *LINES = [json.loads(line) for line in TEXT.splitlines()]
MAX_BYTES = 4 << 20  # for a list of a few files

odd = ["a/../../b.jpg", "/etc/1.jpg", "cat/1.jpg", "", "..", 10**400, 2**63, -1, True]
values = st.recursive(
    st.one_of(st.none(), st.integers(), st.floats(), st.sampled_from(odd), st.text(max_size=10)),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


def read(data: bytes) -> tuple[list[str], list[RemoteFile]] | None:
    """The classes and the files of the folder with this list; None if it is the error for damaged lists."""
    register()
    FaultyFileSystem.reset()
    fsspec.filesystem("faulty").pipe_file(f"{URL}/{SAVED_NAME}", data)
    folder = RemoteFolder(URL)
    folder.file_system()
    tracemalloc.start()
    try:
        found = folder.saved_list()
    except fastload.errors.RemoteFolderError as error:
        text = str(error)
        assert text.startswith(f"cannot use the list of files {URL}/{SAVED_NAME}: ")
        assert text.endswith("Pass listing='save' to replace it, or listing='ignore'")
        assert len(text) < 1000
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        FaultyFileSystem.reset()
        assert peak < MAX_BYTES + 1000 * len(data)
    assert found is not None
    return found[1:]


def packed(head: Any, *lines: Any) -> bytes:
    """A list with these lines."""
    return gzip.compress("".join(json.dumps(line) + "\n" for line in (head, *lines)).encode())


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 2), st.binary(max_size=4))
@settings(max_examples=80)
def test_damaged_bytes_are_the_same_files_or_the_error(start: int, length: int, instead: bytes) -> None:
    """Bytes of the compressed list are replaced, put in or taken out."""
    assert read(GOOD[:start] + instead + GOOD[start + length :]) in ((CLASSES, FILES), None)


@pytest.mark.slow
@given(st.sampled_from([*HEAD, 0, 1, 2]), st.integers(0, 2), values)
@settings(max_examples=150)
def test_other_values_are_what_they_say_or_the_error(where: str | int, place: int, value: Any) -> None:
    """Any value in the head, or in the place of a name, a length or a version."""
    head, files = dict(HEAD), [list(line) for line in LINES]
    if isinstance(where, str):
        head[where] = value
    else:
        files[where][place] = value
    found = read(packed(head, *files))
    if found is not None:
        assert found[0] == list(head["classes"])
        assert found[1] == [RemoteFile(*file) for file in files]
        assert from_bytes(to_bytes(*found))[1:] == (sorted(found[0]), found[1])


ENTRIES: list[Any] = [
    *(["a/../../private/1.jpg", 3, "v"], ["/etc/1.jpg", 3, "v"], ["a/%2e%2E/1.jpg", 3, "v"]),
    *(["a\\..\\1.jpg", 3, "v"], ["a/\0.jpg", 3, "v"], ["a/\ud800.jpg", 3, "v"], ["a/1.jpg", 3]),
    *(["cat/1.jpg", 3, "v"], ["cat/0.jpg", 3, "v"]),
    *(["a/1.jpg", 10**30, "v"], ["a/1.jpg", -2, "v"], ["a/1.jpg", 3, "\ud800"], None, 1, {}),
]


def test_a_list_of_no_use_is_the_error() -> None:
    """Damaged, of no time, of another format, or with an entry that is no file below: no shorter list."""
    for data in (
        *(b"", b"not compressed", gzip.compress(b"not JSON\n"), packed([]), packed({}), GOOD[:-9]),
        *(packed({**HEAD, "version": 1}), packed({**HEAD, "classes": [".."]})),
        *(packed({**HEAD, "created": value}) for value in (float("nan"), "", "99999-01-01")),
        *(packed(HEAD, ["cat/1.jpg", 3, "v"], entry) for entry in ENTRIES),
    ):
        assert read(data) is None, data
    packer = zlib.compressobj(9, wbits=31)  # of 64 MB, which would take memory
    assert read(b"".join([*(packer.compress(b" " * (1 << 20)) for _ in range(64)), packer.flush()])) is None


@given(
    st.lists(st.text(st.characters(exclude_characters="/\\%\0", codec="utf-8"), min_size=1), max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.text("ab%é.😀\udcff", min_size=1), st.integers(-1, 2**63 - 1))),
)
@settings(max_examples=80)
@example(["a"], [(0, "b" * 4000, 1), (0, "a" * 4000, 1)])
def test_what_is_saved_is_read(folders: list[str], entries: list[tuple[int, str, int]]) -> None:
    """Any names below the folder, in any order, also those that are no UTF-8; the list has a digest."""
    classes = sorted({name for name in folders if ".." not in name and not set(name) & set("\t\r\n")})
    files = {
        name: RemoteFile(name, nbytes, "v")
        for number, text, nbytes in entries
        if number < len(classes) and ".." not in text and "%2" not in text
        for name in [f"{classes[number]}/{text}"]
    }
    assert from_bytes(to_bytes(classes, files.values()))[1:] == (classes, sorted(files.values()))
    assert arrange(classes, list(files.values()), ("",)).digest is not None


# --- files that are announced: read in threads, in bounded memory ----------------------------------------


NBYTES = 100
NUMBERS = st.integers(0, 9)
OPERATIONS = st.tuples(st.sampled_from(["announce", "take", "forget"]), st.lists(NUMBERS, max_size=6))


def content(number: int) -> bytes:
    """The content of a file."""
    return number.to_bytes(4, "big") * (NBYTES // 4)


@pytest.fixture
def opened() -> Iterator[Callable[..., tuple[ReadAhead, list[int]]]]:
    """Makes readers, each with the list of its reads, which go through a gate; closes them after the test."""
    made: list[ReadAhead] = []

    def make(gate: Callable[[int], object] = str, **options: int) -> tuple[ReadAhead, list[int]]:
        reads: list[int] = []

        def read(number: int) -> bytes:
            gate(number)
            reads.append(number)
            return content(number)

        made.append(ReadAhead(read, lambda _: NBYTES, **{"num_threads": 8, **options}))
        return made[-1], reads

    yield make
    for reader in made:
        reader.close()


def test_an_announced_file_is_read_once(opened: Any) -> None:
    """Announcing it again, or taking it while it is being read, does not read it again."""
    reader, reads = opened(num_threads=1)
    reader.announce([1, 2, 1])
    reader.announce([2, 1])
    found = [reader.take(number) for number in (1, 2)]
    _until(reader._for_threads.empty)  # the thread would have read them again
    assert found == [content(1), content(2)]
    assert sorted(reads) == [1, 2]


def test_a_file_that_no_thread_has_begun_is_read_by_the_caller(opened: Any) -> None:
    """The only thread is stuck in another file."""
    begun, may_end = threading.Event(), threading.Event()

    def gate(number: int) -> None:
        if number == 0:
            begun.set()
            until_set(may_end)

    reader, _ = opened(gate, num_threads=1)
    reader.announce([0, 1])
    until_set(begun)
    found = reader.take(1)
    may_end.set()
    assert [found, reader.take(0)] == [content(1), content(0)]


def test_the_window_is_filled_and_files_that_nobody_takes_make_room(opened: Any) -> None:
    """With room for five files, five are read, and one more for each that is taken."""
    reader, reads = opened(window_bytes=5 * NBYTES)
    reader.announce(range(100, 150))  # nobody takes these
    _until(lambda: len(reads) >= 5)
    reader.announce(range(20))
    first = len(reads)
    assert [reader.take(number) for number in range(5)] == [content(number) for number in range(5)]
    for number in range(5, 15):
        _until(lambda: reader._for_threads.empty() and reader._used_bytes == 5 * NBYTES)
        assert reader.take(number) == content(number)
    assert len(reads) <= first + 20


def test_close_ends_the_threads(opened: Any) -> None:
    """Files that are being read come to an end first; `take` reads by itself afterwards."""
    begun, may_end = threading.Semaphore(0), threading.Event()
    reader, reads = opened(lambda _: (begun.release(), until_set(may_end)))
    reader.announce(range(20))
    assert all(begun.acquire(timeout=TIMEOUT_S) for _ in range(8))
    reader.close()
    reader.announce([3])
    may_end.set()
    _until(lambda: not any(t.name == "fastload-read-ahead" for t in threading.enumerate()))
    assert sorted(reads) == list(range(8))
    assert reader.take(3) == content(3)
    assert reads[8:] == [3]


def test_close_in_a_forked_child_returns(opened: Any) -> None:
    """The child has a copy of a lock that a thread of its parent holds, and no such thread."""
    reader, _ = opened()
    reader.announce(range(20))
    with reader._lock:
        pid = os.fork()
        if pid == 0:
            reader.close()
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


@settings(max_examples=60)
@given(st.lists(OPERATIONS, max_size=20), st.integers(1, 4), st.integers(1, 6), st.sets(NUMBERS))
def test_take_returns_the_right_file_after_any_announcements(
    operations: list[tuple[str, list[int]]], num_threads: int, window: int, broken: set[int]
) -> None:
    """Files come in any order, twice, or never; a broken one raises once; afterwards no bytes are held."""
    left = set(broken)

    def read(number: int) -> bytes:
        if number in left:
            left.discard(number)
            raise OSError(number)
        return content(number)

    found: Any = None
    reader = ReadAhead(read, lambda _: NBYTES, num_threads=num_threads, window_bytes=window * NBYTES)
    try:
        for name, numbers in operations:
            if name != "take":
                getattr(reader, name)(numbers)
                continue
            for number in numbers:
                try:
                    found = reader.take(number)
                except OSError as error:
                    found = error.args  # of the file, not of those beside it
                assert found == content(number) or (found == (number,) and number in broken)
                broken -= {number} if found == (number,) else set()
        reader.forget(range(10))
        _until(lambda: reader._used_bytes == 0)
        assert not reader._files
    finally:
        reader.close()


def _until(is_so: Callable[[], bool]) -> None:
    """Wait for other threads."""
    pause = threading.Event()
    for _ in range(int(TIMEOUT_S * 1000)):
        if is_so():
            return
        pause.wait(0.001)
    raise TimeoutError
