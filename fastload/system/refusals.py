"""Turns errors of the operating system into sentences: what failed, where, and what to change."""

from __future__ import annotations

import errno
import os
import shutil

from fastload.system.sizes import readable_size

_NO_PERMISSION = (errno.EACCES, errno.EPERM)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # EIO: LMDB's code for a short write


def reading_refused(error: OSError) -> str:
    """The reason why a file or directory could not be read, and what to change."""
    reason = error.strerror or str(error)
    where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    if error.errno in _NO_PERMISSION:
        return f"{where}{reason}: change its permissions, or the permissions of its parent directories"
    return f"{where}{reason}"


def writing_refused(error: Exception, path: str) -> str:
    """The reason why a file could not be written, and what to change.

    Args:
        error: The error of the system, or of a library whose error ends in the system's text.
        path: Absolute path of the file.
    """
    directory = os.path.dirname(path)
    code = error.errno if isinstance(error, OSError) else _code_in(str(error))
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if code in _NO_PERMISSION:
        return f"{reason}: change the permissions of {directory}, or give another path"
    if code == errno.EROFS:
        return f"{reason}: give a path outside {directory}"
    if code == errno.ENOENT:
        return f"{reason}: make the directory {directory} first"
    if code == errno.ENOTDIR:
        return f"{reason}: a part of {directory} is a file; give another path"
    if code in _NO_ROOM:
        return (
            f"{reason}: {_free(directory)}free more space there (check quotas and `ulimit -f`), "
            "or give another path"
        )
    return reason


def _code_in(text: str) -> int | None:
    """The number of the system error whose message `text` ends in."""
    return next((code for code in errno.errorcode if text.endswith(os.strerror(code))), None)


def _free(directory: str) -> str:
    try:
        return f"{readable_size(shutil.disk_usage(directory).free)} are free in {directory}; "
    except OSError:
        return ""  # the directory was removed or may not be read: omit the figure
