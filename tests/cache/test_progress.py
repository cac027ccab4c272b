"""The bar of a build, a verification or a fill: everything in it can be read on a narrow terminal."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import rich.console
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from fastload.cache import progress
from fastload.cache.progress import BuildProgress, shortened

LONG_TITLE = "building /home/someone/projects/photographs-of-animals/caches/2026/train-256.lmdb"
Draw = Callable[..., str]


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Draw:
    """Draws one bar on a terminal of some columns, and gives its last line."""
    real = rich.console.Console
    seconds = itertools.count(0, 10)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # or rich would not be asked at all

    def draw_bar(columns: int, title: str, total: int, done: int, nbytes: int = 0) -> str:
        file = io.StringIO()
        console = real(file=file, width=columns, force_terminal=True, color_system=None, legacy_windows=False)
        monkeypatch.setattr(rich.console, "Console", lambda **_: console)
        with BuildProgress(title, total, shown=True) as progress:
            progress.advance(nbytes, done)
        lines = file.getvalue().replace("\r", "\n").splitlines()
        return [line.split("\x1b[2K")[-1].rstrip() for line in lines if f"/{total:,} " in line][-1]

    return draw_bar


@pytest.mark.parametrize("columns", [60, 80])
def test_the_counter_the_rate_and_the_time_are_whole(columns: int, draw: Draw) -> None:
    """A long path takes no place from the counter, the rate and the time left."""
    line = draw(columns, LONG_TITLE, 1_281_167, 640_000, nbytes=10 << 30)

    assert len(line) <= columns
    assert " 640,000/1,281,167 " in line
    assert " samples/s" in line
    assert ":" in line.split()[-1]
    assert "…" not in line.split(" 640,000/")[1]


@pytest.mark.parametrize(("columns", "bar_columns"), [(60, 5), (80, 15), (100, 20), (120, 20)])
def test_a_long_path_leaves_room_for_the_bar(columns: int, bar_columns: int, draw: Draw) -> None:
    """On a terminal of usual width a progress can be seen in it."""
    line = draw(columns, LONG_TITLE, 1_281_167, 640_000, nbytes=10 << 30)

    assert line.index(" 640,000/") - line.index("━") == bar_columns


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(
    columns=st.integers(60, 250),
    title=st.text(st.characters(exclude_categories=["C", "Z", "M"]), max_size=200),
    total=st.integers(1, 99_999_999),
    share=st.floats(0, 1),
    nbytes=st.integers(0, 1 << 40),
)
def test_every_bar_fits_into_one_line(
    columns: int, title: str, total: int, share: float, nbytes: int, draw: Draw
) -> None:
    """Whatever is built and however wide the terminal is, the line fits, and the counter is in it."""
    done = int(total * share)
    line = draw(columns, f"building {title}", total, done, nbytes)

    assert cell_len(line) <= columns
    assert f" {done:,}/{total:,} " in line
    assert "samples/s" in line


def test_a_path_is_no_markup(draw: Draw) -> None:
    """Brackets in a path are drawn as they are."""
    assert draw(100, "building /data/[bold]/x.lmdb", 10, 5).startswith("building /data/[bold]/x.lmdb ")


def test_a_wide_terminal_shows_the_whole_title_and_the_bytes(draw: Draw) -> None:
    """What fits is not shortened."""
    line = draw(160, LONG_TITLE, 1000, 500, nbytes=30_000_000)

    assert line.startswith(LONG_TITLE)
    assert "samples/s, 30.0 MB" in line


@given(text=st.text(max_size=80), columns=st.integers(1, 90))
def test_a_shortened_text_keeps_both_ends(text: str, columns: int) -> None:
    """A text that is too wide loses its middle; one that fits is left alone."""
    cut = shortened(text, columns)

    assert cell_len(cut) <= columns
    if cut != text:
        head, _, tail = cut.partition("…")
        assert text.startswith(head)
        assert text.endswith(tail)
        assert cell_len(text) > columns
