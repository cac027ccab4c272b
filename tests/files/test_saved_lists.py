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
LINES = [json.loads(line) for line in TEXT.splitlines()]
HEAD = LINES[0]
MOST_BYTES = 2 << 20  # for a list of a few files

names = st.one_of(
    st.sampled_from(["a/../../b.jpg", "/etc/1.jpg", "cat/1.jpg", "empty/1.jpg", "dog/1.jpg", "", "x" * 5000]),
    st.text(max_size=10),
)
numbers = st.one_of(st.integers(), st.floats(), st.sampled_from([10**400, 2**63, -1, True]))
values = st.recursive(
    st.one_of(st.none(), names, numbers), lambda inner: st.lists(inner, max_size=3), max_leaves=6
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
        assert peak < MOST_BYTES + 2 * len(data)
    assert found is not None
    return found[1:]


def packed(*lines: Any) -> bytes:
    """A list with these lines."""
    return gzip.compress(text_of(*lines))


def text_of(*lines: Any) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def check(text: bytes) -> None:
    """A text that is read says the same to any reader of JSON."""
    found = read(gzip.compress(text))
    if found is not None:
        lines = [json.loads(line) for line in text.split(b"\n")[1:] if line]
        assert found[0] == [line for line in lines if isinstance(line, str)]
        assert found[1] == [RemoteFile(*line) for line in lines if not isinstance(line, str)]
        assert to_bytes(*found)  # and can be saved again
        assert from_bytes(to_bytes(*found))[1:] == found


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 2), st.binary(max_size=4))
@settings(deadline=None, max_examples=150)
def test_damaged_bytes_are_the_same_files_or_the_error(start: int, length: int, instead: bytes) -> None:
    """Bytes of the compressed list are replaced, put in or taken out."""
    assert read(GOOD[:start] + instead + GOOD[start + length :]) in ((CLASSES, FILES), None)


@given(st.integers(0, len(TEXT)), st.integers(0, 30), st.one_of(st.binary(max_size=4), st.just(TEXT)))
@settings(deadline=None, max_examples=150)
def test_damaged_text_is_what_it_says_or_the_error(start: int, length: int, instead: bytes) -> None:
    """Characters of the list are replaced, put in or taken out, with right checksums."""
    check(TEXT[:start] + instead + TEXT[start + length :])


@given(st.integers(0, len(LINES)), st.integers(0, 2), st.one_of(values, st.sampled_from(LINES)))
@settings(deadline=None, max_examples=150)
def test_other_lines_are_what_they_say_or_the_error(start: int, length: int, value: Any) -> None:
    """Any value in the place of a line, or between two lines."""
    check(text_of(*LINES[:start], value, *LINES[start + length :]))


@given(st.sampled_from(["version", "created_s"]), values)
@settings(deadline=None, max_examples=150)
def test_other_values_of_the_head_are_the_error_or_make_no_difference(name: str, value: Any) -> None:
    """Any value in the place of the version or the age."""
    assert read(packed({**HEAD, name: value}, *LINES[1:])) in ((CLASSES, FILES), None)


@given(st.sampled_from(range(3)), st.integers(0, 3), st.one_of(values, names, numbers))
@settings(deadline=None, max_examples=150)
def test_other_entries_are_what_they_say_or_the_error(number: int, place: int, value: Any) -> None:
    """Any value in the place of a name, a length or a version, or beside them."""
    files = [list(file) for file in FILES]
    files[number][place : place + 1] = [value]
    check(text_of(HEAD, *CLASSES, *files))


