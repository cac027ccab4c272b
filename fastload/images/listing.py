"""The files of a folder on this machine, in torchvision's order.

The classes are the folders directly below the root, sorted by name. A class's files are sorted by folder and
then by name, as torchvision's ImageFolder sorts them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import numpy.typing as npt

DIGEST_BYTES = 16


@dataclass(frozen=True)
class Listing:
    """The files of some classes.

    Attributes:
        classes: Names, sorted.
        names: For each class, the paths of its files below the root, in order.
        nbytes: The length of each file in order, `(num_files,) int64`; None for files of this machine, whose
            lengths are not read.
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
        raise NotADirectoryError(
            f"{root} is a file, not a folder with one folder of images per class: unpack an archive first"
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
