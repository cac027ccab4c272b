"""Check whether worker processes can be started. The loader and the pool call this in the parent."""

from __future__ import annotations

import errno
import functools
import multiprocessing
import os
import signal
import socket
import sys
from multiprocessing import forkserver, process, resource_tracker, spawn
from typing import TYPE_CHECKING, Any

from fastload.errors import WorkerStartError
from fastload.memory.segment import why_unsupported

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.workers.job import Job


@functools.cache
def why_no_processes() -> str | None:
    """Why worker processes cannot use fastload's transport here, as a readable clause; None if they can.

    Once in each process, the function tries the system calls that a filter may refuse. Workers need shared
    segments, socket pairs that keep messages apart, pidfd_open, which shows one process the end of another,
    and pidfd_send_signal, by which the parent ends workers that do not leave.
    """
    reason = why_unsupported()
    if reason is not None:
        return reason
    if not hasattr(os, "pidfd_open"):
        return "this platform has no pidfd_open"
    trials: dict[str, Callable[[], None]] = {
        "pidfd_open": _try_pidfd,
        "pidfd_send_signal": _try_signal,
        "socketpair": _try_socket_pair,
    }
    for name, trial in trials.items():
        try:
            trial()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):  # starting a worker reports these itself
                return f"this system refuses {name}: {error}"
    return None


def _try_pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _try_signal() -> None:
    pidfd = os.pidfd_open(os.getpid())
    try:
        signal.pidfd_send_signal(pidfd, 0)  # number 0 sends no signal
    finally:
        os.close(pidfd)


def _try_socket_pair() -> None:
    for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET):
        end.close()


def check_not_inheriting() -> None:
    """Raise if this process is itself being started, and imports the main module for that.

    Raises:
        WorkerStartError: It is.
    """
    if getattr(process.current_process(), "_inheriting", False):
        raise WorkerStartError(
            "workers were asked for while this process is itself being started. "
            "Put the code that iterates over the loader under `if __name__ == '__main__':`."
        )


def check_start(job: Job, method: str) -> None:
    """Raise a clear error here for problems that would otherwise appear later, in another process.

    Raises:
        WorkerStartError: This process is itself being started, or workers cannot import the main script or
            the dataset's class.
        AssertionError: This process is daemonic.
    """
    check_not_inheriting()
    if process.current_process().daemon:
        # multiprocessing makes the same assertion later, where it is harder to understand.
        raise AssertionError("daemonic processes are not allowed to have children")
    if method == "fork":
        return
    main_module = sys.modules.get("__main__")
    main_path = spawn.get_preparation_data("worker").get("init_main_from_path")
    if main_path is not None and not os.path.exists(main_path):
        raise WorkerStartError(
            f"workers started with {method!r} run the main script again, but there is no file {main_path}. "
            "Save the script to a file, or use multiprocessing_context='fork'."
        )
    kind = type(job.dataset)
    if kind.__module__ == "__main__" and getattr(main_module, "__file__", None) is None:
        raise WorkerStartError(
            f"the dataset's class {kind.__qualname__} was defined interactively, and workers started with "
            f"{method!r} cannot import it. Move it to a module file, or use multiprocessing_context='fork'."
        )


def start_helpers(method: str) -> None:
    """Start the processes through which multiprocessing starts others.

    This comes before signals are blocked, because these processes inherit what is blocked, and the start of
    the resource tracker ends the block.
    """
    resource_tracker.ensure_running()
    if method == "forkserver":
        _preload_forkserver()
        forkserver.ensure_running()


def _preload_forkserver() -> None:
    """Let a fork server that is not running yet import torch once, and the caches if they may be in use."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is None and server._preload_modules == ["__main__"]:
        # The last module freezes the objects of all modules imported before it.
        caches = [name for name in ("fastload.cache.dataset",) if name in sys.modules]
        multiprocessing.set_forkserver_preload(["__main__", *caches, "fastload.workers.preload"])
