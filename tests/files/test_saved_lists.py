"""Saved lists of files that somebody else wrote or that are damaged: the same files, or one error."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from typing import Any

import fsspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fastload
from fastload.files.listing import SAVED_NAME, RemoteFile, from_bytes, to_bytes
from fastload.files.remote import RemoteFolder
from tests.kit.remote import FaultyFileSystem, register

URL = "faulty://bucket/train"
CLASSES = ["cat", "döner", "empty"]
FILES = [
    RemoteFile("cat/1.jpg", 3, "v"),
    RemoteFile('cat/more/"2" \\u00e9.jpg', 0, ""),
    RemoteFile("döner/\udcff.jpg", -1, "a \\ b"),
]
GOOD = to_bytes(CLASSES, FILES)
TEXT = gzip.decompress(GOOD)
HEAD, *LINES = [json.loads(line) for line in TEXT.splitlines()]
MOST_BYTES = 4 << 20  # for a list of a few files

values = st.recursive(
    st.one_of(
        st.none(),
        st.integers(),
        st.floats(),
        st.sampled_from(["a/../../b.jpg", "/etc/1.jpg", "cat/1.jpg", "", "..", 10**400, 2**63, -1, True]),
        st.text(max_size=10),
    ),
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
    except fastload.RemoteFolderError as error:
        text = str(error)
        assert text.startswith(f"cannot use the list of files {URL}/{SAVED_NAME}: ")
        assert text.endswith("Pass listing='save' to replace it, or listing='ignore'")
        assert len(text) < 1000
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        FaultyFileSystem.reset()
        assert peak < MOST_BYTES + 1000 * len(data)
    assert found is not None
    return found[1:]


def packed(head: Any, *lines: Any) -> bytes:
    """A list with these lines."""
    return gzip.compress("".join(json.dumps(line) + "\n" for line in (head, *lines)).encode())


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 2), st.binary(max_size=4))
@settings(deadline=None, max_examples=150)
def test_damaged_bytes_are_the_same_files_or_the_error(start: int, length: int, instead: bytes) -> None:
    """Bytes of the compressed list are replaced, put in or taken out."""
    assert read(GOOD[:start] + instead + GOOD[start + length :]) in ((CLASSES, FILES), None)


@given(st.sampled_from([*HEAD, 0, 1, 2]), st.integers(0, 2), values)
@settings(deadline=None, max_examples=300)
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


@pytest.mark.parametrize(
    "entry",
    [
        *(["a/../../private/1.jpg", 3, "v"], ["/etc/1.jpg", 3, "v"], ["a/%2e%2E/1.jpg", 3, "v"]),
        *(["a\\..\\1.jpg", 3, "v"], ["a/\0.jpg", 3, "v"], ["a/\ud800.jpg", 3, "v"], ["a/1.jpg", 3]),
        *(["cat/1.jpg", 3, "v"], ["cat/0.jpg", 3, "v"]),
        *(["a/1.jpg", 10**30, "v"], ["a/1.jpg", -2, "v"], ["a/1.jpg", 3, "\ud800"], None, 1, {}),
    ],
)
def test_an_entry_that_is_no_file_below_the_folder_is_the_error(entry: Any) -> None:
    """It is never a shorter list, and no name leads out of the folder."""
    assert read(packed(HEAD, ["cat/1.jpg", 3, "v"], entry)) is None


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"not compressed", gzip.compress(b"not JSON\n"), packed([]), packed({}), GOOD[:-9]),
        *(packed({**HEAD, "version": 1}), packed({**HEAD, "classes": [".."]})),
        *(packed({**HEAD, "created": value}) for value in (float("nan"), "", "99999-01-01")),
    ],
    ids=range(11),
)
def test_a_list_of_no_use_is_the_error(data: bytes) -> None:
    """Damaged, of another format, or made at no time."""
    assert read(data) is None


@given(
    st.lists(st.text(st.characters(exclude_characters="/\\%\0", codec="utf-8"), min_size=1), max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.text("ab%é.😀", min_size=1), st.integers(-1, 2**63 - 1))),
)
@settings(deadline=None, max_examples=150)
@example(["a"], [(0, "b" * 4000, 1), (0, "a" * 4000, 1)])
def test_what_is_saved_is_read(folders: list[str], entries: list[tuple[int, str, int]]) -> None:
    """Any names below the folder, in any order."""
    classes = sorted({name for name in folders if ".." not in name and not set(name) & set("\t\r\n")})
    files = {
        name: RemoteFile(name, nbytes, "v")
        for number, text, nbytes in entries
        if number < len(classes) and ".." not in text and "%2" not in text
        for name in [f"{classes[number]}/{text}"]
    }

    assert from_bytes(to_bytes(classes, files.values()))[1:] == (classes, sorted(files.values()))


def test_a_small_list_that_grows_takes_no_memory() -> None:
    """Its decompressed length is bounded."""
    packer = zlib.compressobj(9, wbits=31)
    data = b"".join([*(packer.compress(b" " * (1 << 20)) for _ in range(64)), packer.flush()])
    assert read(data) is None
