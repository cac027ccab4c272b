"""The bar of a build, a verification or a fill: its counter can be read on a narrow terminal."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import rich.console

from fastload.cache import progress
from fastload.cache.progress import BuildProgress

LONG_TITLE = "building /home/someone/projects/photographs-of-animals/caches/2026/train-256.lmdb"
Draw = Callable[..., str]


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Draw:
    """Draws one bar on a terminal of some columns, and gives its last line."""
    real = rich.console.Console
    seconds = itertools.count(0, 10)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setenv("FORCE_COLOR", "1")  # or standard error, which is no terminal, is asked

    def draw_bar(columns: int, title: str, total: int, done: int, nbytes: int = 0) -> str:
        file = io.StringIO()
        console = real(file=file, width=columns, force_terminal=True, color_system=None, legacy_windows=False)
        monkeypatch.setattr(rich.console, "Console", lambda **_: console)
        with BuildProgress(title, total, shown=True) as progress:
            progress.advance(nbytes, done)
        lines = file.getvalue().replace("\r", "\n").splitlines()
        return [line.split("\x1b[2K")[-1].rstrip() for line in lines if f"/{total:,} " in line][-1]

    return draw_bar


@pytest.mark.parametrize("columns", [80, 100, 160])
def test_the_counter_the_rate_and_the_time_are_whole(columns: int, draw: Draw) -> None:
    """A long path takes no place from the counter, the rate and the time left."""
    line = draw(columns, LONG_TITLE, 1_281_167, 640_000, nbytes=10 << 30)

    assert len(line) <= columns
    assert " 640,000/1,281,167 " in line
    assert " samples/s, 10.7 GB" in line
    assert ":" in line.split()[-1]
    assert line.startswith("building ")


def test_a_path_is_no_markup(draw: Draw) -> None:
    """Brackets in a path are drawn as they are."""
    assert draw(100, "building /data/[bold]/x.lmdb", 10, 5).startswith("building /data/[bold]/x.lmdb ")
