"""The types of workers by name: what the loader's `worker_type` can be.

A new type is a `WorkerPool` in a file of its own, a line here, and a word in the docstring of the loader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastload.workers.process_pool import ProcessPool
from fastload.workers.ray_pool import RayPool
from fastload.workers.thread_pool import ThreadPool

if TYPE_CHECKING:
    from fastload.workers.pool import WorkerPool

WORKER_TYPES: dict[str, type[WorkerPool]] = {"process": ProcessPool, "thread": ThreadPool, "ray": RayPool}
