"""The worker actor of a Ray cluster: a `BatchMaker` whose batches go to Ray's object store as packed bytes.

All code here runs in the actor. Importing this file does not import Ray.
"""

from __future__ import annotations

import functools
import socket
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.batch.packing import Packed, pack
from fastload.errors import FastloadError, WorkerStartError
from fastload.memory.lease import BufferPool
from fastload.system.budget import parse_prefetch_memory
from fastload.version import __version__
from fastload.workers.batch_maker import BatchMaker
from fastload.workers.messages import ReplyKind

if TYPE_CHECKING:
    from fastload.batch.dataset_state import DatasetState
    from fastload.batch.plan import Plan
    from fastload.rng.keys import BatchKey

_NUM_BUFFERS = 2  # Ray copies a batch before the next call


def load_plan(references: list[Any], expected_release: str) -> Plan:
    """The plan in the object store; large arrays in it are read-only views of memory that a node shares.

    Args:
        references: A list of its reference.
        expected_release: The release of fastload that the consumer runs.

    Raises:
        WorkerStartError: This machine has a different release of fastload, or cannot import a class.
        FastloadError: The worker cannot open a cache.
    """
    import ray

    host = socket.gethostname()
    if __version__ != expected_release:
        raise WorkerStartError(
            f"the consumer runs fastload {expected_release}, but {host} has {__version__}: install the same "
            "release on all machines of the cluster"
        )
    try:
        plan: Plan = ray.get(references[0])
    except FastloadError:
        raise
    except Exception as error:
        cause = str(error).partition("\n")[0].removeprefix("System error: ")  # then Ray has a traceback
        raise WorkerStartError(
            f"a worker on {host} cannot unpickle the dataset, or what is sent with it: {cause}. Ray "
            "sends the code of the script itself, but no modules: install them on all machines, or pass "
            'ray.init(runtime_env={"working_dir": "."})'
        ) from error
    return plan


class RayWorker:
    """One worker; Ray calls its methods in an actor's process.

    Args:
        worker_id: 0 to num_workers - 1.
        references: As for `load_plan`.
        expected_release: As for `load_plan`.
    """

    def __init__(self, worker_id: int, references: list[Any], expected_release: str) -> None:
        self._buffers = BufferPool(parse_prefetch_memory("auto"), _NUM_BUFFERS)
        load = functools.partial(load_plan, references, expected_release)
        self._maker = BatchMaker(worker_id, load, self._buffers, self._pack)
        self._maker.begin()
        self._since_ns = time.perf_counter_ns()

    def begin_epoch(self, epoch: int | None, dataset_state: DatasetState | None) -> None:
        """Begin an epoch; an error is the reply to its requests."""
        self._maker.begin_epoch(epoch, dataset_state)
        self._since_ns = time.perf_counter_ns()

    def make(self, index: Any, key: BatchKey | None) -> tuple[tuple[Any, ...], Any]:
        """The reply to a request as built-in types, and the bytes of its batch; None without any."""
        self._maker.waited(self._since_ns)
        self._buffers.begin()
        reply = self._maker.make(index, key)
        data = None
        if reply.kind is ReplyKind.BATCH and reply.payload.used_bytes:
            data = np.frombuffer(self._buffers.lease, np.uint8, reply.payload.used_bytes)
        self._buffers.end()
        self._since_ns = time.perf_counter_ns()
        return reply.to_plain(), data

    def _pack(self, batch: Any) -> Packed:
        return pack(batch, self._buffers)
