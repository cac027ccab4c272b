"""The ranks of a distributed job: what launchers say of them, and the process group of this rank.

Each launcher says it in other variables. A wrong number costs a warning, a smaller cache, or waiting for a
builder, but never causes a wrong sample.

torch is never imported here: if the script never imported torch.distributed, this process is not in a group.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

# The number of ranks on this host, from torchrun, Open MPI, MPICH and Intel MPI.
RANKS_OF_HOST = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_FIRST_NUMBER = re.compile(r"\d+")  # Slurm writes 4,4,2 tasks as 4(x2),2


def number_in(variable: str) -> int | None:
    """The number in an environment variable; None if there is none."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None


def ranks_of_host() -> int | None:
    """The number of ranks on this host, at least 1; None if no variable has it."""
    return next((number for number in map(number_in, RANKS_OF_HOST) if number), None)


def are_several_ranks() -> bool:
    """Whether torchrun, Lightning, mpirun, srun or the script itself started several ranks, on any hosts."""
    return max(count_ranks_of_host(), _ranks_of_all_hosts()) > 1


def count_ranks_of_host() -> int:
    """The number of ranks on this host, at least 1; where only that of all hosts is known, that number."""
    count, local_id = ranks_of_host() or 0, number_in("SLURM_LOCALID")
    if local_id is not None:  # not set in a job's shell, which has counts of tasks, too
        of_first_host = _FIRST_NUMBER.match(os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        tasks = int(of_first_host[0]) if of_first_host else number_in("SLURM_NTASKS_PER_NODE") or 0
        count = max(count, local_id + 1, tasks)
    return count or _ranks_of_all_hosts()


def _ranks_of_all_hosts() -> int:
    """The number of ranks in all, which Lightning and DeepSpeed tell, and a process group knows."""
    group = process_group()
    return max(
        (number_in("WORLD_SIZE") or 0) if os.environ.get("LOCAL_RANK") else 1,
        1 if group is None else group.get_world_size(),
    )


def process_group() -> Any | None:
    """The module torch.distributed if this process is in a process group, else None."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed
    return None
