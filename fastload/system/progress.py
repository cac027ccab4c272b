"""Shows how far work that takes long has come: a line on a terminal, and nothing elsewhere.

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

_REFRESH_S = 0.1
_MAX_S = 359_999.0
_CLEAR = "\r\x1b[2K"  # the line


class Progress:
    """Counts, and shows the number with the rate and the time left.

    At the end, also by an error, the line stays where it stopped.

    Args:
        title: What is done.
        total: How many there are.
        shown: Draw a line, if standard error is a terminal.
        done: How many were done earlier; the rate does not include them.
        unit: What is counted.
    """

    def __init__(self, title: str, total: int, *, shown: bool, done: int = 0, unit: str = "samples") -> None:
        self._title = "".join(char if char.isprintable() else "?" for char in title)
        self._total, self._unit = total, unit
        self._done = self._first = done
        self._bytes = 0
        self._lock = threading.Lock()
        self._start = self._last = time.monotonic()
        stream = sys.stderr
        self._is_drawn = shown and stream is not None and not stream.closed and stream.isatty()

    def __enter__(self) -> Progress:
        if self._is_drawn:
            self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_drawn:
            self._draw()
            sys.stderr.write("\n")

    def advance(self, nbytes: int = 0, count: int = 1) -> None:
        """Count this many more, with this many bytes in total; thread-safe."""
        with self._lock:
            self._done += count
            self._bytes += nbytes
            now = time.monotonic()
            if self._is_drawn and now - self._last > _REFRESH_S:
                self._last = now
                self._draw()

    def _draw(self) -> None:
        rate = (self._done - self._first) / max(time.monotonic() - self._start, 1e-9)
        figures = f"{self._done:,}/{self._total:,} {rate:,.{0 if rate > 10 else 1}f} {self._unit}/s"
        figures += f", {readable_size(self._bytes)}" if self._bytes else ""
        if rate:  # else nothing is known of it
            figures += f" {timedelta(seconds=int(min((self._total - self._done) / rate, _MAX_S)))}"
        room = max(0, shutil.get_terminal_size().columns - len(figures) - 2)  # a full line would wrap
        title = self._title if len(self._title) <= room else f"{self._title[: max(0, room - 3)]}..."
        sys.stderr.write(f"{_CLEAR}{title} {figures}")
        sys.stderr.flush()
