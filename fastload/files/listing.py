"""The files of a folder in torchvision's order, and the list of them that is saved in a remote folder.

Rules:

1. The classes are the folders directly below the root, sorted by name. A class's files are sorted by folder
   and then by name, as torchvision's ImageFolder sorts them.
2. A saved list has every file, with its length and its version: an ImageFolder of any `extensions` reads it.
3. It has a line of JSON for its version and age, for each class, and for each file, in order and each of them
   once. A list that is damaged, or of another format, is an error; it is never a shorter list.
4. Somebody else may have written the list: its names stay below the folder, and its numbers are bounded. It
   is decompressed and checked line by line, so it takes memory only for lines that are right, and only as
   many as a list of its compressed size can have.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import time
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

SAVED_NAME = ".fastload-files.jsonl.gz"

_FORMAT_VERSION = 1
_DIGEST_BYTES = 16
_MAX_RATIO = 128  # of lists to their compressed size: numbered files without versions have 10 to 32
_MIN_LIMIT_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 16  # a character takes at most twelve
_MAX_CHARACTERS = 4096  # of a name, or of a version
_MAX_BYTES = 1 << 63  # of a file
_MAX_SECONDS = 250_000_000_000  # in the year 9892, which calendars can still represent
UNKNOWN_BYTES = -1

_MAY_LEAD_OUT = re.compile(r"\.\.|[%\t\r\n\0\ud800-\udfff]|\A[/\\]|\A\Z")


class RemoteFile(NamedTuple):
    """A file of a remote folder.

    Attributes:
        name: Its path below the folder, with slashes.
        nbytes: Its length; `UNKNOWN_BYTES` if the store does not tell it.
        version: A text that changes with its content, such as an ETag; empty if the store has none.
    """

    name: str
    nbytes: int
    version: str


@dataclass(frozen=True)
class Listing:
    """The files of some classes.

    Attributes:
        classes: Names, sorted.
        names: For each class, the paths of its files below the root, in order.
        nbytes: The length of each file in order, `(num_files,) int64`, `UNKNOWN_BYTES` where it is unknown;
            None for files of this machine, whose lengths are not read.
        digest: Of names, lengths and versions; None if they are unknown.
    """

    classes: list[str]
    names: list[list[bytes]]
    nbytes: npt.NDArray[np.int64] | None = None
    digest: str | None = None


def arrange(classes: Iterable[str], files: Iterable[RemoteFile], extensions: tuple[str, ...]) -> Listing:
    """The images among remote files, by class.

    Args:
        classes: The names of all classes, in any order.
        files: All files, in any order.
        extensions: The file name extensions of images, in lower case.
    """
    ordered = sorted(classes)
    labels = {name: label for label, name in enumerate(ordered)}
    chosen: list[list[RemoteFile]] = [[] for _ in ordered]
    for file in files:
        label = labels.get(file.name.partition("/")[0])
        if label is not None and "/" in file.name and file.name.lower().endswith(extensions):
            chosen[label].append(file)
    for group in chosen:
        group.sort(key=lambda file: file.name.rpartition("/")[::2])
    return Listing(
        ordered,
        [[os.fsencode(file.name) for file in group] for group in chosen],
        np.array([file.nbytes for group in chosen for file in group], np.int64),
        _digest([file for group in chosen for file in group]),
    )


def _digest(files: Sequence[RemoteFile]) -> str | None:
    """A digest that changes with any file; None if the store has no version of one of them."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for file in files:
        if not file.version:
            return None
        digest.update(f"\0{file.name}\0{file.nbytes}\0{file.version}".encode(errors="surrogateescape"))
    return digest.hexdigest()


def to_bytes(classes: Iterable[str], files: Iterable[RemoteFile]) -> bytes:
    """A list as it is saved: compressed lines of JSON."""
    head = {"version": _FORMAT_VERSION, "created_s": time.time()}
    lines = [head, *sorted(set(classes)), *sorted({file.name: file for file in files}.values())]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    return gzip.compress(text.encode("ascii"), compresslevel=6, mtime=0)


def from_bytes(data: bytes) -> tuple[float, list[str], list[RemoteFile]]:
    """When a saved list was made (in seconds since 1970), its classes and its files.

    Raises:
        ValueError: It is damaged, or of another format; the error gives the reason.
    """
    classes: list[str] = []
    known: set[str] = set()
    files: list[RemoteFile] = []
    try:
        lines = _lines(data)
        created_s = _created_s(next(lines, None))
        for line in lines:
            if not files and _is_name(line) and "/" not in line and [line] > classes[-1:]:
                classes.append(line)
                known.add(line)
                continue
            file = _file(line)
            after = files[-1].name if files else ""
            if file is None or file.name <= after or file.name.partition("/")[0] not in known:
                raise ValueError(f"{line!r:.100} is not the next class or file, with its length and version")
            files.append(file)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise ValueError(f"it is damaged: {error}") from error
    return created_s, classes, files


def _lines(data: bytes) -> Iterator[Any]:
    """What the lines of a list say."""
    left = _MIN_LIMIT_BYTES + _MAX_RATIO * len(data)
    with gzip.open(io.BytesIO(data)) as file:
        while line := file.readline(_MAX_LINE_BYTES):
            left -= len(line)
            if left < 0:
                raise ValueError("it grows too much when decompressed")
            if not line.endswith(b"\n"):
                raise ValueError(f"a line is cut off, or too long: {line!r:.100}")
            yield json.loads(line.decode("ascii"))


def _created_s(head: Any) -> float:
    if not isinstance(head, dict) or head.get("version") != _FORMAT_VERSION:
        raise ValueError(f"it begins with {head!r:.100}, and this release reads format {_FORMAT_VERSION}")
    created_s: Any = head.get("created_s")
    if type(created_s) not in (int, float) or not 0 <= created_s < _MAX_SECONDS:  # NaN is not in the range
        raise ValueError(f"it was made at second {created_s!r:.40}")
    return float(created_s)


def _file(line: Any) -> RemoteFile | None:
    """The file of a line; None unless it is a name below the folder, a length and a version."""
    if not isinstance(line, list) or [type(field) for field in line] != [str, int, str]:
        return None
    file = RemoteFile(*line)
    is_version = file.version.isascii() and len(file.version) <= _MAX_CHARACTERS
    is_right = _is_name(file.name) and UNKNOWN_BYTES <= file.nbytes < _MAX_BYTES and is_version
    return file if is_right else None


def _is_name(text: Any) -> bool:
    return isinstance(text, str) and len(text) <= _MAX_CHARACTERS and is_below(text)


def is_below(name: str) -> bool:
    """Whether a name stays below its folder on every kind of store, and can be a file's name here."""
    if not _MAY_LEAD_OUT.search(name):
        return True
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    # Clients of web servers leave these characters out.
    parts = re.split(r"[/\\]", unquote(re.sub(r"[\t\r\n]", "", name)))
    return "\0" not in name and parts[0] != "" and ".." not in parts
