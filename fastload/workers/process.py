"""One worker process as its parent sees it: start it, know when it has ended, end it, clean up after it.

Rules:

1. The parent watches a process through a pidfd (pidfd_open(2)), which becomes readable when the process ends.
   The pipe that multiprocessing watches stays open while any child of the worker, or a process that was
   forked meanwhile, holds a copy.
2. Signals go through the pidfd, so that they never reach another process that got the number later.
3. Signals that have a handler in Python wait while a process forks, until the worker has put the handlers
   back that a new process would have: the parent's handlers never run in a worker.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from typing import TYPE_CHECKING, Any

from fastload.errors import WorkerStartError
from fastload.workers.worker import Setup, main

if TYPE_CHECKING:
    from collections.abc import Iterable
    from multiprocessing.context import BaseContext

    from fastload.workers.channel import Channel
    from fastload.workers.job import Job, PickledJob

# The fork server learns of an end a moment after the pidfd tells it.
_EXIT_CODE_WAIT_S = 1.0


class WorkerProcess:
    """A process that was started to run `worker.main`.

    Args:
        worker_id: Its number.
        context: The multiprocessing context that starts it.
        job: What it does.
        end: Its end of the pipe; closed here once the process has it.
        inherited: The parent's ends of pipes, which a forked worker closes.

    Raises:
        WorkerStartError: The fork server, or a spawned process, ended before the worker had its setup.
        OSError: The system refuses a process.
    """

    def __init__(
        self,
        worker_id: int,
        context: BaseContext,
        job: Job | PickledJob,
        end: Any,
        inherited: list[Channel],
    ) -> None:
        is_fork = context.get_start_method() == "fork"
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _handled_signals() if is_fork else ())
        try:
            setup = Setup(
                worker_id, job, end, os.getpid(), inherited if is_fork else [], old_mask if is_fork else None
            )
            self._process = context.Process(  # type: ignore[attr-defined]  # typeshed's BaseContext lacks it
                target=main, args=(setup,), name=f"fastload-worker-{worker_id}", daemon=True
            )
            self._process.start()
        except (EOFError, ConnectionError) as error:  # a fork server that cannot fork ends itself
            raise WorkerStartError(
                f"worker {worker_id} could not be started: the fork server, or the new process, ended "
                "before it had its setup. The error is on stderr; most often a limit on processes or memory "
                "is reached"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
            end.socket.close()
        self.pid: int = self._process.pid
        try:
            self._pidfd = _pidfd_of(self.pid)
        except BaseException:
            self._process.kill()
            self._process.join()
            raise

    def fileno(self) -> int:
        """A descriptor that becomes readable when the process has ended; -1 once it was cleaned up after."""
        return self._pidfd

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, or was cleaned up after."""
        return self._pidfd < 0 or bool(_ended([self], 0.0))

    def exit_code(self) -> int | None:
        """The exit code of a process that has ended, minus the number of a signal that killed it.

        None if another part of this program has waited for the process and taken the code.
        """
        if self._process.exitcode is None:
            self._process.join(_EXIT_CODE_WAIT_S)
        code: int | None = self._process.exitcode
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def clean_up(self) -> None:
        """Take the exit code from the system and close the descriptors; idempotent."""
        if self._pidfd < 0:
            return
        if self.has_ended:
            if self.exit_code() is None:
                self._process._popen.returncode = 255  # or multiprocessing would wait for it for ever
            self._process.close()
        self.abandon()

    def abandon(self) -> None:
        """Close this process's descriptor and leave the worker alone (after a fork)."""
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)


def _pidfd_of(pid: int) -> int:
    """A descriptor that becomes readable when the process has ended; at once if it is gone already.

    A fork server may have waited for a process that ended at once.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        readable, writable = os.pipe()
        os.close(writable)  # the end of the pipe: poll(2) says so for ever
        return readable


def wait_for_all(processes: Iterable[WorkerProcess], limit_s: float) -> bool:
    """Wait until all processes have ended, for no longer than ``limit_s``; whether they have."""
    deadline = time.monotonic() + limit_s
    left = [process for process in processes if process.fileno() >= 0]
    while left:
        ended = _ended(left, max(deadline - time.monotonic(), 0.0))
        left = [process for process in left if process not in ended]
        if not ended:
            return False
    return True


def _ended(processes: list[WorkerProcess], limit_s: float) -> list[WorkerProcess]:
    """Those that have ended; waits for the first of them."""
    poller = select.poll()
    by_fd = {process.fileno(): process for process in processes}
    for fd in by_fd:
        poller.register(fd, select.POLLIN)
    return [by_fd[fd] for fd, _ in poller.poll(limit_s * 1000)]


def _handled_signals() -> set[int]:
    """Signals that a forked process would answer with a handler in Python."""
    return {number for number in signal.valid_signals() if callable(signal.getsignal(number))}
