"""Worker actors of a Ray cluster instead of worker processes: `worker_type="ray"`.

Importing this file does not import Ray. Each worker is one actor, a `RayWorker`; its batches are packed
bytes in Ray's object store. Rules:

1. A request is one call of a method, and Ray makes the calls of one actor in order. The caller gives each
   worker at most `prefetch_factor` requests, and the next one after `take`, which frees the object of the
   batch. So no more objects are alive.
2. All replies that exist are fetched to this machine before their turn. `take` copies a batch once, into a
   buffer of this process.
3. Ray ends the actors with the job that made them. `close` asks them to exit, and kills the others.
4. Ray does not restart actors or repeat calls: a new actor would not have the state of the old one.
   `max_worker_restarts` replaces a dead one, and all batches of it that were not taken are made again.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.batch.packing import Packed, pack, unpack
from fastload.errors import (
    BatchLostError,
    FastloadError,
    LoaderClosedError,
    WorkerDiedError,
    WorkerStartError,
)
from fastload.memory.lease import BufferPool
from fastload.memory.segment import pickled_for_other_machines
from fastload.system.background import Wakeup
from fastload.system.budget import parse_prefetch_memory
from fastload.system.notes import short_repr
from fastload.system.remote_error import RemoteError
from fastload.version import __version__
from fastload.workers.batch_maker import BatchMaker
from fastload.workers.messages import BatchReply, ReplyKind
from fastload.workers.pool import GRACE_S, WorkerHandle, WorkerPool, asked, limit_s, note_unsent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fastload.batch.dataset_state import DatasetState
    from fastload.batch.plan import Plan
    from fastload.rng.keys import BatchKey
    from fastload.workers.messages import PendingBatch, WorkerCounters

_NUM_BUFFERS = 2  # of an actor: Ray copies a batch before the next call
_CAUSE_CHARACTERS = 700  # of Ray's own text about the end of an actor


@dataclass(frozen=True, init=False)
class RayWorkers:
    """Worker actors on a Ray cluster, for `DataLoader(worker_type=RayWorkers(num_cpus=2))`.

    ``worker_type="ray"`` is `RayWorkers()`. The cluster is the one that `ray.init()` has connected to; else
    that of ``RAY_ADDRESS``, or the one that runs on this machine.

    Args:
        **actor_options: Options of Ray's actors, such as ``num_cpus=2`` (1 by default) or
            ``resources={"decoders": 1}``.
    """

    options: Mapping[str, Any]

    def __init__(self, **actor_options: Any) -> None:
        object.__setattr__(self, "options", actor_options)

    def __repr__(self) -> str:
        return (
            f"fastload.RayWorkers({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"
        )


def connect() -> Any:
    """The module of Ray, connected to a cluster.

    Raises:
        ImportError: Ray is not installed.
        WorkerStartError: There is no cluster.
    """
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise ImportError(
            'worker_type="ray" needs Ray, which is not installed: pip install "fastload-torch[ray]"'
        ) from error
    if not ray.is_initialized():
        try:
            ray.init("auto", logging_level="warning")
        except ConnectionError as error:
            raise WorkerStartError(
                "worker_type=\"ray\" found no Ray cluster: start one with 'ray start --head', or call "
                'ray.init() before with the address of one, or with "local" for one of this machine alone'
            ) from error
    return ray


# --- in the actor -----------------------------------------------------------------------------------------


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

    def begin_epoch(self, epoch: int | None, dataset_state: DatasetState | None) -> None:
        """Begin an epoch; an error is the reply to its requests."""
        self._maker.begin_epoch(epoch, dataset_state)

    def make(self, index: Any, key: BatchKey | None) -> tuple[tuple[Any, ...], Any]:
        """The reply to a request as built-in types, and the bytes of its batch; None without any."""
        self._buffers.begin()
        reply = self._maker.make(index, key)
        data = None
        if reply.kind is ReplyKind.BATCH and reply.payload.used_bytes:
            data = np.frombuffer(self._buffers.lease, np.uint8, reply.payload.used_bytes)
        self._buffers.end()
        return reply.to_plain(), data

    def _pack(self, batch: Any) -> Packed:
        return pack(batch, self._buffers)


# --- in the consumer --------------------------------------------------------------------------------------


class _ActorHandle(WorkerHandle):
    """This process's state of one actor."""

    def __init__(self, worker_id: int, actor: Any) -> None:
        super().__init__(worker_id)
        self.actor = actor
        self.has_replied = False
        self.exit: Any = None  # the reference of its exit; set once it was asked to

    def finish(self) -> Any:
        """Let the actor exit when it has replied to its requests; returns the reference of its exit."""
        self.exit = self.exit or self.actor.__ray_terminate__.remote()
        return self.exit


