"""The ranks of a distributed job: what launchers say of them, and the process group of this rank.

torch is never imported here: if the script never imported torch.distributed, this process is not in a group.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

# The number of ranks on this host, from torchrun, Open MPI, MPICH and Intel MPI.
RANKS_OF_HOST = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
# Whether this process was forked from a rank: it must not use that rank's connection to the store.
_is_forked = False


def number_in(variable: str) -> int | None:
    """The number in an environment variable; None if there is none."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None


def ranks_of_host() -> int | None:
    """The number of ranks on this host, at least 1; None if no variable has it."""
    return next((number for number in map(number_in, RANKS_OF_HOST) if number), None)


def process_group() -> Any | None:
    """The module torch.distributed if this process is in a process group, else None."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed
    return None


def store_of(group: Any) -> Any:
    """The store of the default process group.

    Raises:
        Exception: The group has none, or this release of torch keeps it elsewhere.
    """
    return group.distributed_c10d._get_default_store()  # torch 2.6 to 2.13 have it


def is_worker() -> bool:
    """Whether this process only works for a rank; it can have inherited that rank's connection."""
    data = sys.modules.get("torch.utils.data")
    return _is_forked or (data is not None and data.get_worker_info() is not None)


@functools.cache
def watch_forks() -> None:
    """From now on, know the processes that are forked from a rank."""
    if hasattr(os, "register_at_fork"):  # Windows does not fork
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    global _is_forked
    _is_forked = _is_forked or process_group() is not None
