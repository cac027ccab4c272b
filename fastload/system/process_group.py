"""The process group of this rank, and whether this process only works for a rank.

torch is never imported here: if the script never imported torch.distributed, this process is not in a group.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

# Whether this process was forked from a rank: it must not use that rank's connection to the store.
_is_forked = False


def process_group() -> Any | None:
    """The module torch.distributed if this process is in a process group, else None."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed
    return None


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
