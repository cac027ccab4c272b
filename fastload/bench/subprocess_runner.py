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
import warnings
from typing import TYPE_CHECKING, Any

from fastload.system.child_process import enter_child, handlers_blocked

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

_PATIENCE_S = 5.0  # for a run that was interrupted
_MAX_CHARACTERS = 300  # of an error


class RunFailedError(Exception):
    """A run ended by an error, which is the text of this exception, or its process died."""


def run_isolated(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function that runs in its own process.

    Args:
        function: Its result is pickled.
        arguments: Inherited by the process.

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
            process = context.Process(target=_main, args=(sender, os.getpid(), mask, function, arguments))
            process.start()
        sender.close()  # the run has its own end: when the run ends, so does the pipe
        try:
            succeeded, result = receiver.recv()
        except EOFError:
            process.join()
            raise RunFailedError(_how_it_ended(process.exitcode)) from None
        process.join(_PATIENCE_S)
    finally:
        _end(process)
        sender.close()
        receiver.close()
    if not succeeded:
        raise RunFailedError(result)
    return result


def _end(process: Any) -> None:
    """Interrupt a run, which then closes its loader; later, kill it with all of its processes."""
    if process is None or process.pid is None:
        return
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)
        process.join(_PATIENCE_S)
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
    process.close()


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code == -signal.SIGKILL:
        return "its process was killed by SIGKILL, perhaps out of memory"
    return f"its process ended with exit code {exit_code}"


# --- in the process of the run ---------------------------------------------------------------------------


def _main(
    sender: Connection,
    parent_pid: int,
    signal_mask: set[Any],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    try:
        os.setpgid(0, 0)  # a Ctrl-C of the terminal reaches the parent alone, which interrupts this one
        with contextlib.suppress(AttributeError, OSError):  # a system without pidfd_open
            enter_child(parent_pid, signal_mask)  # this process ends if the parent dies
        os.dup2(2, 1)  # standard output is for results; what the user's code prints goes to standard error
        sys.stdout = sys.stderr = sys.__stderr__  # a progress bar can have replaced both
        warnings.simplefilter("ignore")  # such as torch's about more workers than cores: they were requested
        logging.disable()
        result = True, function(*arguments)
    except KeyboardInterrupt:
        return
    except BaseException as error:  # noqa: BLE001  # it is shown in the row of this configuration
        result = False, in_a_line(error)
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):  # nothing waits for it anymore
        sender.send(result)


def in_a_line(error: BaseException) -> str:
    """An error's class and text in one line; of the error of a worker, the line that names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "Original Traceback" in str(error):  # torch's text of an error in a worker
        return f"{lines[-1]:.{_MAX_CHARACTERS}}"
    text = " ".join(lines)
    return f"{type(error).__name__}: {text:.{_MAX_CHARACTERS}}".removesuffix(": ")
