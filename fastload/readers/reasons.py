"""Reasons: why files were decoded although there is a cache, each with what it means for the user."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastload.readers.decode_cache import FULL, NEW, NO_SPACE, OTHER_FORMAT, SEVERAL_FRAMES, UNUSUAL
from fastload.readers.identity import SETTLED_REMOTE_S, SETTLED_S, Unknown

if TYPE_CHECKING:
    from collections.abc import Mapping

_MEANINGS = {
    NEW: "read for the first time, and remembered now",
    FULL: 'raise the limit (cache="ram:32G"), or free memory',
    UNUSUAL: "the reader returned, or was given, something else than plain values, arrays and images",
    SEVERAL_FRAMES: "of an animation only the first frame is remembered",
    OTHER_FORMAT: "convert these images to PNG or JPEG, or read them by fastload.remember(your_function)",
    Unknown.TOO_NEW.value: (
        f"read again later, they are remembered: a file must be unchanged for {SETTLED_S:.0f} seconds, and "
        f"for {SETTLED_REMOTE_S:.0f} on network mounts"
    ),
    Unknown.TOO_LARGE.value: 'remembered in memory only: cache="ram"',
    NO_SPACE: "free space on the disk of the cache, or let this user write there",
    Unknown.IN_THE_FUTURE.value: "never remembered: `touch` these files, or set the clock of the machine",
    Unknown.NOT_A_FILE.value: "members of archives and streams: extract them, or read their bytes to memory",
    Unknown.UNREADABLE.value: "closed, deleted or forbidden when the cache looked",
}


def explain(reasons: Mapping[str, int]) -> list[str]:
    """A line for each reason, the most frequent first."""
    ordered = sorted(reasons.items(), key=lambda item: -item[1])
    return [f"{count:,} {reason}: {_MEANINGS[reason]}" for reason, count in ordered]
