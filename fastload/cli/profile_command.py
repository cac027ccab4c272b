"""`fastload profile`: run a script as plain python would, and report how long it waited for data.

The report goes to standard error and leaves the script's output alone. The script's exit code, or the signal
or traceback that ends it, is the command's.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from fastload.cli.arguments import json_writer, write_output
from fastload.cli.script import run_script
from fastload.cli.terminal import CommandError
from fastload.profiling.hooks import FOLDER
from fastload.profiling.session import Profile
from fastload.system.logs import write_stderr
from fastload.system.remote_error import hide_frames

if TYPE_CHECKING:
    from collections.abc import Mapping


def profile_script(
    target: str, args: list[str], *, as_module: bool, replay: int, files: Mapping[str, str | None]
) -> None:
    """Run a script to its end under a profile, and print the report, also after an error or Ctrl-C.

    Args:
        target: The script, or with `as_module` the name of a module.
        args: Its arguments.
        as_module: Run it as `python -m` does.
        replay: See `fastload.profile`.
        files: The files to write, by option.

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
                _save(profile, files)


def _save(profile: Profile, files: Mapping[str, str | None]) -> None:
    """Print the report, and write the files; an error does not hide how the script ended."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # None, unread, or closed by the script
        sys.stdout.flush()
    write_stderr(f"\n{profile.report()}\n")
    writers = {"--output": json_writer(profile.report().as_dict()), "--trace": profile.save_trace}
    for option, path in files.items():
        if path is not None:
            try:
                write_output(option, path, writers[option])
            except CommandError as error:
                write_stderr(f"fastload: error: {error}\n")
            else:
                write_stderr(f"fastload: wrote {path}\n")
