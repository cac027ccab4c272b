"""What an error says of a worker that ended while it was needed; called by the pool, in the parent."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastload.transport.task import Task


def obituary(worker_id: int, code: int | None, task: Task | None) -> str:
    """How a worker ended, what it was doing, and what is likely to blame.

    Args:
        worker_id: Its number.
        code: Its exit code; minus the number of a signal that killed it.
        task: What it owed first.
    """
    if code is not None and code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        how = f"worker {worker_id} was killed by {name}"
        causes: dict[int, str] = {
            signal.SIGKILL: "most often the kernel's out-of-memory killer or a container's memory limit",
            signal.SIGBUS: "memory ran out, or a memory-mapped file shrank",
            signal.SIGTERM: "something outside asked it to end",
        }
        cause = causes.get(-code, "native code crashed; its Python stack is on stderr")
    else:
        how = f"worker {worker_id} exited with code {code}"
        cause = (
            "user code called sys.exit() or os._exit(), or the process could not start: "
            "see stderr, and check that the script has an `if __name__ == '__main__':` guard"
        )
    doing = "It owed no batch."
    if task is not None:
        doing = f"It was at batch {task.number}, index {short(task.index)}."
    return f"{how} ({cause}). {doing} num_workers=0 runs the same code in this process."


def short(index: Any) -> str:
    """An index for a message: its repr, cut where it gets long."""
    text = repr(index)
    return text if len(text) <= 200 else text[:200] + "..."
