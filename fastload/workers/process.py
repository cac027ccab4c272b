"""One worker process, seen from its parent: start it, notice its end, stop it, clean up after it.

Rules:

1. The parent watches a process through a pidfd (pidfd_open(2)), which becomes readable when the process ends.
   The parent does not use the pipe that multiprocessing watches, because that pipe stays open while a child
   of the worker, or a process forked in the meantime, has a copy.
2. Signals are sent through the pidfd, so that they cannot reach another process that reuses the process id.
3. Signals that have a Python handler are blocked while a process is started: their handlers run when this
   process has recorded the worker, and never in the worker. A fork server may take long, until it has
   imported what it preloads; it looks after its children itself, and signals are not blocked. A signal may
   also arrive in another thread, which does not block it, and Python then runs the handler in this thread
   all the same: if that raises, `end_unrecorded` ends the process.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
import traceback
from multiprocessing import popen_fork
from typing import TYPE_CHECKING, Any

from fastload.errors import WorkerStartError
from fastload.workers.worker import Setup, main

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from multiprocessing.context import BaseContext

    from fastload.workers.channel import Channel
    from fastload.workers.job import Job, PickledJob

# The fork server notices the end of a process a moment after the pidfd does.
_EXIT_CODE_WAIT_S = 1.0
# poll(2) takes no longer time in milliseconds than an int holds.
_LONG_S = 1e6


class WorkerProcess:
    """A process that runs `worker.main`.

    Args:
        worker_id: Its number.
        context: The multiprocessing context that starts it.
    """

    def __init__(self, worker_id: int, context: BaseContext) -> None:
        self.pid = 0
        self.name = f"fastload-worker-{worker_id}"
        self._worker_id = worker_id
        self._context = context
        self._process: Any = None
        self._pidfd = -1
        self._exit_code: int | None = None  # once `clean_up` took it

    def start(self, job: Job | PickledJob, end: Any, inherited: list[Channel]) -> None:
        """Start the process. The owner must have this object by now, and call `clean_up` after an error.

        Args:
            job: Its job.
            end: Its end of the pipe; this process closes its copy once the worker has it.
            inherited: The parent's ends of pipes, which a forked worker closes.

        Raises:
            WorkerStartError: The fork server, or a spawned process, ended before the worker had its setup.
            OSError: The system refuses to start a process.
        """
        method = self._context.get_start_method()
        with without_handlers(method != "forkserver") as mask, end:
            setup = Setup(self._worker_id, job, end, os.getpid(), inherited if method == "fork" else [], mask)
            self._process = self._context.Process(  # type: ignore[attr-defined]  # typeshed lacks it
                target=main, args=(setup,), name=self.name, daemon=True
            )
            try:
                self._process.start()
            except BaseException as error:
                if method != "forkserver":
                    end_unrecorded(error)
                if not isinstance(error, (EOFError, ConnectionError)):
                    raise
                raise WorkerStartError(  # a fork server that cannot fork ends
                    f"worker {self._worker_id} could not be started: the fork server, or the new process, "
                    "ended before it had its setup. The error is on stderr; the usual cause is a limit on "
                    "processes or memory"
                ) from error
            self.pid = self._process.pid
            self._pidfd = _pidfd_of(self.pid)

    def fileno(self) -> int:
        """A descriptor that becomes readable when the process has ended; -1 before `start` and at the end."""
        return self._pidfd

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended; also True before `start` and after `clean_up`."""
        return self._pidfd < 0 or bool(_ended([self], 0.0))

    def exit_code(self) -> int | None:
        """The exit code of a process that has ended; minus the signal number if a signal killed it.

        None if another part of this program has waited for the process and taken the code.
        """
        if self._pidfd < 0:
            return self._exit_code
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
            process, self._process = self._process, None
            if process is not None and process.pid is not None:  # an exception interrupted `start`
                process.kill()
                process.join()
            return
        if self.has_ended:
            self._exit_code = self.exit_code()
            if self._exit_code is None:
                self._process._popen.returncode = 255  # else multiprocessing would wait without end
            self._process.close()
        self.abandon()

    def abandon(self) -> None:
        """After a fork: close this process's descriptor and leave the worker running."""
        pidfd, self._pidfd, self._process = self._pidfd, -1, None
        if pidfd >= 0:
            os.close(pidfd)


