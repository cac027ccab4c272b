"""Runs a function in its own process, so it leaves nothing behind for the next run.

Memory, file handles, caches, threads and worker processes of a run end with its process.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import warnings
from typing import TYPE_CHECKING, Any

from fastload.system.child_process import enter_child, handlers_blocked

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_CHARACTERS = 500  # of an error


class RunFailedError(Exception):
    """A run ended by an error, which is the text of this exception, or its process died."""


def run_isolated(call: Callable[[], Any], folder: str) -> Any:
    """The result of a function that runs in its own process.

    Args:
        call: Inherited by the process; its result is pickled.
        folder: Where the run finds the caches of other processes: none. Its temporary files go there, too:
            torch's workers leave theirs when they are ended.

    Raises:
        RunFailedError: The function raised an error, or its process died.
    """
    # A fork: this process has imported torch and opened the dataset, but never reads a sample, so all runs
    # start from the same state, and imports cost time once.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process: Any = None
    try:
        with handlers_blocked() as mask:  # a signal that comes meanwhile is handled after the start
            process = context.Process(target=_main, args=(sender, os.getpid(), mask, folder, call))
            process.start()
        sender.close()  # the run has its own end: when the run ends, so does the pipe
        try:
            succeeded, result = receiver.recv()
        except EOFError:
            process.join()
            killed = " (killed, perhaps out of memory)" if process.exitcode == -signal.SIGKILL else ""
            succeeded, result = False, f"its process ended with exit code {process.exitcode}{killed}"
        process.join()
    finally:
        if process is not None and process.is_alive():  # interrupted: its workers end, too
            with contextlib.suppress(ProcessLookupError):  # it has no group yet, and so no workers
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
    if not succeeded:
        raise RunFailedError(result)
    return result


def _main(sender: Any, parent_pid: int, mask: set[Any], folder: str, call: Callable[[], Any]) -> None:
    try:
        os.setpgid(0, 0)  # a Ctrl-C of the terminal reaches the parent alone, which ends this group
        with contextlib.suppress(AttributeError, OSError):  # a system without pidfd_open
            enter_child(parent_pid, mask)  # this process ends if the parent dies
        os.dup2(2, 1)  # standard output is for results; what the user's code prints goes to standard error
        sys.stdout = sys.stderr = sys.__stderr__
        # No run finds what other processes have cached.
        os.environ.update({"FASTLOAD_RUNTIME_DIR": folder, "FASTLOAD_CACHE": "", "TMPDIR": folder})
        tempfile.tempdir = folder
        warnings.simplefilter("ignore")  # such as torch's about more workers than cores: they were requested
        logging.disable()
        result = True, call()
    except BaseException as error:  # noqa: BLE001  # it is shown in the row of this configuration
        result = False, in_a_line(error)
    sender.send(result)


def in_a_line(error: BaseException) -> str:
    """An error's class and text in one line; of the error of a worker, the line that names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "Original Traceback" in str(error):  # torch's text of an error in a worker
        return lines[-1][:_MAX_CHARACTERS]
    return f"{type(error).__name__}: {' '.join(lines):.{_MAX_CHARACTERS}}".removesuffix(": ")
