"""Shows the progress of work on a cache: a bar on a terminal, occasional log lines elsewhere.

It starts no thread, because a build forks workers. Rules:

1. The counter, the rate and the time left are always shown completely. On a narrow terminal the title loses
   its middle, the bytes are left out, and the bar is shorter.
2. A title contains a user's path: it is drawn as plain text, not parsed as markup.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from fastload.system.logs import log
from fastload.system.sizes import readable_size

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress

_REFRESH_S = 0.1
_LOG_EVERY_S = 10.0
_BAR_COLUMNS, _WIDE_COLUMNS = 20, 100
_TIME_AND_GAPS_COLUMNS = 11  # hh:mm:ss, and one between neighbouring parts


class BuildProgress:
    """Counts samples and bytes, and shows them with the rate and the time left.

    Args:
        title: The name of what is built.
        total: Number of samples.
        shown: Draw a bar, if standard error is a terminal.
        done: Samples of an earlier build; the rate does not include them.
    """

    def __init__(self, title: str, total: int, *, shown: bool, done: int = 0) -> None:
        self._title = title
        self._total = total
        self._done = self._first = done
        self._bytes = 0
        self._lock = threading.Lock()
        self._start = self._last = time.monotonic()
        self._bar: Progress | None = None
        if not shown or not _may_be_terminal():
            return
        from rich.console import Console  # here: slow to import, and most runs draw no bar
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        if console.is_terminal:
            self._bar_column = BarColumn()
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                self._bar_column,
                TextColumn("{task.fields[figures]}", markup=False),
                TimeRemainingColumn(),
                console=console,
                auto_refresh=False,
            )
            self._task = self._bar.add_task("", total=total, completed=done, figures="")
            self._draw(self._bar)

    def __enter__(self) -> BuildProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._draw(self._bar)
            self._bar.stop()
        elif error is None:
            log.info("%s: finished: %s, %s", self._title, self._rate(), self._size())

    def advance(self, nbytes: int, count: int = 1) -> None:
        """Count this many more samples, with this many bytes in total; any thread may do so."""
        with self._lock:
            self._done += count
            self._bytes += nbytes
            now = time.monotonic()
            if self._bar is not None and now - self._last > _REFRESH_S:
                self._draw(self._bar)
                self._last = now
            elif self._bar is None and now - self._last > _LOG_EVERY_S:
                done = f"{self._done:,} of {self._total:,} samples"
                log.info("%s: %s: %s, %s", self._title, done, self._rate(), self._size())
                self._last = now

    def _draw(self, bar: Progress) -> None:
        width = bar.console.width
        figures = f"{self._done:,}/{self._total:,} {self._rate()}"
        if width >= _WIDE_COLUMNS:
            figures += f", {self._size()}"
        self._bar_column.bar_width = min(_BAR_COLUMNS, max(5, width // 2 - 25))
        room = width - self._bar_column.bar_width - len(figures) - _TIME_AND_GAPS_COLUMNS
        title = shortened(self._title, max(1, room))
        bar.update(self._task, description=title, completed=self._done, figures=figures)
        bar.refresh()

    def _rate(self) -> str:
        elapsed_s = max(time.monotonic() - self._start, 1e-9)
        return f"{(self._done - self._first) / elapsed_s:,.0f} samples/s"

    def _size(self) -> str:
        return readable_size(self._bytes)


def _may_be_terminal() -> bool:
    """Whether standard error may be a terminal; with two environment variables, rich decides."""
    if "FORCE_COLOR" in os.environ or "TTY_COMPATIBLE" in os.environ:
        return True
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # it is closed
        return False


def shortened(text: str, columns: int) -> str:
    """The text, without as much of its middle as it takes to fit into `columns` of a terminal."""
    if _columns(text) <= columns:
        return text
    start = text[: (columns - 1) // 3]  # the end of a path says more than its start
    for first in range(len(start), len(text) + 1):
        candidate = f"{start}…{text[first:]}"
        if _columns(candidate) <= columns:
            return candidate
    return "…"


def _columns(text: str) -> int:
    from rich.cells import cell_len  # characters of some scripts take two columns

    return cell_len(text)
