"""The text of the error for a worker that ended while it was needed, made in the parent."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

from fastload.errors import short_repr

if TYPE_CHECKING:
    from fastload.workers.task import Task


def oom_kills() -> int:
    """How many processes the kernel has killed in this cgroup for want of memory; 0 where it does not say."""
    try:
        groups = Path("/proc/self/cgroup").read_text()
        path = next(line[3:] for line in groups.splitlines() if line.startswith("0::"))
        events = Path(f"/sys/fs/cgroup{path}/memory.events").read_text()
        return int(next(line.split()[1] for line in events.splitlines() if line.startswith("oom_kill ")))
    except (OSError, StopIteration, ValueError, IndexError):
        return 0


def death_message(worker_id: int, code: int | None, task: Task | None, num_oom_kills: int = 0) -> str:
    """How a worker ended, what it was doing, and what is likely to blame.

    Args:
        worker_id: Its number.
        code: Its exit code; minus the number of a signal that killed it; None if that is not known.
        task: What it owed first.
        num_oom_kills: Processes of this cgroup that were killed for want of memory since it began.
    """
    if code is None:
        how = f"worker {worker_id} ended, and another part of this program took its exit code"
        cause = "a handler for SIGCHLD or a call of os.wait() that waits for any child does that"
    elif code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        how = f"worker {worker_id} was killed by {name}"
        causes: dict[int, str] = {
            signal.SIGKILL: "the kernel's out-of-memory killer: memory.events of the cgroup counts "
            f"{num_oom_kills} more"
            if num_oom_kills > 0
            else "most often the kernel's out-of-memory killer or a container's memory limit",
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
        doing = f"It was at batch {task.number}, index {short_repr(task.index)}."
    return f"{how} ({cause}). {doing} num_workers=0 runs the same code in this process."
