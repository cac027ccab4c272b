"""Shows the progress of work on a cache: a bar on a terminal, occasional log lines elsewhere.

It starts no thread, because a build forks workers. A title contains a user's path: it is drawn as plain text,
not parsed as markup, and truncated on narrow terminals.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from fastload.system.humanize import readable_size
from fastload.system.logs import log

if TYPE_CHECKING:
    from rich.progress import Progress

_REFRESH_S = 0.1
_LOG_EVERY_S = 10.0


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
        self._bar = _bar() if shown else None
        if self._bar is not None:
            self._task = self._bar.add_task(title, total=total, completed=done, figures="")

    def __enter__(self) -> BuildProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._report()
            self._bar.stop()
        elif kind is None:
            log.info("%s: finished: %s", self._title, self._figures())

    def advance(self, nbytes: int, count: int = 1) -> None:
        """Count this many more samples, with this many bytes in total; thread-safe."""
        with self._lock:
            self._done += count
            self._bytes += nbytes
            now = time.monotonic()
            if now - self._last > (_LOG_EVERY_S if self._bar is None else _REFRESH_S):
                self._last = now
                self._report()

    def _report(self) -> None:
        figures = f"{self._done:,}/{self._total:,} {self._figures()}"
        if self._bar is None:
            log.info("%s: %s", self._title, figures)
        else:
            self._bar.update(self._task, completed=self._done, figures=figures)
            self._bar.refresh()

    def _figures(self) -> str:
        elapsed_s = max(time.monotonic() - self._start, 1e-9)
        return f"{(self._done - self._first) / elapsed_s:,.0f} samples/s, {readable_size(self._bytes)}"


def _bar() -> Progress | None:
    """A bar on standard error; None if that is no terminal."""
    stream = sys.stderr
    is_forced = "FORCE_COLOR" in os.environ or "TTY_COMPATIBLE" in os.environ  # then rich decides
    if stream is None or stream.closed or not (is_forced or stream.isatty()):
        return None
    from rich.console import Console  # here: slow to import, and most runs draw no bar
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    console = Console(stderr=True)
    title = TextColumn(
        "{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
    )
    figures = TextColumn("{task.fields[figures]}", markup=False, table_column=Column(no_wrap=True))
    columns = (title, BarColumn(bar_width=10), figures, TimeRemainingColumn())
    bar = Progress(*columns, console=console, auto_refresh=False, expand=True)
    return bar if console.is_terminal else None
