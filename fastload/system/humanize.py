"""Format byte counts, times, tables and commands for people: in logs, in reports and on the command line."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def readable_size(nbytes: float) -> str:
    """``nbytes`` in powers of 1000: ``1.5 GB``."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes:.0f} B"


def readable_memory(nbytes: int) -> str:
    """``nbytes`` of memory in powers of 1024, as torch's messages and nvidia-smi show it: ``1.50 GiB``."""
    return f"{nbytes / 2**30:,.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:,.2f} MiB"


def readable_time(seconds: float) -> str:
    """``seconds`` with three digits: ``1.5 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def table(rows: list[list[str]]) -> list[str]:
    """Format rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def fastload_command(*words: str) -> str:
    """A command to copy from a message, in backquotes; its words are quoted for a shell."""
    return f"`{shlex.join(('fastload', *words))}`"


def did_you_mean(text: str, choices: Iterable[str]) -> str:
    """A question that names the choice that is most like a text, after a colon; empty if none is."""
    import difflib  # here: hardly anything needs it

    by_name = {choice.lstrip("-"): choice for choice in choices}
    found = difflib.get_close_matches(text.lstrip("-"), by_name, 1)
    return f": did you mean {by_name[found[0]]}?" if found else ""
