"""Runs a script under plain python, for `fastload run` and `fastload profile`; and the hook of the latter.

The script's process imports this file, and nothing of the command line before it writes `--output`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from fastload.integrations.bootstrap import become_python, settings_here
from fastload.system.logs import write_stderr

if TYPE_CHECKING:
    from typing import NoReturn

    from fastload.profiling.session import Profile


def become_script(words: list[str], hook: str, **settings: Any) -> NoReturn:
    """Replace this process by python, with the options that this interpreter got.

    Args:
        words: The script, or `-m` and the module; then its arguments.
        hook: As for `become_python`.
        settings: As for `become_python`.

    Raises:
        CommandError: One of the options keeps the hook out.
        OSError: Python could not be started.
    """
    from fastload.cli.terminal import CommandError

    if sys.flags.ignore_environment or sys.flags.no_site:
        raise CommandError("python has -I, -E or -S, which keep fastload out of SCRIPT: leave them out")
    options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv)]
    if options and re.fullmatch(r"-[A-Za-z]*[cm]", options[-1]):  # `python -m fastload`
        options[-1] = options[-1][:-1]
    become_python([*(option for option in options if option != "-"), *words], hook, **settings)


def begin_profile() -> None:
    """Profile this process, if it is the one that writes."""
    settings, speaks = settings_here()
    if not speaks:
        return
    from fastload.profiling.hooks import FOLDER
    from fastload.profiling.session import Profile
    from fastload.system.remote_error import hide_frames

    def excepthook(kind: Any, error: BaseException, traceback: Any) -> None:
        hide_frames(error, (FOLDER,))
        show(kind, error, traceback)

    show, sys.excepthook = sys.excepthook, excepthook
    atexit.register(_report, Profile(()).start(), settings["output"], os.getpid())


def _report(profile: Profile, output: str | None, pid: int) -> None:
    """Print the report of a process that used a loader, and write its file."""
    if os.getpid() != pid:  # a process that the script forked ends here, too
        return
    profile.stop()
    report = profile.report()
    if not report.loaders:
        return
    with contextlib.suppress(AttributeError, OSError, ValueError):  # None, unread, or closed by the script
        sys.stdout.flush()
    write_stderr(f"\n{report}\n")
    if output is None:
        return
    from fastload.cli.arguments import write_output
    from fastload.cli.terminal import CommandError

    try:
        write_output(output, report.as_dict())
    except CommandError as error:
        write_stderr(f"fastload: error: {error}\n")
    else:
        write_stderr(f"fastload: wrote {output}\n")
