"""Which processes are ranks of one launch, and so share caches that have neither a fingerprint nor a key.

Two jobs must never be taken for one, so the name of a launch is unique:

1. Ranks of a process group take a random name from the group's store, in one round trip.
2. Before there is a group, ranks are named after the process that started them and the variables they were
   started with. Variables set later do not count: workers of different Ray jobs have one parent, and set
   their own.
3. Lightning's rank 0 starts the other ranks, often after it has made its caches. These are named after rank 0
   itself, and the ranks that it starts look for them first.
"""

from __future__ import annotations

import os
import secrets
import sys

from fastload.cache.ranks import are_several, are_several_in
from fastload.system.linux import start_time, started_with
from fastload.system.logs import log
from fastload.system.process_group import is_worker, process_group, store_of, watch_forks

_JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_LIGHTNING = ("lightning", "lightning_fabric")


def names() -> list[str]:
    """The possible names of this process's launch; the first choice comes first, the last is always right.

    Empty if this process is not a rank and cannot become rank 0, or its launch cannot be told from others.
    """
    watch_forks()
    if is_worker():
        return []
    group_name = _group_name()
    if group_name is not None:
        return [group_name]
    variables, parent = started_with(), os.getppid()
    local_rank = variables.get("LOCAL_RANK")
    if local_rank is None:
        may_lead = any(map(sys.modules.get, _LIGHTNING)) and not are_several()
        return [_led_by(os.getpid())] if may_lead else []
    if "MASTER_PORT" not in variables or not are_several_in(variables):
        return []
    job = ", ".join(f"{name}={variables[name]}" for name in _JOB if name in variables)
    started = f"the ranks that process {_identified(parent)} started with {job}"
    return [started] if local_rank == "0" else [_led_by(parent), started]


def _group_name() -> str | None:
    group = process_group()
    if group is None or group.get_world_size() == 1:
        return None
    try:
        name = store_of(group).compare_set("fastload/launch", "", secrets.token_hex(16))
    except Exception as error:  # noqa: BLE001  # other libraries' stores can raise anything
        log.debug("cache: the store of the process group cannot be used: %r", error)
        return None
    return f"the ranks of process group {name.decode()}"


def _led_by(pid: int) -> str:
    return f"rank 0, process {_identified(pid)}, and the ranks that it started"


def _identified(pid: int) -> str:
    """A name that no later process can have."""
    return f"{pid} (start tick {start_time(pid)})"
