"""Syncs files to disk, and keeps directories private."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import IO

_ROOT = 0


def sync_directory(directory: str) -> None:
    """Sync the names in a directory to disk, to survive a power failure."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def new_file(path: str) -> IO[bytes]:
    """A new file that only this user can write; an older file of that name is removed, not written."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o644))


def write_new(path: str, data: bytes) -> None:
    """Write a new file, as by `new_file`, and sync it to disk."""
    with new_file(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def make_private_directory(path: str) -> None:
    """Create a directory that only this user can write, if missing.

    Raises:
        PermissionError: A different user owns it, or can write to it.
        OSError: It cannot be made.
    """
    os.makedirs(path, mode=0o700, exist_ok=True)
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or not is_own(status):
        raise PermissionError(
            f"{path} is not a directory that only this user can write (owner {status.st_uid}, mode "
            f"{stat.filemode(status.st_mode)}): its files could be a different user's"
        )


def untrusted_path(directory: str) -> str | None:
    """A directory, or a file in it, that a user besides this one and root can have written; or None.

    Links, and anything but plain files, count as such.

    Raises:
        OSError: There is no such directory, or it cannot be read.
    """
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode) or not is_own(status):
        return directory
    for name in sorted(os.listdir(directory)):
        path = os.path.join(directory, name)
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or not is_own(status):
            return path
    return None


def is_own(status: os.stat_result) -> bool:
    """Whether only this user (or root) can have written the file or directory with this status."""
    if not hasattr(os, "getuid"):
        return True  # Windows: its access rights are not in the mode
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid in (os.getuid(), _ROOT) and not others_write
