"""The types of workers by name: what the loader's `worker_type` can be, besides an object with options.

A new type is a `WorkerPool` in a file of its own, a line here, and a word in the docstring of the loader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastload.workers.process_pool import ProcessPool
from fastload.workers.ray_pool import RayPool, RayWorkers
from fastload.workers.thread_pool import ThreadPool

if TYPE_CHECKING:
    from fastload.workers.pool import WorkerPool

WORKER_TYPES: dict[str, type[WorkerPool]] = {"process": ProcessPool, "thread": ThreadPool, "ray": RayPool}


def pool_type_of(worker_type: str | RayWorkers) -> type[WorkerPool]:
    """The pool that a loader's `worker_type` asks for."""
    return RayPool if isinstance(worker_type, RayWorkers) else WORKER_TYPES[worker_type]
