"""Start a child process without losing a signal, and end it with its parent.

Worker processes and the runs of `fastload bench` start this way. The parent makes and starts the process in
`handlers_blocked`; the child calls `enter_child` first.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from typing import TYPE_CHECKING, Any

from fastload.system.linux import open_process

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def handlers_blocked(blocks: bool = True) -> Iterator[set[Any]]:
    """Block the signals that have a Python handler; yields the signals that were blocked before.

    A handler can raise. It then runs after the block, when this process has recorded the child, and never in
    a forked child. Windows cannot block signals: there the block does nothing.
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


def enter_child(parent_pid: int, signal_mask: set[Any]) -> None:
    """Take the first steps in a child: its parent's handlers go, and it ends when its parent does.

    Args:
        parent_pid: The process that started this one.
        signal_mask: The signals that were blocked there before, as from `handlers_blocked`.

    Raises:
        AttributeError, OSError: The system has no pidfd_open, or denies it; the parent is then not watched.
    """
    _drop_signal_handlers()  # before the signals that were blocked at the start are delivered
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
    exit_with(parent_pid)


def _drop_signal_handlers() -> None:
    """Remove the signal handlers that a fork copied from the parent; signals then act as in a new process.

    Batch systems send some to every process of a job: if the parent handles them, a child must not die.
    """
    signal.set_wakeup_fd(-1)
    ignored = {getattr(signal, name, None) for name in ("SIGHUP", "SIGUSR1", "SIGUSR2")}  # not on Windows
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            action = signal.SIG_IGN if number in ignored else signal.SIG_DFL
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else action)


def exit_with(parent_pid: int) -> None:
    """Exit as soon as the parent is gone, even if this process is busy.

    PR_SET_PDEATHSIG would watch the thread that forked; a pidfd watches the whole process.

    Raises:
        AttributeError, OSError: As `enter_child`.
    """
    try:
        pidfd = open_process(parent_pid)
    except ProcessLookupError:
        os._exit(1)

    def watch() -> None:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.poll()
        os._exit(1)

    threading.Thread(target=watch, name="fastload-parent-watch", daemon=True).start()