class WorkerView:
    """A worker process as an iterator's `_workers` shows it, with the methods of `multiprocessing.Process`.

    It stays valid after the iterator was closed. A forked child of the parent may only read `pid`, `name`,
    `daemon` and `exitcode`, as with multiprocessing.

    Args:
        process: The worker process.
    """

    daemon = True

    def __init__(self, process: WorkerProcess) -> None:
        self._process = process
        self._parent_pid = os.getpid()
        self.pid = self.ident = process.pid
        self.name = process.name

    def is_alive(self) -> bool:
        """Whether the process still runs."""
        self._check_parent("test")
        return not self._process.has_ended

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process has ended, at most ``timeout`` seconds; None waits without limit."""
        self._check_parent("join")
        limit_s = _LONG_S if timeout is None else timeout
        while not wait_for_all([self._process], limit_s) and timeout is None:
            pass

    @property
    def exitcode(self) -> int | None:
        """None while it runs; then its exit code, or minus the number of the signal that ended it."""
        if os.getpid() != self._parent_pid or not self._process.has_ended:
            return None
        return self._process.exit_code()

    def terminate(self) -> None:
        """Send SIGTERM, unless the process has ended."""
        self._check_parent("terminate")
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self._check_parent("kill")
        self._process.send_signal(signal.SIGKILL)

    def _check_parent(self, verb: str) -> None:
        if os.getpid() != self._parent_pid:
            raise AssertionError(f"can only {verb} a child process")  # multiprocessing's, word for word

    def __repr__(self) -> str:
        return f"<worker process name={self.name!r} pid={self.pid}>"


def _pidfd_of(pid: int) -> int:
    """A descriptor that becomes readable when the process has ended; readable now if it is gone already.

    The process is gone if it ended immediately and the fork server has waited for it.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        readable, writable = os.pipe()
        os.close(writable)  # poll(2) now always reports the end of the pipe
        return readable


def wait_for_all(processes: Iterable[WorkerProcess], limit_s: float) -> bool:
    """Wait at most ``limit_s`` until all processes have ended; return whether they have."""
    deadline = time.monotonic() + limit_s
    left = [process for process in processes if process.fileno() >= 0]
    while left:
        ended = _ended(left, max(deadline - time.monotonic(), 0.0))
        left = [process for process in left if process not in ended]
        if not ended:
            return False
    return True


def _ended(processes: list[WorkerProcess], limit_s: float) -> list[WorkerProcess]:
    """The processes that have ended; waits at most ``limit_s`` for the first one."""
    poller = select.poll()
    by_fd = {process.fileno(): process for process in processes}
    for fd in by_fd:
        poller.register(fd, select.POLLIN)
    return [by_fd[fd] for fd, _ in poller.poll(limit_s * 1000)]


def end_unrecorded(error: BaseException) -> None:
    """End a process whose start was interrupted by ``error`` before multiprocessing had recorded it.

    Only the frames of the traceback know it: multiprocessing's Popen, with the process id, and the two pipes.
    A fork server looks after its children itself.
    """
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):  # the frame of the pipes first
        known = frame.f_locals
        popen: Any = known.get("self")
        if not isinstance(popen, popen_fork.Popen):
            continue
        for ours, theirs in (("parent_r", "child_w"), ("parent_w", "child_r")):
            if known.get(ours) is None or known.get(theirs) is None:
                continue
            with contextlib.suppress(OSError):  # it is closed
                # Otherwise the number may belong to another file by now.
                if os.path.samestat(os.fstat(known[theirs]), os.fstat(known[ours])):
                    os.close(known[theirs])
            if popen.finalizer is None:
                os.close(known[ours])
        if getattr(popen, "finalizer", None) is not None:
            popen.close()
        if getattr(popen, "pid", None):
            popen.kill()
            popen.wait()
        return


@contextlib.contextmanager
def without_handlers(blocks: bool = True) -> Iterator[set[Any]]:
    """Block the signals that have a Python handler; yields the signals that were blocked before.

    Nothing happens on Windows, where no signal can be blocked.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield set()
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        if blocks:
            handled = (number for number in signal.valid_signals() if callable(signal.getsignal(number)))
            signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        yield mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
