"""Runs a script under plain python, for `fastload run` and `fastload profile`; and the hook of the latter.

The process of a profiled script imports this file, and more of the command line if it writes `--output`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from fastload.integrations import bootstrap
from fastload.integrations.patch import add_methods
from fastload.integrations.state import state
from fastload.system.logs import write_stderr

if TYPE_CHECKING:
    from fastload.profiling.recorder import Profile


def become_python(words: list[str], hook: str, **settings: Any) -> None:
    """Replace this process by python, and call a hook in each interpreter that imports torch.

    Args:
        words: The arguments of python, behind the options that this interpreter got.
        hook: `"MODULE:FUNCTION"`. The function takes no arguments. It runs at the end of the import of torch,
            also where no loader is used, so it should import little.
        settings: What `settings_here` gives to the hook; with values that JSON has.

    Raises:
        CommandError: An option of this interpreter keeps the hook out.
        OSError: Python could not be started.
    """
    from fastload.cli.terminal import CommandError

    if sys.flags.ignore_environment or sys.flags.no_site:
        raise CommandError("python has -I, -E or -S, which keep fastload out of SCRIPT: leave them out")
    words_before = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv)]
    options = [re.sub(r"^(-[A-Za-z]*)[cm]$", r"\1", word) for word in words_before]  # `python -m fastload`
    settings |= {"hook": hook, "pid": os.getpid(), "rank": os.environ.get("RANK")}
    os.environ[bootstrap.SETTINGS] = json.dumps(settings)
    path = [os.path.dirname(bootstrap.__file__), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    os.execv(sys.executable, [sys.executable, *(word for word in options if word != "-"), *words])


def begin_profile() -> None:
    """Profile this process from its first loader on, if it is the one that writes.

    Not at once: torch can be imported in the middle of the import of what a profile needs.
    """
    settings, speaks = bootstrap.settings_here()
    state.at_first_loader = functools.partial(_start, settings, os.getpid(), speaks)
    add_methods()


def _start(settings: dict[str, Any], pid: int, speaks: bool) -> None:
    with contextlib.suppress(OSError):  # another process was first
        os.unlink(settings["unused"])
    if os.getpid() != pid or not speaks:  # forked before
        return
    from fastload.profiling import recorder

    folder = os.path.dirname(recorder.__file__)

    def excepthook(kind: Any, error: BaseException, step: Any) -> None:
        steps, shown = [], None  # all frames but those of the profiler
        while step is not None:
            steps.append(step)
            step = step.tb_next
        for step in reversed(steps):
            if not step.tb_frame.f_code.co_filename.startswith(folder):
                step.tb_next, shown = shown, step
        show(kind, error.with_traceback(shown), shown)

    show, sys.excepthook = sys.excepthook, excepthook
    atexit.register(_report, recorder.Profile(()).start(), settings["output"], pid)


def _report(profile: Profile, output: str | None, pid: int) -> None:
    """Print the report of a process that used a loader, and write its file."""
    if os.getpid() != pid:  # a process that the script forked ends here, too
        return
    profile.stop()
    report = profile.report()
    if report.loaders:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, unread, or closed
            sys.stdout.flush()
        write_stderr(f"\n{report}\n")
    if report.loaders and output is not None:
        from fastload.cli.arguments import write_output
        from fastload.cli.terminal import CommandError

        try:
            write_output(output, report.as_dict())
        except CommandError as error:
            write_stderr(f"fastload: error: {error}\n")
        else:
            write_stderr(f"fastload: wrote {output}\n")
