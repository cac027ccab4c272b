"""Write the error message for a worker that ended while it was still needed. Runs in the parent."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from fastload.errors import short_repr

if TYPE_CHECKING:
    from fastload.workers.task import Task


def death_message(worker_id: int, code: int | None, task: Task | None, num_oom_kills: int = 0) -> str:
    """A message that says how a worker ended, what it was doing, and the likely cause.

    Args:
        worker_id: The number of the worker.
        code: Its exit code; minus the signal number if a signal killed it; None if unknown.
        task: The first task that it had not answered.
        num_oom_kills: How many processes of this cgroup the out-of-memory killer has killed since it began.
    """
    if code is None:
        how = f"worker {worker_id} ended, and another part of this program took its exit code"
        cause = "for example a SIGCHLD handler or a call of os.wait(), which waits for any child"
    elif code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        how = f"worker {worker_id} was killed by {name}"
        causes: dict[int, str] = {
            signal.SIGKILL: "the kernel's out-of-memory killer: memory.events of the cgroup counts "
            f"{num_oom_kills} more"
            if num_oom_kills > 0
            else "most often the kernel's out-of-memory killer or a container's memory limit",
            signal.SIGBUS: "memory ran out, or a memory-mapped file shrank",
            signal.SIGTERM: "another process asked it to end",
        }
        cause = causes.get(-code, "native code crashed; its Python stack is on stderr")
    else:
        how = f"worker {worker_id} exited with code {code}"
        cause = (
            "user code called sys.exit() or os._exit(), or the process could not start: "
            "see stderr, and check that the script has an `if __name__ == '__main__':` guard"
        )
    doing = "It had no unfinished batch."
    if task is not None:
        doing = f"It was working on batch {task.number}, index {short_repr(task.index)}."
    return f"{how} ({cause}). {doing} num_workers=0 runs the same code in this process."
