"""The files of a folder in torchvision's order, and the list of them that is saved in a remote folder.

Rules:

1. The classes are the folders directly below the root, sorted by name. A class's files are sorted by folder
   and then by name, as torchvision's ImageFolder sorts them.
2. A saved list has every file, with its length and its version: an ImageFolder of any `extensions` reads it.
3. A list that is damaged, or of another format, is an error; it is never a shorter list. Its text is the one
   that `to_bytes` writes: classes and files in order, each of them once, and each file with its class.
4. Somebody else may have written the list: its names stay below the folder, and its numbers are bounded. It
   is decompressed and checked entry by entry, so it takes memory only for entries that are right, and only as
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
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

SAVED_NAME = ".fastload-files.json.gz"

_FORMAT_VERSION = 1
_DIGEST_BYTES = 16
_MAX_RATIO = 128  # of lists to their compressed size: numbered files without versions have 10 to 32
_MIN_LIMIT_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_MAX_ENTRY_BYTES = 1 << 16  # of the text: a character takes at most twelve
_MAX_CHARACTERS = 4096  # of a name, or of a version
_MAX_SECONDS = 250_000_000_000  # in the year 9892, which calendars can still represent
UNKNOWN_BYTES = -1

# The parts of a list's text, which is ASCII.
_STRING = r'("[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+")'
_VERSION = re.compile(r'\{"version": (0|[1-9]\d{0,8}), ')
_HEAD = re.compile(r'"created_s": ((?:0|[1-9]\d{0,11})(?:\.\d{1,20})?), "classes": \[')
_CLASS = re.compile(rf"{_STRING}(?:, (?=\")|(?=\]))")
_MIDDLE = re.compile(r'\], "files": \[')
_FILE = re.compile(rf"\[{_STRING}, (-1|0|[1-9]\d{{0,18}}), {_STRING}\](?:, (?=\[)|(?=\]))")
_END = re.compile(r"\]\}\Z")

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
    """A list as it is saved: compressed JSON."""
    fields = {
        "version": _FORMAT_VERSION,
        "created_s": time.time(),
        "classes": sorted(set(classes)),
        "files": sorted({file.name: file for file in files}.values()),
    }
    return gzip.compress(json.dumps(fields).encode("ascii"), compresslevel=6, mtime=0)


def from_bytes(data: bytes) -> tuple[float, list[str], list[RemoteFile]]:
    """When a saved list was made (in seconds since 1970), its classes and its files.

    Raises:
        ValueError: It is damaged, or of another format; the error gives the reason.
    """
    try:
        return _read(_Text(data))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"it is damaged: {error}") from error


def _read(text: _Text) -> tuple[float, list[str], list[RemoteFile]]:
    version = int(text.take(_VERSION, "the version of the format")[1])
    if version != _FORMAT_VERSION:
        raise ValueError(f"its format is {version}, and this release reads {_FORMAT_VERSION}")
    created_s = float(text.take(_HEAD, "the time when it was made, and the classes")[1])
    if created_s >= _MAX_SECONDS:
        raise ValueError(f"it is damaged: it was made at second {created_s}")
    classes: list[str] = []
    while not text.is_at(_MIDDLE):
        match = text.take(_CLASS, "the name of a class")
        name = _string(match[1])
        if not is_below(name) or "/" in name:
            raise ValueError(f"it is damaged: {name!r:.100} is not the name of a class")
        if classes and name <= classes[-1]:
            raise ValueError(f"it is damaged: the class {name!r:.100} comes after {classes[-1]!r:.100}")
        classes.append(name)
    files: list[RemoteFile] = []
    text.take(_MIDDLE, "the files")
    known = set(classes)
    while not text.is_at(_END):
        match = text.take(_FILE, "a file, as its name, its length and its version")
        file = RemoteFile(_string(match[1]), int(match[2]), _string(match[3]))
        if not is_below(file.name):
            raise ValueError(f"it is damaged: {file.name!r:.100} is not the name of a file below the folder")
        if file.name.partition("/")[0] not in known:
            raise ValueError(f"it is damaged: {file.name!r:.100} is in none of its classes")
        if files and file.name <= files[-1].name:
            raise ValueError(f"it is damaged: {file.name!r:.100} comes after {files[-1].name!r:.100}")
        if file.nbytes >= 1 << 63:
            raise ValueError(f"it is damaged: {file.name!r:.100} has {file.nbytes} bytes")
        if not file.version.isascii():
            raise ValueError(f"it is damaged: {file.name!r:.100} has the version {file.version!r:.40}")
        files.append(file)
    return created_s, classes, files


class _Text:
    """The text of a list, which is decompressed as far as it is taken.

    Raises:
        OSError: It is not compressed, or its checksum is wrong.
        EOFError: It is cut short.
        zlib.error: It is damaged.
        UnicodeDecodeError: It is not ASCII.
        ValueError: It is longer than any list of this compressed size.
    """

    def __init__(self, data: bytes) -> None:
        self._file = gzip.GzipFile(fileobj=io.BytesIO(data))
        self._left = _MIN_LIMIT_BYTES + _MAX_RATIO * len(data)
        self._known = ""
        self._start = 0
        self._has_more = True

    def is_at(self, pattern: re.Pattern[str]) -> bool:
        """Whether a part is next."""
        return pattern.match(self._known, self._filled()) is not None

    def take(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        """The next part.

        Args:
            pattern: What it looks like.
            what: It, for people.

        Raises:
            ValueError: There is something else.
        """
        start = self._filled()
        match = pattern.match(self._known, start)
        if match is None:
            found = self._known[start : start + 40]
            raise ValueError(f"it is damaged: {what} should come next, but there is {found!r}")
        self._start = match.end()
        return match

    def _filled(self) -> int:
        """Where the next part begins in what is known, to which the longest entry then belongs."""
        while self._has_more and len(self._known) - self._start < _MAX_ENTRY_BYTES:
            data = self._file.read(_READ_BYTES)
            self._left -= len(data)
            if self._left < 0:
                raise ValueError("it is damaged: it grows too much when decompressed")
            self._has_more = bool(data)
            self._known = self._known[self._start :] + data.decode("ascii")
            self._start = 0
        return self._start


def _string(text: str) -> str:
    try:
        found: str = json.loads(text) if "\\" in text else text[1:-1]
    except ValueError as error:
        raise ValueError(f"it is damaged: {text!r:.100} is no text: {error}") from error
    if len(found) > _MAX_CHARACTERS:
        raise ValueError(f"it is damaged: {found!r:.100}... has {len(found):,} characters")
    return found


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
