"""Resource limits of this process, as text for the errors that they cause."""

from __future__ import annotations

from fastload.system.posix import resource


def too_many_files() -> str:
    """The reason why a descriptor was not received, with the limit and the remedy."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"because this process has reached its limit on open files: RLIMIT_NOFILE is {soft:,} and may be "
        f"raised to {hard:,} (ulimit -n). Raise the limit, or close files"
    )
