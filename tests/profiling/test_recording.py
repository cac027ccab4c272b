"""Recordings: what is written is read, at any moment and beyond their size."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.profiling import recording
from fastload.profiling.recording import OTHER, Recording, Row, Sums, read_recording

if TYPE_CHECKING:
    from pathlib import Path


def row(number: int) -> Row:
    """A row that can be told from others."""
    return Row(number, number + 1, 1, -1, -1, 0, 0, 4, 1)


def only_file(directory: Path) -> Path:
    """The one recording of a directory."""
    (path,) = directory.glob("*.rec")
    return path


def test_rows_and_sums_are_read_as_written(tmp_path: Path) -> None:
    """Also while the writer goes on."""
    writer = Recording(tmp_path, loader=3, worker=1)
    writer.add_row(row(10))
    writer.add("decode", "imread", Sums(1, 5, 4, 300, 100))
    writer.add("decode", "imread", Sums(1, 6, 2, 300, 100))

    found = read_recording(only_file(tmp_path))
    writer.close()

    assert found is not None
    assert (found.loader, found.worker, found.pid, found.num_batches) == (3, 1, os.getpid(), 1)
    assert found.rows == [row(10)]
    assert found.sums == {("decode", "imread"): Sums(2, 11, 6, 600, 200)}


def test_the_oldest_rows_are_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last MAX_ROWS stay, oldest first, and the number of all is known."""
    monkeypatch.setattr(recording, "MAX_ROWS", 4)
    writer = Recording(tmp_path, 0, 0)
    for number in range(6):
        writer.add_row(row(number))

    found = read_recording(only_file(tmp_path))
    writer.close()

    assert found is not None
    assert found.num_batches == 6
    assert found.rows == [row(number) for number in range(2, 6)]


def test_names_beyond_the_limit_are_added_up(tmp_path: Path) -> None:
    """No time is lost: it is recorded as that of others."""
    writer = Recording(tmp_path, 0, 0)
    for number in range(2_000):
        writer.add("line", f"name {number}", Sums(calls=1))

    found = read_recording(only_file(tmp_path))
    writer.close()

    assert found is not None
    assert sum(sums.calls for sums in found.sums.values()) == 2_000
    assert found.sums["line", OTHER].calls > 900


@settings(max_examples=50)
@given(name=st.text(max_size=400))
def test_any_name_is_kept_or_shortened(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Long names are cut between characters; NULs at the end are lost."""
    directory = tmp_path_factory.mktemp("recording")
    writer = Recording(directory, 0, 0)
    encodable = name.encode(errors="replace").decode()
    writer.add("read", encodable, Sums(calls=1))

    found = read_recording(only_file(directory))
    writer.close()

    assert found is not None
    ((_, read),) = found.sums
    assert encodable.rstrip("\0").startswith(read)
    assert len(read.encode()) > 170 or read == encodable.rstrip("\0")


@pytest.mark.parametrize("content", [b"", b"x" * 100])
def test_other_files_are_no_recordings(content: bytes, tmp_path: Path) -> None:
    """A file of another size is left out."""
    path = tmp_path / "strange.rec"
    path.write_bytes(content)

    assert read_recording(path) is None


def test_a_file_that_was_never_begun_is_no_recording(tmp_path: Path) -> None:
    """Its writer was killed before the header was written."""
    writer = Recording(tmp_path, 0, 0)
    writer.close()
    path = only_file(tmp_path)
    size = path.stat().st_size
    path.write_bytes(bytes(size))

    assert read_recording(path) is None
