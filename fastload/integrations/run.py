"""What `fastload run` does in the processes of a script: patch torch, and say at the end what came of it.

This file imports little, because `begin` runs wherever torch is imported.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys

from fastload.integrations.bootstrap import settings_here
from fastload.integrations.patch import patch
from fastload.integrations.patch_status import status
from fastload.system.logs import log, write_stderr


def begin() -> None:
    """Patch torch, in each process that imports it."""
    settings, speaks = settings_here()
    patch(settings["defaults"])
    if settings["is_quiet"]:
        log.setLevel(logging.ERROR)  # as of all commands; a script that shows log lines can set it again
    elif speaks:
        atexit.register(_report, os.getpid())


def _report(pid: int) -> None:
    """Say how many loaders were replaced, and what caches found, if a loader was used."""
    stats = sys.modules.get("fastload.epochs.stats")
    if stats is None or os.getpid() != pid:  # a forked process leaves this to its parent
        return
    from fastload.readers.reasons import report
    from fastload.readers.request import requested_cache
    from fastload.system.ranks import number_in

    number, counts = status.num_replaced, stats.of_process.copied_counts()
    where = f"in process {pid}"
    if (rank := number_in("RANK")) is not None and (number_in("WORLD_SIZE") or 1) > 1:
        where += f", rank {rank} (those of the other ranks are not counted)"
    has_cache = counts.num_epochs and (counts.cache_hits or counts.cache_misses or requested_cache(None))
    texts = []
    if number or (counts.num_epochs and not has_cache):
        texts.append(f"replaced {number or 'no'} torch DataLoader{'s' * (number > 1)} {where}")
    if has_cache:
        lines = report(counts.cache_hits, counts.cache_misses, +counts.miss_reasons)
        texts.append(f"cache {where}: " + "\n".join(lines))
    if status.seeds_pipelines and "albumentations" in sys.modules:
        texts.append(
            "albumentations pipelines were seeded, differently in each worker, so their draws differ from "
            "those under torch's loader; --seeding torch leaves them alone"
        )
    write_stderr("".join(f"fastload: {text}\n" for text in texts))
