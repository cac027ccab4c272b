"""The log of the package: `fastload`, as Python's logging knows it."""

from __future__ import annotations

import functools
import logging

log = logging.getLogger("fastload")


@functools.cache
def say_once(text: str, level: int = logging.WARNING) -> None:
    """Log a line once per process, although each epoch or each step would cause it again."""
    log.log(level, "%s", text)
