"""Turn errors of the operating system into sentences: what failed, where, and what to change.

Two questions cover all files: why one is unreadable, and why it is unwritable. The caller says what the file
is: "cannot read the cache PATH: ...", "cannot write the copy PATH: ...".
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from typing import TYPE_CHECKING

from fastload.errors import FastloadError
from fastload.system.humanize import readable_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Errors that the directory of a file explains; EIO is LMDB's code for a short write.
_OF_DIRECTORIES = tuple(
    os.strerror(code)
    for code in (
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR),
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),
    )
)


def why_unreadable(error: OSError) -> str:
    """Why a file or directory could not be read, and what to change."""
    reason = error.strerror or str(error)
    where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{where}{reason}: change its permissions, or the permissions of its parent directories"
    return f"{where}{reason}"


def why_unwritable(error: Exception, path: str) -> str:
    """Why a file could not be written, and what to change.

    Args:
        error: The error of the system, or of a library whose error ends in the system's text.
        path: Absolute path of the file.
    """
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    if not reason.endswith(_OF_DIRECTORIES):
        return reason
    directory, free = os.path.dirname(path), ""
    with contextlib.suppress(OSError):  # the directory is missing or cannot be read: omit the figure
        free = f" ({readable_size(shutil.disk_usage(directory).free)} are free)"
    return (
        f"{reason}: check that the directory {directory} exists and can be written, and its space and quota"
        f"{free}, or use a different path"
    )


@contextlib.contextmanager
def write_errors_as(kind: Callable[[str], Exception], what: str, path: str) -> Iterator[None]:
    """Raise the errors of a block that writes a file as another kind: "cannot write WHAT PATH: why".

    Args:
        kind: Makes the error from its text.
        what: What the file is, such as `"the cache"`.
        path: Its path.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, FastloadError):  # it says what to change already
            raise
        reason = why_unwritable(error, os.path.abspath(path))
        raise kind(f"cannot write {what} {path}: {reason}") from error
