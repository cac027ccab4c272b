"""`fastload profile`: run a script as plain python would, and report how long it waited for data.

The report goes to standard error, so that the script's output stays as it is. The script's exit code, or the
signal or traceback that ends it, is the command's.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from fastload.cli.script import run_script
from fastload.cli.terminal import CommandError
from fastload.profiling.hooks import FOLDER
from fastload.profiling.session import Profile
from fastload.system.logs import write_stderr
from fastload.system.sent_error import hide_frames

if TYPE_CHECKING:
    from collections.abc import Callable


def check(json_path: str | None, trace_path: str | None) -> None:
    """Refuse what cannot be written, before hours of training are spent.

    Raises:
        CommandError: A file cannot be written there.
    """
    for path in (json_path, trace_path):
        if path is not None:
            directory = os.path.dirname(os.path.abspath(path))
            if os.path.isdir(path) or not os.path.isdir(directory) or not os.access(directory, os.W_OK):
                raise CommandError(f"{path} cannot be written: its directory must exist, and be writable")


def profile_script(
    target: str,
    args: list[str],
    *,
    as_module: bool,
    replay: int,
    json_path: str | None,
    trace_path: str | None,
) -> None:
    """Run a script to its end under a profile, and print the report, also after an error or Ctrl-C.

    Args:
        target: The script, or with `as_module` the name of a module.
        args: Its arguments.
        as_module: Run it as `python -m` does.
        replay: See `fastload.profile`.
        json_path: Where the report is written as JSON; None: nowhere.
        trace_path: Where a trace is written; None: nowhere.

    Raises:
        BaseException: Whatever ends the script.
    """
    pid = os.getpid()
    profile = Profile((), replay).start()
    try:
        run_script(target, args, as_module=as_module)
    except BaseException as error:
        hide_frames(error, (FOLDER,))
        raise
    finally:
        if os.getpid() == pid:  # a process that the script forked ends here, too
            try:
                profile.stop()
            finally:
                _save(profile, json_path, trace_path)


def _save(profile: Profile, json_path: str | None, trace_path: str | None) -> None:
    report = profile.report()
    with contextlib.suppress(AttributeError, OSError, ValueError):  # None, unread, or closed by the script
        sys.stdout.flush()
    write_stderr(f"\n{report}\n")
    if json_path is not None:
        _write(json_path, lambda: _write_json(json_path, report.as_dict()))
    if trace_path is not None:
        _write(trace_path, lambda: profile.save_trace(trace_path))


def _write(path: str, write: Callable[[], None]) -> None:
    """Write one of the files; an error is printed, and does not hide how the script ended."""
    try:
        write()
    except OSError as error:
        write_stderr(f"fastload: error: {path} could not be written: {error}\n")
    else:
        write_stderr(f"fastload: wrote {path}\n")


def _write_json(path: str, value: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
