"""Copies a folder, with restart markers in its JPEGs, so crops decode only their tiles.

Rules:

1. A rewritten file counts only if it decodes to the pixels of its original; otherwise the file is copied.
2. Files appear in DEST when complete, with the times of their originals. A file with the time of its original
   is not written again, so an interrupted run continues.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fastload.errors import ImageReadError
from fastload.images.decode import decode
from fastload.images.jpeg import END, START, markers, parse_jpeg
from fastload.images.restarts import add_restarts, has_restarts, restart_interval

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_CHUNK_FILES = 16  # a task of a process


class TiledFile(NamedTuple):
    """What became of a file.

    Attributes:
        name: Its path below the folder.
        nbytes: Its length before.
        new_nbytes: Its length now.
        is_tiled: Whether it has the markers now.
        reason: Why a JPEG was copied unchanged; None for other files.
    """

    name: str
    nbytes: int
    new_nbytes: int
    is_tiled: bool
    reason: str | None


def files_to_tile(source: str, dest: str) -> list[str]:
    """The paths below `source` of all files missing from `dest`.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: One folder is inside the other.
    """
    if not os.path.isdir(source):
        raise FileNotFoundError(f"there is no folder {source}")
    inner, outer = os.path.realpath(dest), os.path.realpath(source)
    if os.path.commonpath([inner, outer]) in (inner, outer):
        raise ValueError(f"DEST should lie outside of SOURCE, but they are {dest} and {source}")
    names, seen = [], set()
    for folder, folders, files in os.walk(source, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # a link to a parent folder
            folders.clear()
            continue
        seen.add(real)
        names += [os.path.relpath(os.path.join(folder, file), source) for file in files]
    return sorted(name for name in names if not _is_done(source, dest, name))


def tile_files(source: str, dest: str, names: Sequence[str], num_workers: int) -> Iterator[TiledFile]:
    """Write these files of `source` to `dest`, with restart markers in JPEGs; in this order.

    Args:
        source: A folder.
        dest: A folder, created if missing.
        names: Paths below `source`.
        num_workers: Processes; 0 for none.

    Raises:
        OSError: A file cannot be read or written.
    """
    sources, dests = [source] * len(names), [dest] * len(names)
    if num_workers == 0:
        yield from map(tile_file, sources, dests, names)
        return
    executor = ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn"))
    try:
        yield from executor.map(tile_file, sources, dests, names, chunksize=_CHUNK_FILES)
    finally:
        executor.shutdown(cancel_futures=True)


def tile_file(source: str, dest: str, name: str) -> TiledFile:
    """Write one file; see `tile_files`."""
    path, new_path = os.path.join(source, name), os.path.join(dest, name)
    with open(path, "rb") as file:
        content = file.read()
    new, reason = content, None
    if content[: len(START)] == START:
        try:
            new = tile_jpeg(content, path)
        except (ValueError, ImageReadError) as error:
            reason = error.reason if isinstance(error, ImageReadError) else str(error)
    os.makedirs(os.path.dirname(new_path), exist_ok=True)
    unfinished = f"{new_path}.partial-{os.getpid()}"
    try:
        with open(unfinished, "wb") as file:
            file.write(new)
        shutil.copystat(path, unfinished)
        os.replace(unfinished, new_path)
    except BaseException:
        if os.path.exists(unfinished):
            os.unlink(unfinished)
        raise
    is_tiled = content[: len(START)] == START and reason is None
    return TiledFile(name, len(content), len(new), is_tiled, reason)


def tile_jpeg(content: bytes, path: str) -> bytes:
    """The same picture with restart markers; the content itself if it has them already.

    Raises:
        ValueError: The file cannot have them, or is damaged.
        ImageReadError: It cannot be decoded.
    """
    new = add_restarts(_transcoded(content))
    if new is not content and not np.array_equal(decode(content, path), decode(new, path)):
        raise ValueError("the rewritten file had other pixels")
    return new


def _transcoded(content: bytes) -> bytes:
    """The file by jpegtran, sequential and with markers, in a fifth of the time that Python needs.

    The content itself if the program is not installed, or would drop bytes behind the picture.
    """
    header, program = parse_jpeg(content), shutil.which("jpegtran")
    if header is None or program is None or has_restarts(header):
        return content
    if header.is_one_scan:
        places, kinds = markers(content, header)
        ends = places[kinds == END[1]]
        if not ends.size or header.scan_at + ends[0] + len(END) != len(content):
            return content
    words = ["-copy", "all", "-optimize", "-restart", f"{restart_interval(header.num_mcus[0])}B"]
    done = subprocess.run([program, *words], input=content, capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else content


def _is_done(source: str, dest: str, name: str) -> bool:
    try:
        new = os.stat(os.path.join(dest, name))
    except OSError:
        return False
    return new.st_mtime_ns == os.stat(os.path.join(source, name)).st_mtime_ns