class RayPool(WorkerPool):
    """The worker actors of one iterator; see `WorkerPool`.

    Raises:
        ImportError: Ray is not installed.
        WorkerStartError: There is no cluster.
        ValueError: Ray has no such option.
    """

    runs_elsewhere = True

    def __init__(
        self, plan: Plan, count: Callable[[WorkerCounters], None], pin: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__(plan, count)
        self._lock = threading.RLock()  # between the consumer's thread and the thread that pins batches
        self._workers: list[_ActorHandle] = []
        self._buffers = BufferPool(plan.max_bytes)
        self._wakes = Wakeup()  # the consumer, when a call has ended
        self._plan_reference: Any = None  # of the plan in the object store
        options = dict(plan.worker_type.options) if isinstance(plan.worker_type, RayWorkers) else {}
        self._ray = connect()
        if not self._ray.get_runtime_context().should_capture_child_tasks_in_placement_group:
            options.setdefault("scheduling_strategy", "SPREAD")
        options = {"num_cpus": 1, **options, "max_restarts": 0, "max_concurrency": 1}  # as the rules say
        self._class = self._ray.remote(RayWorker).options(**options)

    def start(self) -> None:
        """Put the plan into the object store, and start the actors; does not wait for them.

        Raises:
            Exception: Ray's error, which names the object that cannot be pickled.
        """
        with pickled_for_other_machines():
            self._plan_reference = self._ray.put(self._plan)
        for worker_id in range(self._plan.num_workers):
            self._workers.append(self._start(worker_id))

    def _start(self, worker_id: int) -> _ActorHandle:
        # In a list, or Ray would load the plan before the constructor, where an error would kill the actor.
        return _ActorHandle(worker_id, self._class.remote(worker_id, [self._plan_reference], __version__))

    def begin_epoch(self, epoch: int | None, dataset_states: list[DatasetState] | None) -> None:
        """Begin an epoch in each worker; replies to older requests are dropped."""
        with self._lock:
            for worker in self._workers:
                worker.sent.clear()
                worker.actor.begin_epoch.remote(*worker.begin_epoch(epoch, dataset_states))

    def submit(self, pending: PendingBatch) -> None:
        """Request a batch from its worker."""
        with self._lock:
            self.expect_open()
            self._send(self._workers[pending.worker], pending)

    def _send(self, worker: _ActorHandle, pending: PendingBatch) -> None:
        try:
            pending.call = worker.actor.make.remote(pending.index, pending.key).future()
        except Exception as error:
            note_unsent(error, pending)
            raise
        pending.call.add_done_callback(self._wakes.wake)
        worker.sent.append(pending)

    def finish(self, worker_id: int) -> None:
        """Let an actor exit when it has replied to its requests, which gives its CPUs back."""
        with self._lock:
            self.expect_open()
            self._workers[worker_id].finish()

    def take(self, worker_id: int | None) -> PendingBatch | None:
        """The worker's next batch with its reply, in a buffer of this process; None: no reply yet."""
        with self._lock:
            self.expect_open()
            for worker in asked(self._workers, worker_id):
                if worker.sent and worker.sent[0].call.done():
                    return self._take(worker)
            return None

    def _take(self, worker: _ActorHandle) -> PendingBatch | None:
        pending = worker.sent[0]
        errors = self._ray.exceptions
        try:
            plain, data = pending.call.result()
        except errors.RayTaskError as error:  # of Ray's own work in the actor, such as storing the batch
            lost = BatchLostError(f"a Ray actor could not send a batch: {error}")
            pending.reply = BatchReply(ReplyKind.ERROR, RemoteError(lost))
        except errors.RayError as error:
            self._handle_death(worker, error)
            return None
        else:
            worker.has_replied = True
            pending.reply = BatchReply.from_plain(plain)
            self._count(pending.reply.counters)
            self._open(pending.reply, data)
        worker.sent.popleft()
        pending.call = None  # frees the object
        return pending

    def _open(self, reply: BatchReply, data: Any) -> None:
        """Copy a batch out of the object store."""
        if reply.kind is not ReplyKind.BATCH:
            return
        packed = reply.payload
        try:
            buffer: Any = b""
            if data is not None:
                self._buffers.begin()
                buffer = self._buffers.allocate(data.nbytes)
                self._buffers.end()
                buffer[:] = data
            reply.payload = unpack(packed, buffer, packed.small_bytes)
        except Exception as error:  # noqa: BLE001  # fails only this batch
            reply.kind, reply.payload = ReplyKind.ERROR, RemoteError(error)

    def expect_open(self) -> None:
        """Raise LoaderClosedError if the pool or Ray was closed, WorkerDiedError if a worker died."""
        super().expect_open()
        if not self._ray.is_initialized():
            raise LoaderClosedError("ray.shutdown() has ended the workers of this iterator")

    def wait(self, worker_id: int | None, deadline: float | None) -> None:
        """Wait until a worker has replied or died, or `close` was called."""
        until_s = time.monotonic() + limit_s(deadline)
        with contextlib.suppress(TimeoutError):  # to look whether Ray was closed
            self._wakes.wait(until_s)

    def _handle_death(self, worker: _ActorHandle, error: Exception) -> None:
        """Replace a dead actor, or raise an error."""
        pending, text = worker.sent[0], " ".join(str(error).split())  # Ray says where it ran
        text = text if len(text) <= _CAUSE_CHARACTERS else text[:_CAUSE_CHARACTERS] + "..."
        cause = (
            f"worker {worker.id} ended: {text}. It was working on batch {pending.number}, index "
            f"{short_repr(pending.index)}, or had made it. num_workers=0 runs the same code in this process."
        )
        if not self._restarts_left:
            self._note_death("Ray actor", cause)
            self.close(0.0)
            raise WorkerDiedError(self._death)
        self._use_restart(cause)
        self._ray.kill(worker.actor)  # it can be alive on a machine that cannot be reached
        new = self._workers[worker.id] = self._start(worker.id)
        new.begin = worker.begin
        new.actor.begin_epoch.remote(*new.begin)
        for pending in worker.sent:
            self._send(new, pending)
        if worker.exit is not None:
            new.finish()

    def close(self, grace_s: float = GRACE_S) -> None:
        """End the actors and free their batches; batches that the caller holds stay valid.

        If an exception interrupts this call, the actors are killed immediately.

        Args:
            grace_s: How long they can take to finish their current sample.
        """
        self._is_closed = True
        if not self.is_ours:
            return
        self._wakes.wake()  # a caller can be waiting in another thread
        with self._lock:
            workers, self._workers = self._workers, []
            try:
                if self._ray.is_initialized():
                    self._end(workers, grace_s)
            finally:
                self._plan_reference = None
                self._buffers.clear()

    def _end(self, workers: list[_ActorHandle], grace_s: float) -> None:
        try:
            for worker in workers:
                for pending in worker.sent:
                    self._ray.cancel(pending.call.object_ref)  # those that have not begun
            exits = [
                worker.finish() for worker in workers if worker.has_replied
            ]  # the others may wait for CPUs
            if exits and grace_s:
                self._ray.wait(exits, num_returns=len(exits), timeout=grace_s)
        finally:
            for worker in workers:
                self._ray.kill(worker.actor)
