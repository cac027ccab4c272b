"""Runs a script under plain python, for `fastload run` and `fastload profile`; and the hook of the latter."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastload.integrations import bootstrap
from fastload.integrations.patch import add_methods
from fastload.integrations.patch_status import status
from fastload.system.logs import write_stderr
from fastload.system.os_errors import why_unwritable

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
    if speaks:
        profiles: list[Profile] = []
        status.at_first_loader = functools.partial(_start, profiles, os.getpid())
        add_methods()
        atexit.register(_report, profiles, settings["output"], os.getpid())


def _start(profiles: list[Profile], pid: int) -> None:
    from fastload.profiling.recorder import Profile

    if os.getpid() == pid:  # not forked before
        profiles.append(Profile(()).start())


def _report(profiles: list[Profile], output: str | None, pid: int) -> None:
    """Print the report of this process, and write its file."""
    if os.getpid() != pid:  # a process that the script forked ends here, too
        return
    with contextlib.suppress(AttributeError, OSError, ValueError):  # None, unread, or closed
        sys.stdout.flush()
    if not profiles:
        write_stderr(f"fastload: no DataLoader was used in process {pid}: there is nothing to profile\n")
        return
    profiles[0].stop()
    report = profiles[0].report()
    write_stderr(f"\n{report}\n")
    if output is not None:
        try:
            Path(output).write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            write_stderr(f"fastload: error: cannot write {output}: {why_unwritable(error, output)}\n")
        else:
            write_stderr(f"fastload: wrote {output}\n")
