"""Worker actors of a Ray cluster instead of worker processes: `worker_type="ray"`.

Importing this file does not import Ray. Each worker is one actor (see `ray_worker`); its batches are packed
bytes in Ray's object store. Rules:

1. A request is one call of a method, and Ray makes the calls of one actor in order. The caller gives each
   worker at most `prefetch_factor` requests, and the next one after `take`, which frees the object of the
   batch. So no more objects are alive.
2. All replies that exist are fetched to this machine before their turn. `take` copies a batch once, into a
   slot, which is lent as those of worker processes are.
3. Ray ends the actors with the job that made them. `close` asks them to exit, and kills the others.
4. Ray does not restart actors or repeat calls: a new actor would not have the state of the old one.
   `max_worker_restarts` replaces a dead one, and all batches of it that were not taken are made again.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.batch.packing import unpack
from fastload.errors import (
    BatchLostError,
    LoaderClosedError,
    SharedMemoryError,
    WorkerDiedError,
    WorkerStartError,
)
from fastload.memory.lease import shared_memory
from fastload.memory.ring import Ring
from fastload.memory.segment import pickled_for_other_machines
from fastload.system.logs import say_once
from fastload.system.notes import add_note, short_repr
from fastload.system.remote_error import RemoteError
from fastload.version import __version__
from fastload.workers.messages import BatchReply, BeginEpoch, ReplyKind, WorkerCounters
from fastload.workers.pool import GRACE_S, asked
from fastload.workers.ray_worker import RayWorker
from fastload.workers.sent_plan import explain
from fastload.workers.slot_pool import WATCH_INTERVAL_S, SlotPool, WorkerHandle, limit_s

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fastload.batch.plan import Plan
    from fastload.workers.messages import PendingBatch

_REACH_S = 5.0  # for a cluster to accept a connection
_START_LIMIT_S = 30.0  # for an actor whose machine has what it asks for
_CAUSE_CHARACTERS = 700  # of Ray's own text about the end of an actor

_START = (
    "start one with 'ray start --head' and set RAY_ADDRESS=auto, or pass "
    'worker_type=fastload.RayWorkers(address="HOST:PORT"), or "local" for a cluster of this machine alone'
)


_CHOSEN_RAY_OPTIONS = frozenset(
    {
        *("name", "namespace", "get_if_exists", "lifetime", "max_restarts", "max_task_retries"),
        *("max_concurrency", "concurrency_groups", "max_pending_calls"),
    }
)


@dataclass(frozen=True, init=False)
class RayWorkers:
    """Worker actors on a Ray cluster, for `DataLoader(worker_type=RayWorkers(num_cpus=2))`.

    ``worker_type="ray"`` is `RayWorkers()`.

    Args:
        address: The cluster to connect to, unless `ray.init()` has; ``"local"`` starts one on this machine.
            None is that of ``RAY_ADDRESS``.
        **actor_options: Options of Ray's actors, such as ``num_cpus=2`` (1 by default) or
            ``resources={"decoders": 1}``.

    Raises:
        ValueError: fastload chooses this option itself.
    """

    options: Mapping[str, Any]

    def __init__(self, *, address: str | None = None, **actor_options: Any) -> None:
        chosen = sorted(_CHOSEN_RAY_OPTIONS.intersection(actor_options))
        if chosen:
            raise ValueError(
                f"RayWorkers cannot have {', '.join(chosen)}, because fastload chooses how actors are named, "
                "restarted and called; max_worker_restarts allows restarts"
            )
        object.__setattr__(self, "options", {"address": address, **actor_options})

    def __repr__(self) -> str:
        given = [f"{name}={value!r}" for name, value in self.options.items() if value is not None]
        return f"fastload.RayWorkers({', '.join(given)})"


def connect(options: Mapping[str, Any]) -> Any:
    """The module of Ray, connected to a cluster.

    Args:
        options: The options of its `RayWorkers`.

    Raises:
        ImportError: Ray is not installed.
        WorkerStartError: There is no cluster, or none was named.
    """
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise ImportError(
            'worker_type="ray" needs Ray, which is not installed: pip install "fastload-torch[ray]"'
        ) from error
    if ray.is_initialized():
        return ray
    address = options.get("address") or os.environ.get("RAY_ADDRESS")
    if not address:
        raise WorkerStartError(f'worker_type="ray" needs a Ray cluster, but none was named: {_START}')
    if address.startswith("ray://"):
        raise WorkerStartError(
            f"{address!r} is the address of a Ray Client, which has no object store: run this program on a "
            "machine of the cluster, for example with 'ray job submit'"
        )
    try:
        _reach(address)
        ray.init(address=address, logging_level="warning")
    except ConnectionError as error:
        raise WorkerStartError(f"there is no Ray cluster at {address!r}: {_START}") from error
    return ray


def _reach(address: str) -> None:
    """Check that something listens at HOST:PORT; Ray itself would try for minutes.

    Raises:
        ConnectionError: Nothing does.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
        except OSError as error:
            raise ConnectionError(str(error)) from error


