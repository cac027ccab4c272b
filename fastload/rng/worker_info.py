"""Which worker the caller is, in worker processes and in worker threads.

torch's `get_worker_info()` knows only processes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Literal

from torch.utils.data import get_worker_info as torch_worker_info


@dataclass(frozen=True)
class WorkerInfo:
    """A worker of a loader, as `get_worker_info` returns it.

    Attributes:
        id: 0 to num_workers - 1.
        num_workers: The number of workers.
        seed: The worker's own seed, as in torch: the base seed plus the id.
        dataset: The worker's copy of the dataset.
        method: Whether the worker is a process or a thread.
    """

    id: int
    num_workers: int
    seed: int
    dataset: Any
    method: Literal["process", "thread"]


class _Here(threading.local):
    info: WorkerInfo | None = None


_here = _Here()


def get_worker_info() -> WorkerInfo | None:
    """The worker that calls this, a process or thread; None elsewhere.

    In a process, the values are those of `torch.utils.data.get_worker_info()`.
    """
    if _here.info is not None:
        return _here.info
    info = torch_worker_info()
    if info is None:
        return None
    return WorkerInfo(info.id, info.num_workers, info.seed, info.dataset, "process")


def work_as(info: WorkerInfo) -> None:
    """Let `get_worker_info` return ``info`` to this thread from now on."""
    _here.info = info
