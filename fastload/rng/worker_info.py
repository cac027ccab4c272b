"""Which worker is asking: in a worker process and in a worker thread alike.

torch's `get_worker_info()` knows processes alone.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import get_worker_info as torch_worker_info

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class WorkerInfo:
    """A worker of a loader, as `get_worker_info` gives it.

    Attributes:
        id: 0 to num_workers - 1.
        num_workers: How many there are.
        seed: Its own, as torch's workers have it: the base seed plus the id.
        dataset: The copy that it reads.
        method: What it is.
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
    """The worker that calls this, process or thread; None elsewhere.

    In a process it says what `torch.utils.data.get_worker_info()` says.
    """
    if _here.info is not None:
        return _here.info
    info = torch_worker_info()
    if info is None:
        return None
    return WorkerInfo(info.id, info.num_workers, info.seed, info.dataset, "process")


@contextlib.contextmanager
def working_as(info: WorkerInfo) -> Iterator[None]:
    """Make this thread that worker."""
    _here.info = info
    try:
        yield
    finally:
        _here.info = None
