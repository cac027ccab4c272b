"""Paths and URLs in users' arguments."""

from __future__ import annotations

import os
import re

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")
_LOCAL_PREFIX = "file://"


def is_url(path: str) -> bool:
    """Whether a path is a URL such as `s3://...`, or one of chained protocols: `zip::...`."""
    return _URL.match(path) is not None and not path.startswith(_LOCAL_PREFIX)


def local_path(path: str) -> str:
    """The path without `file://`; a path that begins with `~` is in the user's home."""
    return path.removeprefix(_LOCAL_PREFIX) if path.startswith(_LOCAL_PREFIX) else os.path.expanduser(path)


def cache_path(path: str, name: str = "path") -> str:
    """The absolute path of a cache.

    Args:
        path: The path of the user.
        name: Of the user's argument, for the error.

    Raises:
        ValueError: It is a URL.
    """
    if is_url(path):
        copy = f" with aws s3 cp {path} DEST" if path.startswith("s3://") else ""
        raise ValueError(
            f"{name} should be a path on this machine, but is {path}: first copy the cache to a local "
            f"disk{copy}, and pass the path of the copy"
        )
    return os.path.abspath(local_path(path))
