"""The files of a folder in torchvision's order, and the list of them that is saved in a remote folder.

Rules:

1. The classes are the folders directly below the root, sorted by name. A class's files are sorted by folder
   and then by name, as torchvision's ImageFolder sorts them.
2. A saved list has every file, with its length and its version: an ImageFolder of any `extensions` reads it.
   It has a line of JSON with its version, age and classes, and one per file.
3. The list can come from an untrusted source: its names stay below the folder, its numbers and its
   decompressed length are bounded. A list that is damaged, or has a different format, is an error.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import json
import os
import re
import zlib
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

SAVED_NAME = ".fastload-files.jsonl.gz"
UNKNOWN_BYTES = -1

_FORMAT_VERSION = 2
DIGEST_BYTES = 16
_MAX_RATIO = 128  # of lists to their compressed size: numbered files without versions have 10 to 32
_MIN_LIMIT_BYTES = 1 << 20
_MAX_BYTES = 1 << 63  # of a file

_ARCHIVE = re.compile(r"\.(zip|tar(\.\w+)?|tgz)\Z")
_MAY_LEAD_OUT = re.compile(r"\.\.|[%\t\r\n\0\ud800-\udfff]|\A[/\\]|\A\Z")


class RemoteFile(NamedTuple):
    """A file of a remote folder.

    Attributes:
        name: Its path below the folder, with slashes.
        nbytes: Its length; `UNKNOWN_BYTES` if the store does not report it.
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


def list_folder(root: str, extensions: tuple[str, ...]) -> Listing:
    """The images below each folder in `root`; no file is opened.

    Raises:
        FileNotFoundError: There is no such folder.
        NotADirectoryError: It is a file.
        OSError: A folder cannot be listed.
    """
    if not os.path.lexists(root):
        raise FileNotFoundError(f"there is no folder {os.path.abspath(root)}")
    if os.path.isfile(root):
        archive = _ARCHIVE.search(os.path.basename(root).lower())
        url = archive and f"{'zip' if archive[0] == '.zip' else 'tar'}://::{root}"
        advice = f": read an archive with fastload.ImageFolder({url!r})" if url else ""
        raise NotADirectoryError(
            f"{root} is a file, not a folder with one folder of images per class{advice}"
        )
    with os.scandir(root) as entries:
        classes = sorted(entry.name for entry in entries if _is_folder(entry))
    return Listing(classes, [_find_files(root, name, extensions) for name in classes])


def files_below(root: str) -> Iterator[str]:
    """The paths of all files below a folder, through links; each folder is entered once.

    Args:
        root: The folder. What cannot be listed is left out.
    """
    entered: set[str] = set()
    for folder, folders, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in entered:
            folders.clear()
            continue
        entered.add(real)
        folders.sort()
        yield from (os.path.join(folder, name) for name in sorted(names))


def _find_files(root: str, name: str, extensions: tuple[str, ...]) -> list[bytes]:
    paths = []
    for folder, files in sorted(_walk(root, name)):
        prefix = os.fsencode(folder + os.sep)
        paths += [prefix + os.fsencode(file) for file in sorted(files) if file.lower().endswith(extensions)]
    return paths


def _walk(root: str, name: str) -> Iterator[tuple[str, list[str]]]:
    """Every folder below a class's folder, as a path below ``root``, and its files.

    Follows links, except those that lead back to a folder on the way to them. The types of entries come with
    their names, so folders and files need no further call of the system, and links one each.
    """
    folders: list[tuple[str, tuple[str, ...]]] = [(name, ())]  # and the real folders of the links on the way
    while folders:
        below, crossed = folders.pop()
        files = []
        # A folder that cannot be listed raises: it must not look empty.
        with os.scandir(os.path.join(root, below)) as entries:
            for entry in entries:
                if not _is_folder(entry):
                    files.append(entry.name)
                elif not entry.is_symlink():
                    folders.append((below + os.sep + entry.name, crossed))
                else:
                    way = (*crossed, os.path.join(os.path.realpath(os.path.join(root, below)), ""))
                    target = os.path.join(os.path.realpath(entry.path), "")
                    if not any(folder.startswith(target) for folder in way):
                        folders.append((below + os.sep + entry.name, way))
        yield below, files


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False


def arrange(classes: Iterable[str], files: Iterable[RemoteFile], extensions: tuple[str, ...]) -> Listing:
    """The images among remote files, by class.

    Args:
        classes: The names of all classes, in any order.
        files: All files, in any order.
        extensions: The file name extensions of images, in lower case.
    """
    ordered = sorted(set(classes))
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
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for file in files:
        if not file.version:
            return None
        digest.update(f"\0{file.name}\0{file.nbytes}\0{file.version}".encode(errors="surrogateescape"))
    return digest.hexdigest()


def to_bytes(classes: Iterable[str], files: Iterable[RemoteFile]) -> bytes:
    """A list in its saved form: compressed lines of JSON."""
    when = datetime.now().isoformat(" ", "minutes")
    head = {"version": _FORMAT_VERSION, "created": when, "classes": sorted(classes)}
    text = "".join(f"{json.dumps(line)}\n" for line in [head, *sorted(files)])
    return gzip.compress(text.encode("ascii"), compresslevel=6, mtime=0)


def from_bytes(data: bytes) -> tuple[str, list[str], list[RemoteFile]]:
    """When a saved list was made, its classes and its files.

    Raises:
        ValueError: It is damaged, or has a different format; the error gives the reason.
    """
    limit = _MIN_LIMIT_BYTES + _MAX_RATIO * len(data)
    try:
        with gzip.open(io.BytesIO(data)) as unpacked:
            text = unpacked.read(limit + 1)
        if len(text) > limit:
            raise ValueError("it grows too much when decompressed")
        first, *lines = text.decode("ascii").splitlines()
        head = json.loads(first)
        if head["version"] != _FORMAT_VERSION:
            raise ValueError(f"its version is {head['version']!r:.40}, not {_FORMAT_VERSION}")
        when = datetime.fromisoformat(head["created"]).isoformat(" ", "minutes")
        classes = list(head["classes"])
        files = [RemoteFile(*json.loads(line)) for line in lines]
        if any(file.name >= following.name for file, following in itertools.pairwise(files)):
            raise ValueError("its files are out of order, or repeated")
        for name, nbytes, version in [*((name, 0, "") for name in classes), *files]:
            is_right = isinstance(name, str) and isinstance(nbytes, int) and isinstance(version, str)
            if not (is_right and is_below(name) and version.isascii() and -1 <= nbytes < _MAX_BYTES):
                raise ValueError(f"{name!r:.100}, {nbytes!r:.40}, {version!r:.40} is not a file below it")
    except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"it is damaged: {error}") from error
    return when, classes, files


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