@given(
    st.lists(st.text(st.characters(exclude_characters="/\\%\0", codec="utf-8"), min_size=1), max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.text("ab%é.😀", min_size=1), st.integers(-1, 2**63 - 1))),
)
@settings(deadline=None, max_examples=150)
@example(["a"], [(0, "b" * 4000, 1), (0, "a" * 4000, 1)])
def test_what_is_saved_is_read(folders: list[str], entries: list[tuple[int, str, int]]) -> None:
    """Any names below the folder, in any order; a repeated name is there once."""
    classes = sorted({name for name in folders if ".." not in name})
    files = {
        name: RemoteFile(name, nbytes, "v")
        for number, text, nbytes in entries
        if number < len(classes) and ".." not in text and "%2" not in text
        for name in [f"{classes[number]}/{text}"]
    }

    found = from_bytes(to_bytes(classes, [*files.values(), *files.values()]))

    assert found[1:] == (classes, sorted(files.values()))


@pytest.mark.parametrize(
    "files",
    [
        [["cat/2.jpg", 1, "v"], ["cat/1.jpg", 1, "v"]],
        [["cat/1.jpg", 1, "v"], ["cat/1.jpg", 1, "v"]],
        [["cat/1.jpg", 1, "v"], ["cat/1.jpg", 2, "v"]],
        [["dog/1.jpg", 1, "v"]],
    ],
)
def test_files_out_of_order_repeated_or_of_no_class_are_damage(files: list[Any]) -> None:
    """They are written in order, each of them once, with their classes."""
    assert read(packed(HEAD, *CLASSES, *files)) is None


@pytest.mark.parametrize("lines", [["cat", "cat"], ["döner", "cat"], ["cat", ["cat/1.jpg", 1, "v"], "dog"]])
def test_classes_out_of_order_or_repeated_are_damage(lines: list[Any]) -> None:
    """They would get other labels."""
    assert read(packed(HEAD, *lines)) is None


def bomb(start: bytes, repeated: bytes, stop: bytes = b"") -> bytes:
    """A compressed text of about 64 MiB, which is never held."""
    packer = zlib.compressobj(9, wbits=31)
    piece = repeated * ((1 << 20) // len(repeated))
    return b"".join(
        [
            packer.compress(start),
            *(packer.compress(piece) for _ in range(64)),
            packer.compress(stop),
            packer.flush(),
        ]
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"empty"', b'"empty",'),
        (b'"a \\\\ b"]', b'"a \\\\ b", ]'),
        (b", 3,", b", 03,"),
        (b'"version": 1,', b'"version": 01,'),
        (b"}", b"}}"),
        (b"cat/1", b"cat/\\x"),
        (b"cat/1", b"cat/\n"),
        (b"cat/1", "cat/é".encode()),
    ],
)
def test_a_text_that_is_no_json_is_damage(old: bytes, new: bytes) -> None:
    """What another reader of JSON refuses is refused here."""
    assert old in TEXT
    assert read(gzip.compress(TEXT.replace(old, new))) is None


START = text_of(HEAD, "cat")


@pytest.mark.parametrize(
    "data",
    [
        bomb(TEXT[:-1], b" ", b"\n"),
        bomb(TEXT, b"\n"),
        bomb(b"", b" ", TEXT),
        bomb(b"", b"["),
        bomb(START, b"[],"),
        bomb(START, b"[]\n"),
        bomb(START, b"[" + b"[]," * 21000 + b"[]]\n"),
        bomb(START + b'["cat/', b"x", b'.jpg", 1, "v"]\n'),
        bomb(START + b'["cat/', b"\\u0061", b'.jpg", 1, "v"]\n'),
        bomb(START + b'["cat/1.jpg", 1, "', b"v", b'"]\n'),
        bomb(START + b'["cat/1.jpg", ', b"1", b', "v"]\n'),
        bomb(START, b'["cat/1.jpg", 1, "v"]\n'),
        bomb(text_of(HEAD), b'"a"\n'),
        bomb(b'{"version": ', b"1"),
        GOOD + bomb(b"", b"\0"),
        bomb(b"", b"\0"),
    ],
    ids=range(16),
)
def test_a_small_list_that_grows_takes_no_memory(data: bytes) -> None:
    """It is refused when the first part that should not be there is met."""
    assert read(data) is None
