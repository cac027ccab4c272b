"""Resource limits of this process, as text for the errors that they cause."""

from __future__ import annotations

import os
from pathlib import Path

try:
    import resource as resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_OPEN_FILES = Path("/proc/self/fd")


def too_many_files() -> str:
    """Why a descriptor was not received, with the limit and the remedy."""
    return (
        f"because this process has reached its limit on open files: {limit_on_files()}. Raise the limit, or "
        "close files"
    )


def limit_on_files() -> str:
    """The limit on open files, and how far it can be raised, as a clause."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    maximum = "without limit" if hard == resource.RLIM_INFINITY else f"to {hard:,}"
    return f"RLIMIT_NOFILE is {soft:,} and can be raised {maximum} (ulimit -n)"


def allows_files(number: int) -> bool:
    """Whether this process can open this many more files; True if unknown."""
    if resource is None or not _OPEN_FILES.is_dir():
        return True
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return bool(soft == resource.RLIM_INFINITY or len(os.listdir(_OPEN_FILES)) + number <= soft)
