"""Runs worker processes that read samples to fill a cache, with torch's own loader.

Answers come in the order in which tasks were handed out.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.data

from fastload.system.checks import as_int
from fastload.system.child_process import exit_with
from fastload.system.cpus import worthwhile_cpus
from fastload.system.worker_memory import freeze_inherited, keep_freed_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAX_WORKERS = 16
_WORTH_WORKERS = 64  # samples; fewer are read before workers have started


def choose_workers(num_workers: int | None, num_samples: int) -> int:
    """The user's number of workers, or by default one per CPU's worth of time that this process can use.

    The default is no workers if starting them takes longer than it saves, or is not allowed.
    """
    if num_workers is not None:
        return as_int("num_workers", num_workers)
    # A worker of torch's loader is a daemon process, which cannot have child processes.
    if num_samples < _WORTH_WORKERS or multiprocessing.current_process().daemon:
        return 0
    return min(worthwhile_cpus(), _MAX_WORKERS)


class _TaskLoader(torch.utils.data.DataLoader):  # type: ignore[type-arg]  # one or two, by torch's release
    """torch's loader, also after `patch_torch()`, which replaces loaders of exactly torch's class."""


def run(
    tasks: torch.utils.data.Dataset[Any], num_tasks: int, num_workers: int, *, ahead: int = 2
) -> Iterator[Any]:
    """The tasks in their order, computed by workers; workers start now, not at the first answer.

    Args:
        tasks: Map-style.
        num_tasks: Their number.
        num_workers: Processes, of which at most one per task starts; 0 for none.
        ahead: Tasks that each worker gets ahead.
    """
    num_workers = min(num_workers, num_tasks)
    loader = _TaskLoader(
        tasks,
        batch_size=None,
        sampler=range(num_tasks),
        num_workers=num_workers,
        prefetch_factor=ahead if num_workers else None,
        collate_fn=_unchanged,
        worker_init_fn=functools.partial(_prepare_worker, os.getpid()) if num_workers else None,
        generator=torch.Generator(),  # keeps torch's global random state unchanged
    )
    return iter(loader)


def stop(answers: Iterator[Any]) -> None:
    """Stop the workers now.

    After an error the traceback keeps torch's iterator alive. The garbage collector would then free the
    queues before their owner, and wait five seconds for each worker (torch 2.13).
    """
    shut_down = getattr(answers, "_shutdown_workers", None)
    if shut_down is not None:
        shut_down()


def _unchanged(answer: Any) -> Any:
    return answer


def _prepare_worker(parent_pid: int, _: int) -> None:
    # torch's workers look for their parent between tasks, if no lock of a queue that it held blocks them.
    with contextlib.suppress(AttributeError, OSError):  # a system without pidfd_open
        exit_with(parent_pid)
    worker = torch.utils.data.get_worker_info()
    freeze_inherited()
    keep_freed_memory(1 if worker is None else worker.num_workers)
    if "cv2" in sys.modules:  # one thread per worker: thread pools that compete for cores are much slower
        sys.modules["cv2"].setNumThreads(0)
