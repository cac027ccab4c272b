"""Writes files and names so that they survive a power failure."""

from __future__ import annotations

import contextlib
import os


def sync_directory(directory: str) -> None:
    """Sync the names in a directory to disk, to survive a power failure."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_new(path: str, data: bytes) -> None:
    """Write a new file that only this user can write, and sync it; an older one is removed, not written."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o644)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
