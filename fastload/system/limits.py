"""Limits of this process, in the words of the errors that they cause."""

from __future__ import annotations


def too_many_files() -> str:
    """Why a descriptor did not arrive, with the limit, and what to change."""
    import resource  # not on Windows, where nothing gets here

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"because this process has as many files open as it may: RLIMIT_NOFILE is {soft:,} and may be raised "
        f"to {hard:,} (ulimit -n). Raise it, or close files"
    )
