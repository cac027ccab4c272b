"""Reasons: why files were decoded although there is a cache, each with what it means for the user."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastload.readers import patches

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Mapping

NEW = "new"
FULL = "no memory left for it"
NOT_KEPT = "not in the cache on disk, which did not take it"
LEARNING = "resized first, which may not repeat"
UNUSUAL = "with a result or arguments that the cache does not know"
OTHER_FORMAT = "in a format that is not remembered, or a later frame"
UNCOMPRESSED = "uncompressed, or spread over several files"
UNSTEADY = "decoded to other pixels each time"
# Of bytes without an identity:
TOO_NEW = "changed a moment ago"
NOT_A_FILE = "not read from a plain file that was just opened"
TOO_LARGE = "of a file larger than 1 GiB, which is too large to be hashed"

_MEANINGS = {
    NEW: "read for the first time, and remembered now",
    FULL: 'raise the limit (cache="ram:32G"), or free memory',
    NOT_KEPT: (
        "a finished file takes nothing new: build it with the decoder that reads the files now. Otherwise "
        "its disk is full or slow, or this user cannot write there, as a log line said"
    ),
    LEARNING: "64 images, or an epoch, tell whether the results are stored, or the whole images",
    UNUSUAL: "the reader returned, or was given, something else than plain values, arrays and images",
    OTHER_FORMAT: (
        "convert these images to PNG or JPEG, or read them by a function with @fastload.remember. Of an "
        "animation only the first frame is remembered"
    ),
    UNCOMPRESSED: "never remembered: uncompressed data is read as fast as it would be found",
    UNSTEADY: "their decoder does not repeat itself, as a warning said: convert them",
    TOO_NEW: (
        "read again later, they are remembered: a file must be unchanged for 2 seconds, and for 60 on "
        "network mounts. Files that are written for each access never are: decode their bytes instead "
        "(cv2.imdecode, io.BytesIO); nor are those with a time in the future: `touch` them"
    ),
    NOT_A_FILE: (
        "members of archives, streams, and files opened for writing, read before, or closed: extract "
        'members, read bytes to memory, open files with "rb" in __getitem__, on each access'
    ),
    TOO_LARGE: 'remembered by cache="ram", unless they are on a disk image',
}


_AGAIN = "changed since it was read before, read with other arguments, or dropped as others needed the memory"
_NOTHING = (
    "no decoding by a supported library was seen (docs/guides/caching.md lists them). Samples in memory need "
    "no cache. Decode in the dataset, not in your loop, and in the thread that calls it, not in threads of "
    "its own; register your own function with @fastload.remember"
)


def report(hits: int, misses: int, reasons: Mapping[str, int]) -> list[str]:
    """What a cache did: a line with the figures, and one for each reason, the most frequent first."""
    names = patches.unmet()
    unmet = [f"  replaced or held by other code, so not remembered: {', '.join(names)}"] if names else []
    if not hits and not misses:
        return [_NOTHING, *unmet]
    ordered = sorted(reasons.items(), key=lambda item: -item[1])
    lines = [f"  {count:,} {reason}: {_MEANINGS[reason]}" for reason, count in ordered]
    return [f"{hits:,} found, {misses:,} decoded", *lines, *unmet]


def complaint(
    name: str, hits: int, misses: int, reasons: Mapping[str, int], *, unread: int, before: Counter[str]
) -> str | None:
    """Why a cache does not serve half of what was read, without figures; None if it does, or soon will.

    Args:
        name: Of what reads.
        hits: What was found.
        misses: What was decoded.
        reasons: Why.
        unread: The number of samples that were not read before.
        before: Why files were decoded before. What could not be stored then is stored when it is read again.
    """
    later = LEARNING, TOO_NEW
    pending = {NEW} if unread + sum(before[reason] for reason in later) > 0 else set()
    pending.update(later if unread > 0 else ())
    lost = {reason: count for reason, count in reasons.items() if reason not in pending}
    uncompressed = reasons.get(UNCOMPRESSED, 0)
    if 2 * (sum(lost.values()) - uncompressed) < hits + misses - uncompressed:
        return None
    if not lost:
        return "\n".join([f"nothing that {name} reads is remembered:", *report(0, 0, {})])
    meanings = {**_MEANINGS, NEW: _AGAIN}
    lines = [f"  {reason}: {meanings[reason]}" for reason in sorted(lost)]
    return "\n".join([f"half or more of what {name} reads is not found; see loader.explain():", *lines])
