"""What the command line does with a directory of decoded files: verify, list, remove."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastload.cache.disk.disk_store import DESCRIPTION, DiskFileStore, read_description
from fastload.cache.disk.records import decode
from fastload.cache.disk.rows import FILE, PIXELS, ROW_BYTES, are_right
from fastload.cache.disk.segments import NAME
from fastload.cache.progress import BuildProgress
from fastload.errors import CacheMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastload.cache.disk.rows import Row
    from fastload.cache.disk.segments import Segment

_CHUNK_ROWS = 1 << 16
_CONTENT = np.dtype("V32")


def open_existing(path: str) -> DiskFileStore:
    """The store in a directory that is one already.

    Raises:
        CacheMismatchError: It is not one.
        CacheError: It cannot be read.
    """
    read_description(path)
    return DiskFileStore(path)


def details_of(path: str) -> dict[str, Any]:
    """What a directory of decoded files holds, ready for JSON.

    `num_contents` is the number of different files, `num_pixels` that of results of decoding, which the same
    file can have several of.
    """
    store = open_existing(path)
    return {
        "path": store.path,
        "kind": "files",
        **read_description(path),
        "num_pixels": store.num_files,
        "num_contents": len(_contents(store)),
        "num_segments": len(store.segments),
        "nbytes": store.nbytes,
    }


def files_of(path: str) -> list[str]:
    """Every file of the directory, and the directory, in the order in which they are removed.

    Raises:
        CacheMismatchError: It has other files, too.
    """
    names = sorted(os.listdir(path))
    foreign = [name for name in names if not NAME.fullmatch(name) and not name.startswith(DESCRIPTION)]
    if foreign:
        raise CacheMismatchError(
            f"{path} has files that are not fastload's, such as {foreign[0]}: nothing was removed"
        )
    # Last, so that what an interrupted removal leaves can be removed.
    names.sort(key=lambda name: name.startswith(DESCRIPTION))
    return [*(os.path.join(path, name) for name in names), path]


class Verified(NamedTuple):
    """What was found when everything was read.

    Attributes:
        num_pixels: Results of decoding.
        num_damaged: Those that are damaged, and rows that are.
    """

    num_pixels: int
    num_damaged: int


def verify(path: str, *, progress: bool = False) -> Verified:
    """Read all rows and records, and compare them with their checksums.

    Args:
        path: The directory.
        progress: Draw a bar, if standard error is a terminal.

    Raises:
        CacheError: It cannot be read.
    """
    store = open_existing(path)
    num_damaged = 0
    with BuildProgress(f"verifying {store.path}", store.num_files, shown=progress) as shown:
        for segment, _, row in _rows(store):
            if row is None:
                num_damaged += 1
            elif row.kind == PIXELS:
                offset, nbytes, head_bytes, checksum = row.values
                try:
                    is_right = decode(segment.record(offset, nbytes), head_bytes, checksum) is not None
                except OSError:
                    is_right = False
                num_damaged += not is_right
                shown.advance(nbytes)
    return Verified(store.num_files, num_damaged)


def _contents(store: DiskFileStore) -> list[bytes]:
    """The different contents of files that are known, each a SHA-256."""
    found = [np.empty(0, _CONTENT)]
    for segment in store.segments:
        start = 0
        while data := segment.rows(start, _CHUNK_ROWS):
            rows = np.frombuffer(data, "<u8").reshape(-1, ROW_BYTES // 8)
            start += len(rows)
            rows = rows[are_right(rows) & (rows[:, 2] == FILE)]
            found.append(np.ascontiguousarray(rows[:, 3:7]).view(_CONTENT).reshape(-1))
    return [each.tobytes() for each in np.unique(np.concatenate(found))]


def _rows(store: DiskFileStore) -> Iterator[tuple[Segment, int, Row | None]]:
    """All rows but the headers; None for a damaged one."""
    for segment in store.segments:
        for number in range(1, segment.num_rows):
            yield segment, number, segment.row(number)
