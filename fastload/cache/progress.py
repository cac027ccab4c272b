"""Shows the progress of work on a cache: a line on a terminal, occasional log lines elsewhere.

It starts no thread, because a build forks workers. A title contains a user's path: what cannot be printed is
replaced, and it is shortened on narrow terminals.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from datetime import timedelta

from fastload.system.humanize import readable_size
from fastload.system.logs import log

_REFRESH_S = 0.1
_LOG_EVERY_S = 10.0
_MAX_S = 359_999.0
_CLEAR = "\r\x1b[2K"  # the line


class BuildProgress:
    """Counts samples and bytes, and shows them with the rate and the time left.

    Args:
        title: The name of what is built.
        total: Number of samples.
        shown: Draw a line, if standard error is a terminal.
        done: Samples of an earlier build; the rate does not include them.
    """

    def __init__(self, title: str, total: int, *, shown: bool, done: int = 0) -> None:
        self._title = "".join(char if char.isprintable() else "?" for char in title)
        self._total = total
        self._done = self._first = done
        self._bytes = 0
        self._lock = threading.Lock()
        self._start = self._last = time.monotonic()
        stream = sys.stderr
        self._is_drawn = shown and stream is not None and not stream.closed and stream.isatty()

    def __enter__(self) -> BuildProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._is_drawn:
            self._report()
            sys.stderr.write("\n")
        elif kind is None:
            log.info("%s: finished: %s", self._title, self._figures())

    def advance(self, nbytes: int, count: int = 1) -> None:
        """Count this many more samples, with this many bytes in total; thread-safe."""
        with self._lock:
            self._done += count
            self._bytes += nbytes
            now = time.monotonic()
            if now - self._last > (_REFRESH_S if self._is_drawn else _LOG_EVERY_S):
                self._last = now
                self._report()

    def _report(self) -> None:
        figures = f"{self._done:,}/{self._total:,} {self._figures()}"
        if not self._is_drawn:
            log.info("%s: %s", self._title, figures)
            return
        left_s = (self._total - self._done) / max(self._rate(), 1e-9)
        figures += f" {timedelta(seconds=int(min(left_s, _MAX_S)))}"
        room = max(0, shutil.get_terminal_size().columns - len(figures) - 2)  # a full line would wrap
        title = self._title if len(self._title) <= room else f"{self._title[: max(0, room - 3)]}..."
        sys.stderr.write(f"{_CLEAR}{title} {figures}")
        sys.stderr.flush()

    def _rate(self) -> float:
        return (self._done - self._first) / max(time.monotonic() - self._start, 1e-9)

    def _figures(self) -> str:
        return f"{self._rate():,.0f} samples/s, {readable_size(self._bytes)}"
