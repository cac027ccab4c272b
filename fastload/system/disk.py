"""Brings what was written to the disk."""

from __future__ import annotations

import os


def sync_directory(directory: str) -> None:
    """Bring the names in a directory to the disk, so that they survive a power failure."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
