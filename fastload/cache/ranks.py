"""Detects whether there are several ranks of one training run, and how many share this host.

Each launcher indicates it differently. A wrong number costs a warning, a smaller cache, or waiting for a
builder, but never causes a wrong sample.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from pathlib import Path

from fastload.system.cgroups import read_text
from fastload.system.ranks import number_in, process_group, ranks_of_host

_SAME_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # Slurm writes 4,4,2 as 4(x2),2


def are_several() -> bool:
    """Whether torchrun, Lightning, mpirun, srun or the script itself started several ranks, on any hosts."""
    return max(of_host(), _of_all_hosts()) > 1


def of_host() -> int:
    """The number of ranks on this host, at least 1; where only that of all hosts is known, that number."""
    told = [ranks_of_host() or 0]
    if os.environ.get("SLURM_LOCALID"):  # not set in a job's shell, which has counts of tasks, too
        told.append(_of_slurm())
    if not any(told):
        told = [_of_all_hosts(), _siblings()]
    return max(1, *told)


def _of_slurm() -> int:
    """The number of tasks that srun started on this host."""
    counts: list[int] = []
    for count, times in _SAME_COUNT.findall(os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(times or 1)
    node = number_in("SLURM_NODEID") or 0
    if node < len(counts):
        return counts[node]
    return max(number_in("SLURM_NTASKS_PER_NODE") or 0, (number_in("SLURM_LOCALID") or 0) + 1)


def _of_all_hosts() -> int:
    """The number of ranks in all, which Lightning and DeepSpeed tell, and a process group knows."""
    group = process_group()
    return max(
        (number_in("WORLD_SIZE") or 0) if os.environ.get("LOCAL_RANK") else 1,
        1 if group is None else group.get_world_size(),
    )


def _siblings() -> int:
    """How many processes the parent runs, if it started this one as `torch.multiprocessing.spawn` does."""
    if multiprocessing.parent_process() is None or multiprocessing.current_process().daemon:
        return 1  # workers of a loader are daemons
    threads = Path(f"/proc/{os.getppid()}/task").glob("*/children")  # below the thread that started them
    children = [child for thread in threads for child in read_text(thread).split()]
    programs = [read_text(Path(f"/proc/{child}/cmdline")) for child in children]
    return sum("resource_tracker" not in program for program in programs)
