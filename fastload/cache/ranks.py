"""Detects whether several ranks of one training run share this host.

Each launcher indicates it differently. A wrong answer costs a warning, or waiting for a builder, but never
causes a wrong sample.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fastload.system.cpus import RANKS_OF_HOST
from fastload.system.process_group import process_group

if TYPE_CHECKING:
    from collections.abc import Mapping


def are_several() -> bool:
    """Whether torchrun, Lightning, mpirun, srun or the script itself started several ranks.

    SLURM_NTASKS_PER_NODE is also set in a job's shell, where one process runs; SLURM_LOCALID is not set
    there.
    """
    counts = (os.environ.get(name, "1") for name in RANKS_OF_HOST)
    if are_several_in(os.environ) or any(count not in ("", "1") for count in counts):
        return True
    local_id = os.environ.get("SLURM_LOCALID", "")
    tasks_per_node = os.environ.get("SLURM_NTASKS_PER_NODE", "1")
    if local_id and (local_id != "0" or tasks_per_node not in ("", "1")):
        return True
    group = process_group()
    return group is not None and group.get_world_size() > 1


def are_several_in(environment: Mapping[str, str]) -> bool:
    """Whether the variables of PyTorch's launchers name several ranks.

    torchrun sets the number of ranks on this host. Lightning and DeepSpeed set a rank's number on the host,
    and the number of ranks on all hosts.
    """
    total = environment.get("WORLD_SIZE") if environment.get("LOCAL_RANK") else None
    return (environment.get("LOCAL_WORLD_SIZE") or total or "1") != "1"
