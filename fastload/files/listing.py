"""The files of a folder in torchvision's order, and the list of them that is saved in a remote folder.

Rules:

1. The classes are the folders directly below the root, sorted by name. A class's files are sorted by folder
   and then by name, as torchvision's ImageFolder sorts them.
2. A saved list has every file, with its length and its version: an ImageFolder of any `extensions` reads it.
3. A list that is damaged, or of another format, is an error; it is never a shorter list.
4. Somebody else may have written the list: its names stay below the folder, its numbers are bounded, and it
   is decompressed only as far as a list of its compressed size can reach.
"""

from __future__ import annotations

import gzip
import hashlib
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
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

SAVED_NAME = ".fastload-files.json.gz"

_FORMAT_VERSION = 1
_DIGEST_BYTES = 16
_GZIP = 31  # zlib's number for the format
_MAX_RATIO = 128  # of lists to their compressed size: numbered files without versions have 10 to 32
_MIN_LIMIT_BYTES = 1 << 20
_MAX_SECONDS = 250_000_000_000  # in the year 9892, which calendars can still represent
UNKNOWN_BYTES = -1


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
        digest.update(f"\0{file.name}\0{file.nbytes}\0{file.version}".encode())
    return digest.hexdigest()


def to_bytes(classes: Iterable[str], files: Iterable[RemoteFile]) -> bytes:
    """A list as it is saved: compressed JSON."""
    fields = {
        "version": _FORMAT_VERSION,
        "created_s": time.time(),
        "classes": sorted(classes),
        "files": sorted(files),
    }
    return gzip.compress(json.dumps(fields).encode("ascii"), compresslevel=6, mtime=0)


def from_bytes(data: bytes) -> tuple[float, list[str], list[RemoteFile]]:
    """When a saved list was made (in seconds since 1970), its classes and its files.

    Raises:
        ValueError: It is damaged, or of another format; the error gives the reason.
    """
    try:
        fields = json.loads(_decompressed(data))
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise ValueError(f"it is damaged: {error}") from error
    version = fields.get("version") if isinstance(fields, dict) else None
    if version != _FORMAT_VERSION:
        raise ValueError(f"its format is {version!r}, and this release reads {_FORMAT_VERSION}")
    try:
        created_s, classes = float(fields["created_s"]), list(fields["classes"])
        files = [RemoteFile(name, nbytes, text) for name, nbytes, text in fields["files"]]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"it is damaged: {error!r}") from error
    if not 0 <= created_s < _MAX_SECONDS:
        raise ValueError(f"it is damaged: it was made at second {created_s}")
    for name in classes:
        if not _is_below(name) or "/" in name:
            raise ValueError(f"it is damaged: {name!r:.100} is not the name of a class")
    for file in files:
        if not _is_below(file.name):
            raise ValueError(f"it is damaged: {file.name!r:.100} is not the name of a file below the folder")
        if type(file.nbytes) is not int or not UNKNOWN_BYTES <= file.nbytes < 1 << 63:
            raise ValueError(f"it is damaged: {file.name!r:.100} has {file.nbytes!r:.40} bytes")
        if type(file.version) is not str or not file.version.isascii():
            raise ValueError(f"it is damaged: {file.name!r:.100} has the version {file.version!r:.40}")
    return created_s, classes, files


def _decompressed(data: bytes) -> bytes:
    """The content of a list.

    Raises:
        ValueError: It is larger than any list of this compressed size, or cut short.
    """
    stream = zlib.decompressobj(_GZIP)
    content = stream.decompress(data, _MIN_LIMIT_BYTES + _MAX_RATIO * len(data))
    if not stream.eof:
        what = "it ends too early" if not stream.unconsumed_tail else "it grows too much when decompressed"
        raise ValueError(what)
    return content


def _is_below(name: Any) -> bool:
    """Whether a name stays below its folder on every kind of store, and can be a file's name here."""
    if type(name) is not str or "\0" in name:
        return False
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    parts = re.split(r"[/\\]", unquote(name))
    return parts[0] != "" and not {".", ".."} & set(parts)
