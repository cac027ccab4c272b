"""Detects whether several ranks of one training run share this host.

Each launcher indicates it in its own way. A wrong answer costs a warning, or waiting for a builder, but never
causes a wrong sample.
"""

from __future__ import annotations

import os
import sys

from fastload.system.cpus import RANKS_OF_HOST


def are_several() -> bool:
    """Whether torchrun, mpirun, srun or the script itself started several ranks.

    SLURM_NTASKS_PER_NODE is also set in a job's shell, where one process runs; SLURM_LOCALID is not set
    there.
    """
    if any(os.environ.get(name, "1") not in ("", "1") for name in RANKS_OF_HOST):
        return True
    local_id = os.environ.get("SLURM_LOCALID", "")
    tasks_per_node = os.environ.get("SLURM_NTASKS_PER_NODE", "1")
    if local_id and (local_id != "0" or tasks_per_node not in ("", "1")):
        return True
    # If the script never imported torch.distributed, this process is not in a process group.
    distributed = sys.modules.get("torch.distributed")
    return (
        distributed is not None
        and distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )
