"""Recordings: what is written is read, at any moment and up to their size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.profiling import recording
from fastload.profiling.recording import Batch, Moment, Recording, read_recordings

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def batch(number: int) -> Batch:
    """A batch that can be told from others."""
    return Batch(3, 1, number, number + 1, 1, 2, 0, 4, [["decode", "imread", [2, 11, 6, 600, 200]]])


@settings(max_examples=50)
@given(name=st.text(max_size=400))
def test_what_is_written_is_read(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of several processes, also while they go on; batches by their time."""
    directory = str(tmp_path_factory.mktemp("recording"))
    writers = [Recording(directory), Recording(directory)]
    for number, writer in enumerate(writers):
        writer.add(batch(10 - number))
    writers[0].add(Moment(-1, -1, "pin", name, 5, 4))

    found = read_recordings(directory)
    for writer in writers:
        writer.close()

    assert found == ([batch(9), batch(10)], [Moment(-1, -1, "pin", name, 5, 4)])


def test_a_process_records_no_more_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing fails."""
    monkeypatch.setattr(recording, "MAX_LINES", 4)
    writer = Recording(str(tmp_path))
    for number in range(6):
        writer.add(batch(number))
    writer.close()

    assert read_recordings(str(tmp_path)) == ([batch(number) for number in range(4)], [])


def test_the_last_line_of_a_killed_process_is_left_out(tmp_path: Path) -> None:
    """If it is a part of one."""
    writer = Recording(str(tmp_path))
    for number in range(2):
        writer.add(batch(number))
    writer.close()
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-5])

    assert read_recordings(str(tmp_path)) == ([batch(0)], [])


def test_an_error_of_the_file_system_ends_the_recording(tmp_path: Path) -> None:
    """And not the user's loop: here the file is closed."""
    writer = Recording(str(tmp_path))
    writer.close()
    writer.add(batch(0))

    assert read_recordings(str(tmp_path)) == ([], [])
