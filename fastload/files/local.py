"""Lists the images in folders of this machine, by torchvision's rules."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fastload.files.listing import Listing

if TYPE_CHECKING:
    from collections.abc import Iterator


def list_folder(root: str, extensions: tuple[str, ...]) -> Listing:
    """The images below each folder in `root`; no file is opened.

    Raises:
        OSError: A folder cannot be listed.
    """
    with os.scandir(root) as entries:
        classes = sorted(entry.name for entry in entries if entry.is_dir())
    return Listing(classes, [_find_files(root, name, extensions) for name in classes])


def _find_files(root: str, name: str, extensions: tuple[str, ...]) -> list[bytes]:
    found = []
    for folder, files in sorted(_walk(os.path.join(root, name))):
        below_root = os.path.relpath(folder, root)
        found += [
            os.fsencode(os.path.join(below_root, file))
            for file in sorted(files)
            if file.lower().endswith(extensions)
        ]
    return found


def _walk(top: str) -> Iterator[tuple[str, list[str]]]:
    """Every folder below ``top`` with its files; follows links, except those that lead back to a parent."""
    for folder, subfolders, files in os.walk(top, onerror=_raise, followlinks=True):
        here = os.path.realpath(folder) + os.sep
        subfolders[:] = [
            name
            for name in subfolders
            if not here.startswith(os.path.join(os.path.realpath(os.path.join(folder, name)), ""))
        ]
        yield folder, files


def _raise(error: OSError) -> None:
    raise error  # a folder that cannot be listed must not look like an empty one
