"""The log of the package: `fastload`, as Python's logging knows it."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys

log = logging.getLogger("fastload")


def is_debugging() -> bool:
    """Whether the environment has FASTLOAD_DEBUG=1, which shows full tracebacks."""
    return os.environ.get("FASTLOAD_DEBUG", "0") not in ("", "0")


@functools.lru_cache(maxsize=256)  # some texts have numbers of processes in them
def say_once(text: str, level: int = logging.WARNING) -> None:
    """Log a line once per process, although each epoch or each step would cause it again."""
    log.log(level, "%s", text)


def write_stderr(text: str) -> None:
    """Write to standard error, unless the program has closed it or nothing reads it."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()