class _ActorHandle(WorkerHandle):
    """This process's state of one actor."""

    def __init__(self, worker_id: int, actor: Any, place: Any) -> None:
        super().__init__(worker_id)
        self.actor = actor
        self.place = place  # the reference of where it runs; known once it has started
        self.exit: Any = None  # the reference of its exit; set once it was asked to


class RayPool(SlotPool[_ActorHandle]):
    """The worker actors of one iterator; see `WorkerPool`.

    Raises:
        ImportError: Ray is not installed.
        WorkerStartError: There is no cluster, or none was named.
    """

    runs_elsewhere = True

    def __init__(
        self, plan: Plan, count: Callable[[WorkerCounters], None], pin: Callable[[Any], Any] | None = None
    ) -> None:
        # The slots are this process's, all of one worker; one batch at a time is copied into them.
        super().__init__(plan, count, Ring(1, 1, plan.max_bytes))
        self._began_s = time.monotonic()
        self._all_started = False
        self._local: set[Any] = set()  # references of replies that are on this machine
        self._plan_reference: Any = None  # of the plan in the object store
        options = plan.worker_type.options if isinstance(plan.worker_type, RayWorkers) else {}
        self._ray = connect(options)
        self._class = self._class_with(options)
        if not plan.is_persistent:
            say_once(
                "each epoch starts its Ray actors again, which takes seconds, and loses the caches in RAM of "
                "other machines: persistent_workers=True keeps both"
            )

    def _class_with(self, options: Mapping[str, Any]) -> Any:
        """The class of the actors, with the options with which Ray places them.

        Raises:
            ValueError: Ray has no such option.
        """
        given = {name: value for name, value in options.items() if name != "address"}
        if not self._ray.get_runtime_context().should_capture_child_tasks_in_placement_group:
            given.setdefault("scheduling_strategy", "SPREAD")
        given = {"num_cpus": 1, **given, "max_restarts": 0, "max_task_retries": 0}
        self._demand = {"CPU": given["num_cpus"] or 0, **(given.get("resources") or {})}
        try:
            return self._ray.remote(RayWorker).options(**given)
        except (ValueError, TypeError) as error:
            raise ValueError(f"RayWorkers has an option that Ray does not accept: {error}") from error

    def start(self) -> None:
        """Put the plan into the object store, and start the actors; does not wait for them.

        Raises:
            Exception: The error of pickle, with a note that names the attribute that cannot be pickled.
        """
        try:
            with pickled_for_other_machines():
                self._plan_reference = self._ray.put(self._plan)
        except Exception as error:
            advice = (
                "Ray pickles functions and classes of the script too, but no open files, connections and "
                "locks: open these in the worker, on first use."
            )
            add_note(error, explain(self._plan, self._can_be_put, advice))
            raise
        for worker_id in range(self._plan.num_workers):
            self._workers.append(self._start(worker_id))

    def _can_be_put(self, value: Any) -> bool:
        try:
            with pickled_for_other_machines():
                self._ray.cloudpickle.dumps(value)
        except Exception:  # noqa: BLE001  # any error means that it cannot be pickled
            return False
        return True

    def _start(self, worker_id: int) -> _ActorHandle:
        # In a list, or Ray would load the plan before the constructor, where an error would kill the actor.
        actor = self._class.remote(worker_id, [self._plan_reference], __version__)
        return _ActorHandle(worker_id, actor, actor.place.remote())

    def submit(self, pending: PendingBatch) -> None:
        """Request a batch from its worker."""
        with self.lock:
            self.expect_open()
            self._send(self._workers[pending.worker], pending)

    def _send(self, worker: _ActorHandle, pending: PendingBatch) -> None:
        try:
            reference = worker.actor.make.remote(pending.index, pending.key)
        except Exception as error:
            self._note_unsent(error, pending, worker)
            raise
        pending.reference = reference
        worker.sent.append(pending)

    def finish(self, worker_id: int) -> None:
        """Let an actor exit when it has replied to its requests, which gives its CPUs back."""
        with self.lock:
            self.expect_open()
            self._finish(self._workers[worker_id])

    def _finish(self, worker: _ActorHandle) -> None:
        worker.exit = worker.exit or worker.actor.__ray_terminate__.remote()

    def _drop_requests(self, worker: _ActorHandle) -> None:
        self._local.difference_update(pending.reference for pending in worker.sent)
        worker.sent.clear()

    def _begin(self, worker: _ActorHandle, message: BeginEpoch) -> None:
        worker.begin_epoch(message)
        worker.actor.begin_epoch.remote(*message)

    def take(self, worker_id: int | None) -> PendingBatch | None:
        """The worker's next batch with its reply, as a view of a slot or a copy; None: no reply yet."""
        with self.lock:
            self.expect_open()
            self._note_local(0.0)
            for worker in asked(self._workers, worker_id):
                if worker.sent and worker.sent[0].reference in self._local:
                    return self._take(worker)
            return None

    def _take(self, worker: _ActorHandle) -> PendingBatch | None:
        pending = worker.sent[0]
        errors = self._ray.exceptions
        try:
            plain, data = self._ray.get(pending.reference)
        except errors.RayTaskError as error:  # of Ray's own work in the actor, such as storing the batch
            text = f"a Ray actor could not send a batch: {error}"
            pending.reply = BatchReply(ReplyKind.ERROR, _lost(text))
        except errors.RayError as error:
            self._handle_death(worker, error)
            return None
        else:
            self._accept(worker, pending, BatchReply.from_plain(plain), data)
        worker.sent.popleft()
        self._local.discard(pending.reference)
        pending.reference = None  # frees the object
        return pending

    def _note_local(self, timeout_s: float) -> None:
        """Note which replies are on this machine; Ray begins to fetch those that exist elsewhere.

        Args:
            timeout_s: How long to wait for the first one.
        """
        with self.lock:
            sent = [pending.reference for worker in self._workers for pending in worker.sent]
            awaited = [reference for reference in sent if reference not in self._local]
        if awaited:
            number = 1 if timeout_s else len(awaited)
            ready, _ = self._ray.wait(awaited, num_returns=number, timeout=timeout_s)
            with self.lock:
                self._local.update(ready if self._workers else ())

    def _accept(self, worker: _ActorHandle, pending: PendingBatch, reply: BatchReply, data: Any) -> None:
        """Record a reply, and copy its batch out of the object store."""
        worker.note_state(reply.dataset_state)
        self._count(reply.counters)
        pending.reply = reply
        if reply.kind is not ReplyKind.BATCH:
            return
        slot = self.ring.acquire(0)
        if slot is None:  # the caller keeps all batches that were lent
            self._count(WorkerCounters(num_copies=1))
            reply.nbytes = reply.payload.nbytes
            reply.payload = unpack(reply.payload, b"" if data is None else data, max_copied_bytes=sys.maxsize)
            return
        memory = slot.memory
        try:
            if data is not None and (memory is None or memory.nbytes < data.nbytes):
                memory = shared_memory(data.nbytes)
        except SharedMemoryError as error:
            reply.kind, reply.payload = ReplyKind.ERROR, _lost(f"there is no memory for a batch: {error}")
        else:
            if data is not None and memory is not None:
                np.frombuffer(memory.lease(), np.uint8, data.nbytes)[:] = data
        self.ring.fill(slot, memory, 0 if data is None else data.nbytes)
        pending.slot = slot
        self._open(pending)

    def expect_open(self) -> None:
        """Raise LoaderClosedError if the pool or Ray was closed, WorkerDiedError if a worker died."""
        super().expect_open()
        if not self._ray.is_initialized():
            raise LoaderClosedError("ray.shutdown() has ended the workers of this iterator")

    def wait(self, worker_id: int | None, deadline: float | None) -> None:
        """Wait until a worker has replied or died, or `close` was called."""
        wait_s = limit_s(deadline)
        workers = self._workers
        if self._is_closed or not workers:
            return
        self._note_local(wait_s)
        if not self._all_started and time.monotonic() - self._began_s >= WATCH_INTERVAL_S:
            self._say_unplaced(workers[worker_id or 0])

    def _has_started(self, worker: _ActorHandle) -> bool:
        return bool(self._ray.wait([worker.place], timeout=0)[0])

    def _say_unplaced(self, worker: _ActorHandle) -> None:
        if self._has_started(worker):
            self._all_started = all(map(self._has_started, self._workers))
            return
        total, free = self._ray.cluster_resources(), self._ray.available_resources()
        is_slow = time.monotonic() - self._began_s > _START_LIMIT_S
        if is_slow or any(free.get(name, 0) < number for name, number in self._demand.items()):
            say_once(
                f"worker {worker.id} waits for the Ray cluster to start it. CPUs: {total.get('CPU', 0):g}, "
                f"free: {free.get('CPU', 0):g}; {len(self._workers)} workers were asked for. Use fewer "
                "workers, or ask for less in fastload.RayWorkers"
            )

    def _handle_death(self, worker: _ActorHandle, error: Exception) -> None:
        """Replace a dead actor, or raise an error."""
        cause = self._cause_of_death(worker, error)
        if not self._restarts_left:
            self._note_death("Ray actor", cause)
            self.close(0.0)
            raise WorkerDiedError(self._death)
        self._use_restart(cause)
        self._ray.kill(worker.actor)  # it can be alive on a machine that cannot be reached
        new = self._workers[worker.id] = self._start(worker.id)
        self._count(WorkerCounters(num_restarts=1))
        self._begin(new, worker.begin)
        for pending in worker.sent:
            self._local.discard(pending.reference)
            self._send(new, pending)
        if worker.exit is not None:
            self._finish(new)

    def _cause_of_death(self, worker: _ActorHandle, error: Exception) -> str:
        """Where a worker ran, how it ended, and what it was doing."""
        try:
            place = " on {} ({}, process {})".format(*self._ray.get(worker.place, timeout=0))
        except Exception:  # noqa: BLE001  # it did not start, or nobody knows anymore
            place = ""
        text = " ".join(str(error).split())
        text = text if len(text) <= _CAUSE_CHARACTERS else text[:_CAUSE_CHARACTERS] + "..."
        pending = worker.sent[0]
        return (
            f"worker {worker.id}{place} ended: {text}. It was working on batch {pending.number}, index "
            f"{short_repr(pending.index)}, or had made it. num_workers=0 runs the same code in this process."
        )

    def close(self, grace_s: float = GRACE_S) -> None:
        """End the actors and free their batches; batches that the caller holds stay valid.

        If an exception interrupts this call, the actors are killed immediately.

        Args:
            grace_s: How long they can take to finish their current sample.
        """
        self._is_closed = True
        if not self.is_ours:
            return
        with self.lock:
            workers, self._workers = self._workers, []
            try:
                if self._ray.is_initialized():
                    self._end(workers, grace_s)
            finally:
                self._local.clear()
                self._plan_reference = None
                self.ring.clear()
                self.stop_reading_slots()

    def _end(self, workers: list[_ActorHandle], grace_s: float) -> None:
        try:
            for worker in workers:
                for pending in worker.sent:
                    self._ray.cancel(pending.reference)  # those that have not begun
            running = [worker for worker in workers if self._has_started(worker)]
            for worker in running:
                self._finish(worker)
            if running and grace_s:
                exits = [worker.exit for worker in running]
                self._ray.wait(exits, num_returns=len(exits), timeout=grace_s)
        finally:
            for worker in workers:
                self._ray.kill(worker.actor)


def _lost(text: str) -> RemoteError:
    return RemoteError(BatchLostError(text))
