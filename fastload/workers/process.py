"""One worker process, seen from its parent: start it, notice its exit, stop it, clean up after it.

Rules:

1. The parent watches a process through a pidfd (pidfd_open(2)), which becomes readable when the process ends.
   The parent does not use the pipe that multiprocessing watches, because that pipe stays open while a child
   of the worker, or a process forked in the meantime, has a copy.
2. Signals are sent through the pidfd, so they cannot reach a process that reuses the process id.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import multiprocessing
import os
import sys
import time
from multiprocessing import connection, forkserver, resource_tracker
from typing import TYPE_CHECKING, Any

from fastload.errors import WorkerStartError
from fastload.memory.segment import why_unsupported
from fastload.system import linux
from fastload.system.child_process import handlers_blocked
from fastload.workers.channel import why_no_channel
from fastload.workers.worker import main

if TYPE_CHECKING:
    from collections.abc import Iterable
    from multiprocessing.context import BaseContext

    from fastload.batch.plan import Plan
    from fastload.workers.channel import Channel
    from fastload.workers.sent_plan import PickledPlan

# The fork server notices the end of a process a moment after the pidfd does.
_EXIT_CODE_WAIT_S = 1.0


class WorkerProcess:
    """A process that runs `worker.main`.

    Args:
        worker_id: Its number.
        context: The multiprocessing context that starts it.

    Attributes:
        process: multiprocessing's object, once it was started.
    """

    def __init__(self, worker_id: int, context: BaseContext) -> None:
        self.process: Any = None
        self._worker_id = worker_id
        self._context = context
        self._pidfd = -1

    def start(self, plan: Plan | PickledPlan, end: Any, inherited: list[Channel]) -> None:
        """Start the process. The owner must have this object by now, and call `clean_up` after an error.

        Args:
            plan: What it runs.
            end: Its end of the pipe; this process closes its copy once the worker has it.
            inherited: The parent's ends of pipes, which a forked worker closes.

        Raises:
            WorkerStartError: The fork server, or a spawned process, ended before the worker had its setup.
            OSError: The system cannot start a process.
        """
        method = self._context.get_start_method()
        # A fork server manages its children itself, and can take long to import what it preloads.
        with handlers_blocked(method != "forkserver") as mask, end:
            pipes = inherited if method == "fork" else []
            self.process = self._context.Process(  # type: ignore[attr-defined]  # typeshed lacks it
                target=main,
                args=(self._worker_id, plan, end, os.getpid(), pipes, mask),
                name=f"fastload-worker-{self._worker_id}",
                daemon=True,
            )
            try:
                self.process.start()
            except (EOFError, ConnectionError) as error:
                raise WorkerStartError(  # a fork server that cannot fork ends
                    f"worker {self._worker_id} could not be started: the fork server, or the new process, "
                    "ended before it had its setup. The error is on stderr; the usual cause is a limit on "
                    "processes or memory"
                ) from error
            self._pidfd = _pidfd_of(self.process.pid)

    def fileno(self) -> int:
        """A descriptor that becomes readable when the process has ended; -1 before `start` and at the end."""
        return self._pidfd

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended; also True before `start` and after `clean_up`."""
        return wait_for_all([self], 0.0)

    @property
    def exitcode(self) -> int | None:
        """The exit code of a process that has ended; minus the signal number if a signal killed it.

        None if another part of this program has waited for the process and taken the code.
        """
        if self.process.exitcode is None:
            self.process.join(_EXIT_CODE_WAIT_S)
        code: int | None = self.process.exitcode
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                linux.send_signal(self._pidfd, number)

    def clean_up(self) -> None:
        """Take the exit code from the system and close the descriptors; idempotent."""
        process, popen = self.process, getattr(self.process, "_popen", None)
        if popen is None:
            return  # an exception interrupted `start`
        if self._pidfd < 0:
            process.kill()
            process.join()
        elif self.has_ended and self.exitcode is None:
            popen.returncode = 255  # else multiprocessing would wait forever
        popen.close()
        self.abandon()

    def abandon(self) -> None:
        """After a fork: close this process's descriptor and leave the worker running."""
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)


def _pidfd_of(pid: int) -> int:
    """A descriptor that becomes readable when the process has ended; readable now if it is gone already.

    The process is gone if it ended immediately and the fork server has waited for it.
    """
    try:
        return linux.open_process(pid)
    except ProcessLookupError:
        readable, writable = os.pipe()
        os.close(writable)  # poll(2) now always reports the end of the pipe
        return readable


def wait_for_all(processes: Iterable[WorkerProcess], limit_s: float) -> bool:
    """Wait at most ``limit_s`` until all processes have ended; return whether they have."""
    deadline = time.monotonic() + limit_s
    left: list[Any] = [process for process in processes if process.fileno() >= 0]
    while left:
        ended = connection.wait(left, max(deadline - time.monotonic(), 0.0))
        left = [process for process in left if process not in ended]
        if not ended:
            return False
    return True


# --- whether processes can be started --------------------------------------------------------------------


@functools.cache
def why_no_processes() -> str | None:
    """Why worker processes cannot use fastload's transport here, as a readable clause; None if they can.

    Once per process, the function tries the system calls that a seccomp filter can deny. Workers need shared
    segments, socket pairs that keep messages apart, pidfd_open to notice a process's exit, and
    pidfd_send_signal to kill workers that hang.
    """
    try:
        reason = why_unsupported() or linux.why_no_pidfd() or why_no_channel()
        if reason is not None:
            return reason
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):  # starting a worker reports these itself
            return f"this system denies pidfd_open, pidfd_send_signal or socketpair: {error}"
    return None


def start_helpers(method: str) -> None:
    """Start the processes through which multiprocessing starts others.

    This comes before signals are blocked, because these processes inherit the mask, and the start of the
    resource tracker resets it.
    """
    resource_tracker.ensure_running()
    if method == "forkserver":
        _preload_forkserver()
        forkserver.ensure_running()


def _preload_forkserver() -> None:
    """Let a fork server that is not running yet import torch once, and the caches if they might be in use."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is None and server._preload_modules == ["__main__"]:
        # The last module freezes the objects of all modules imported before it.
        caches = [name for name in ("fastload.cache.dataset",) if name in sys.modules]
        multiprocessing.set_forkserver_preload(["__main__", *caches, "fastload.workers.preload"])
