"""Progress of a build: a bar on a terminal, a log line now and then elsewhere.

Called by `build` in the parent. It starts no thread: a build forks workers.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress

log = logging.getLogger("fastload")

_REFRESH_S = 0.1
_LOG_EVERY_S = 10.0


class BuildProgress:
    """Counts samples and bytes, and shows them with the rate and the time left.

    Args:
        title: What is built.
        total: Number of samples.
        shown: Draw a bar, if standard error is a terminal.
        done: Samples that an earlier build has left; they do not count for the rate.
    """

    def __init__(self, title: str, total: int, *, shown: bool, done: int = 0) -> None:
        self._title = title
        self._total = total
        self._done = self._first = done
        self._bytes = 0
        self._start = self._last = time.monotonic()
        # Imported by builds alone: it would double the time that `import fastload` adds to torch's.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self._bar: Progress | None = None
        if shown and console.is_terminal:
            columns = (
                "{task.description}",
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
            )
            self._bar = Progress(*columns, TimeRemainingColumn(), console=console, auto_refresh=False)
            self._task = self._bar.add_task(title, total=total, completed=done, rate="")

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
            log.info("%s: finished: %s", self._title, self._rate())

    def advance(self, nbytes: int, count: int = 1) -> None:
        """So many samples more, of so many bytes together, are done."""
        self._done += count
        self._bytes += nbytes
        now = time.monotonic()
        if self._bar is not None and now - self._last > _REFRESH_S:
            self._draw(self._bar)
            self._last = now
        elif self._bar is None and now - self._last > _LOG_EVERY_S:
            log.info("%s: %d of %d samples: %s", self._title, self._done, self._total, self._rate())
            self._last = now

    def _draw(self, bar: Progress) -> None:
        bar.update(self._task, completed=self._done, rate=self._rate())
        bar.refresh()

    def _rate(self) -> str:
        elapsed_s = max(time.monotonic() - self._start, 1e-9)
        return f"{(self._done - self._first) / elapsed_s:,.0f} samples/s, {self._bytes / 1e6:,.0f} MB"
