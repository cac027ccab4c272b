"""Worker actors of a Ray cluster instead of worker processes: `worker_type="ray"`.

Importing this file does not import Ray. Each worker is one actor, which runs a `BatchMaker`; its batches are
packed bytes in Ray's object store. Rules:

1. A task is one call of a method, and Ray makes the calls of one actor in order. The caller gives each worker
   at most `prefetch_factor` tasks, and the next one after `take`, which frees the object of the batch. So no
   more objects are alive.
2. All tasks that have ended are fetched to this machine before their turn. `take` copies a batch once, into a
   slot, which is lent as those of worker processes are.
3. Ray ends the actors with the job that made them. `close` asks them to exit, and kills the others.
4. Ray does not restart actors or repeat tasks: a new actor would not have the state of the old one.
   `max_worker_restarts` replaces a dead one, and all batches of it that were not taken are made again.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.batch.packing import Packer, pack, unpack
from fastload.batch.read_ahead import reads_ahead
from fastload.errors import (
    BatchLostError,
    FastloadError,
    LoaderClosedError,
    SharedMemoryError,
    WorkerDiedError,
    WorkerStartError,
)
from fastload.memory.lease import BufferPool, shared_memory
from fastload.memory.segment import pickled_for_other_machines
from fastload.system import remote_error
from fastload.system.budget import parse_prefetch_memory
from fastload.system.logs import log, say_once
from fastload.system.notes import add_note, short_repr
from fastload.system.remote_error import RemoteError
from fastload.workers.batch_maker import BatchMaker
from fastload.workers.lending import Lender
from fastload.workers.messages import Answer, Begin, Kind, Task, Work, of_plain, to_plain
from fastload.workers.worker_spec import Job, explain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from fastload.batch.dataset_state import DatasetState
    from fastload.batch.packing import Packed
    from fastload.memory.ring import Ring
    from fastload.rng.keys import BatchKey

_GRACE_S = 5.0  # for workers to finish their current sample
_WATCH_INTERVAL_S = 5.0  # how often a waiting caller looks whether its worker has started
_REACH_S = 5.0  # for a cluster to accept a connection
_START_LIMIT_S = 30.0  # for an actor whose machine has what it asks for
_BUFFERS = 2  # of an actor: Ray copies a batch before the next task
_CAUSE = 700  # characters of Ray's own text about the end of an actor
_AHEAD = "ahead"  # the concurrency group in which indices arrive while a batch is made

_START = (
    "start one with 'ray start --head' and set RAY_ADDRESS=auto, or pass "
    'worker_type=fastload.RayWorkers(address="HOST:PORT"), or "local" for a cluster of this machine alone'
)


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


class _Handle:
    """This process's state of one worker."""

    def __init__(self, worker_id: int, actor: Any, place: Any) -> None:
        self.id = worker_id
        self.actor = actor
        self.place = place  # the reference of where it runs; known once it has started
        self.sent: deque[tuple[Task, Any]] = deque()  # with the references of their answers
        self.begin = Begin(None, None)  # as in `pool`
        self.end: Any = None  # the reference of its exit; set once it was asked to


class RayPool(Lender):
    """The worker actors of one iterator, from `start` on.

    Args:
        job: Their job.
        ring: The state of the slots of this process, all of one worker.
        note_work: Called with the work of the actors.
        num_restarts: How many dead actors can be replaced.
        options: The options of its `RayWorkers`.

    Raises:
        ImportError: Ray is not installed.
        WorkerStartError: There is no cluster, or none was named.
    """

    def __init__(
        self,
        job: Job,
        ring: Ring,
        note_work: Callable[[Work], None],
        *,
        num_restarts: int,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(ring, note_work)
        self.processes: list[Any] = []
        self.lock = threading.RLock()  # between the consumer's thread and the thread that pins batches
        self._pid = os.getpid()
        self._is_closed = False
        self._death = ""
        self._restarts_left = num_restarts
        self._workers: list[_Handle] = []
        self._began_s = time.monotonic()
        self._all_started = False
        self._local: set[Any] = set()  # references of answers that are on this machine
        self._job: Any = job  # until it has a reference in the object store
        self._reads_ahead = reads_ahead(job.dataset)
        self._ray = connect(options)
        self._class = self._class_with(options)

    def _class_with(self, options: Mapping[str, Any]) -> Any:
        """The class of the actors, with the options with which Ray places them.

        Raises:
            ValueError: Ray has no such option.
        """
        given = {name: value for name, value in options.items() if name != "address"}
        context = self._ray.get_runtime_context()
        if given.pop("exclude_driver_node", False):
            given["label_selector"] = {
                "ray.io/node-id": f"!{context.get_node_id()}",
                **given.get("label_selector", {}),
            }
        group = given.pop("placement_group", None)
        if group is not None:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            given["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group)
        elif not context.should_capture_child_tasks_in_placement_group:
            given.setdefault("scheduling_strategy", "SPREAD")
        given = {"num_cpus": 1, **given, "max_restarts": 0, "max_task_retries": 0}
        self._demand = {"CPU": given["num_cpus"] or 0, **(given.get("resources") or {})}
        groups = {_AHEAD: 1} if self._reads_ahead else None
        try:
            return self._ray.remote(concurrency_groups=groups)(RayWorker).options(**given)
        except (ValueError, TypeError) as error:
            raise ValueError(f"RayWorkers has an option that Ray does not accept: {error}") from error

    def start(self) -> None:
        """Put the job into the object store, and start the actors; does not wait for them.

        Raises:
            Exception: The error of pickle, with a note that names the attribute that cannot be pickled.
        """
        job = self._job
        try:
            with pickled_for_other_machines():
                self._job = self._ray.put(job)
        except Exception as error:
            advice = (
                "Ray pickles functions and classes of the script too, but no open files, connections and "
                "locks: open these in the worker, on first use."
            )
            add_note(error, explain(job, self._can_be_put, advice))
            raise
        for worker_id in range(job.num_workers):
            self._workers.append(self._start(worker_id))

    def _can_be_put(self, value: Any) -> bool:
        try:
            with pickled_for_other_machines():
                self._ray.cloudpickle.dumps(value)
        except Exception:  # noqa: BLE001  # any error means that it cannot be pickled
            return False
        return True

    def _start(self, worker_id: int) -> _Handle:
        # In a list, or Ray would load the job before the constructor, where an error would kill the actor.
        actor = self._class.remote(worker_id, [self._job], _release())
        return _Handle(worker_id, actor, actor.place.remote())

    @property
    def is_ours(self) -> bool:
        """Whether this process started the actors."""
        return os.getpid() == self._pid

    def submit(self, worker_id: int, task: Task) -> None:
        """Give a worker its next task."""
        with self.lock:
            self.expect_open()
            self._send(self._workers[worker_id], task)

    def _send(self, worker: _Handle, task: Task) -> None:
        try:
            if self._reads_ahead and worker.sent:
                worker.actor.announce.options(concurrency_group=_AHEAD).remote(task.index)
            reference = worker.actor.answer.remote(task.index, task.key)
        except Exception as error:
            text = f"fastload: the index of batch {task.number} could not be sent to worker {worker.id}"
            add_note(error, text)
            raise
        worker.sent.append((task, reference))

    def finish(self, worker_id: int) -> None:
        """Let an actor exit when it has done its tasks, which gives its CPUs back."""
        with self.lock:
            self.expect_open()
            self._finish(self._workers[worker_id])

    def _finish(self, worker: _Handle) -> None:
        worker.end = worker.end or worker.actor.__ray_terminate__.remote()

    def begin_epoch(self, epoch: int | None, dataset_states: list[DatasetState] | None) -> None:
        """Begin an epoch in each worker; the answers to older tasks are dropped."""
        with self.lock:
            for worker in self._workers:
                self._local.difference_update(reference for _, reference in worker.sent)
                worker.sent.clear()
                state = None if dataset_states is None else dataset_states[worker.id]
                self._begin(worker, Begin(epoch, state))

    def _begin(self, worker: _Handle, message: Begin) -> None:
        state = message.dataset_state
        if state is None or state.has_state or worker.begin.dataset_state is None:
            worker.begin = message
        else:  # the copy of a persistent worker keeps its state
            worker.begin = worker.begin._replace(epoch=message.epoch)
        worker.actor.begin_epoch.remote(*message)

    def take(self, worker_id: int) -> Task | None:
        """The next answered task; a batch is a view of a slot, lent to the caller, or a copy."""
        with self.lock:
            self.expect_open()
            worker = self._workers[worker_id]
            self._note_local(0.0)
            if not worker.sent or worker.sent[0][1] not in self._local:
                return None
            task, reference = worker.sent[0]
            errors = self._ray.exceptions
            try:
                plain, data = self._ray.get(reference)
            except errors.RayTaskError as error:  # of Ray's own work in the actor, such as storing the batch
                task.answer = Answer(Kind.ERROR, _lost(f"a Ray actor could not send a batch: {error}"))
            except errors.RayError as error:
                self._bury(worker, error)
                return None
            else:
                self._accept(worker, task, of_plain(plain), data)
            worker.sent.popleft()
            self._local.discard(reference)
            return task

    def _note_local(self, timeout_s: float) -> None:
        """Note which answers are on this machine; Ray begins to fetch those that exist elsewhere.

        Args:
            timeout_s: How long to wait for the first one.
        """
        with self.lock:
            sent = [reference for worker in self._workers for _, reference in worker.sent]
            awaited = [reference for reference in sent if reference not in self._local]
        if awaited:
            number = 1 if timeout_s else len(awaited)
            ready, _ = self._ray.wait(awaited, num_returns=number, timeout=timeout_s)
            with self.lock:
                self._local.update(ready if self._workers else ())

    def _accept(self, worker: _Handle, task: Task, answer: Answer, data: Any) -> None:
        """Record an answer, and copy its batch out of the object store."""
        if answer.dataset_state is not None and worker.begin.dataset_state is not None:
            worker.begin = worker.begin._replace(dataset_state=answer.dataset_state)
        self._note_work(answer.work)
        task.answer = answer
        if answer.kind is not Kind.BATCH:
            return
        slot = self.ring.acquire(0)
        if slot is None:  # the caller keeps all batches that were lent
            self._note_work(Work(num_copies=1))
            answer.nbytes = answer.payload.used_bytes
            answer.payload = unpack(answer.payload, b"" if data is None else np.array(data))
            return
        memory = slot.memory
        try:
            if data is not None and (memory is None or memory.nbytes < data.nbytes):
                memory = shared_memory(data.nbytes)
        except SharedMemoryError as error:
            answer.kind, answer.payload = Kind.ERROR, _lost(f"there is no memory for a batch: {error}")
        else:
            if data is not None and memory is not None:
                np.frombuffer(memory.lease(), np.uint8, data.nbytes)[:] = data
        self.ring.fill(slot, memory)
        task.slot = slot
        self._open(task)

    def expect_open(self) -> None:
        """Raise LoaderClosedError if the pool or Ray was closed, WorkerDiedError if a worker died."""
        if self._death:
            raise WorkerDiedError(self._death)
        if self._is_closed:
            raise LoaderClosedError
        if not self._ray.is_initialized():
            raise LoaderClosedError("ray.shutdown() has ended the workers of this iterator")

    def wait(self, worker_id: int, deadline: float | None) -> None:
        """Wait until a worker has answered or died, or `close` was called."""
        wait_s = _WATCH_INTERVAL_S
        if deadline is not None:
            wait_s = min(wait_s, deadline - time.monotonic())
            if wait_s <= 0:
                raise TimeoutError
        workers = self._workers
        if self._is_closed or not workers:
            return
        self._note_local(wait_s)
        if not self._all_started and time.monotonic() - self._began_s >= _WATCH_INTERVAL_S:
            self._say_unplaced(workers[worker_id])

    def _has_started(self, worker: _Handle) -> bool:
        return bool(self._ray.wait([worker.place], timeout=0)[0])

    def _say_unplaced(self, worker: _Handle) -> None:
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

    def _bury(self, worker: _Handle, error: Exception) -> None:
        """Replace a dead actor, or raise an error."""
        cause = self._cause_of_death(worker, error)
        if not self._restarts_left:
            self._death = f"DataLoader worker (Ray actor) exited unexpectedly: {cause}"
            log.error("%s", self._death)
            self.close(0.0)
            raise WorkerDiedError(self._death)
        self._restarts_left -= 1
        log.warning(
            "%s A new worker reads its unfinished batches again; max_worker_restarts allows %d more",
            cause,
            self._restarts_left,
        )
        self._ray.kill(worker.actor)  # it can be alive on a machine that cannot be reached
        new = self._workers[worker.id] = self._start(worker.id)
        self._note_work(Work(num_restarts=1))
        self._begin(new, worker.begin)
        for task, reference in worker.sent:
            self._local.discard(reference)
            self._send(new, task)
        if worker.end is not None:
            self._finish(new)

    def _cause_of_death(self, worker: _Handle, error: Exception) -> str:
        """Where a worker ran, how it ended, and what it was doing."""
        try:
            place = " on {} ({}, process {})".format(*self._ray.get(worker.place, timeout=0))
        except Exception:  # noqa: BLE001  # it did not start, or nobody knows anymore
            place = ""
        text = " ".join(str(error).split())
        text = text if len(text) <= _CAUSE else text[:_CAUSE] + "..."
        task, _ = worker.sent[0]
        return (
            f"worker {worker.id}{place} ended: {text}. It was working on batch {task.number}, index "
            f"{short_repr(task.index)}, or had made it. num_workers=0 runs the same code in this process."
        )

    def close(self, grace_s: float = _GRACE_S) -> None:
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
                self._job = None
                self.ring.clear()
                self.unregister()

    def _end(self, workers: list[_Handle], grace_s: float) -> None:
        try:
            for worker in workers:
                for _, reference in worker.sent:
                    self._ray.cancel(reference)  # those that have not begun
            asked = [worker for worker in workers if self._has_started(worker)]
            for worker in asked:
                self._finish(worker)
            if asked and grace_s:
                self._ray.wait([one.end for one in asked], num_returns=len(asked), timeout=grace_s)
        finally:
            for worker in workers:
                self._ray.kill(worker.actor)


def _lost(text: str) -> RemoteError:
    return RemoteError(BatchLostError(text))


def _release() -> str:
    """The release of fastload in this process."""
    return str(getattr(sys.modules["fastload"], "__version__", "unknown"))


class RayWorker:
    """One worker; Ray calls its methods in an actor's process.

    Args:
        worker_id: Its number.
        job: A list with the reference of its job.
        release: The release of fastload that the consumer runs.
    """

    def __init__(self, worker_id: int, job: list[Any], release: str) -> None:
        import ray.cloudpickle

        class CloudPacker(Packer, ray.cloudpickle.Pickler):  # type: ignore[misc]
            """Packs batches with objects of classes that the script defines, which Ray has sent here."""

        remote_error.use_pickle(ray.cloudpickle)
        self._packer = CloudPacker
        self._buffers = BufferPool(parse_prefetch_memory("auto"), _BUFFERS)
        self._ahead: deque[Any] = deque()
        self._core = BatchMaker(worker_id, _PutJob(job, release), self._buffers, self._pack)
        self._core.begin()
        self._since_ns = time.perf_counter_ns()

    def place(self) -> tuple[str, str, int]:
        """The host, the address and the process of this worker."""
        import ray.util

        return socket.gethostname(), ray.util.get_node_ip_address(), os.getpid()

    def begin_epoch(self, epoch: int | None, dataset_state: DatasetState | None) -> None:
        """Begin an epoch; an error is the answer to its tasks."""
        self._core.begin_epoch(epoch, dataset_state)
        self._since_ns = time.perf_counter_ns()

    def announce(self, index: Any) -> None:
        """Note the index of a later task."""
        self._ahead.append(index)

    def answer(self, index: Any, key: BatchKey | None) -> tuple[tuple[Any, ...], Any]:
        """The answer to a task as built-in types, and the bytes of its batch; None without any."""
        self._core.meter.waited(self._since_ns)
        self._buffers.begin()
        answer = self._core.answer(index, key, self._coming())
        arena, data = self._buffers, None
        if answer.kind is Kind.BATCH and answer.payload.used_bytes:
            data = np.frombuffer(arena.lease, np.uint8, answer.payload.used_bytes)
        arena.end()
        self._since_ns = time.perf_counter_ns()
        return to_plain(answer), data

    def _coming(self) -> Iterator[Any]:
        with contextlib.suppress(IndexError):
            while True:
                yield self._ahead.popleft()

    def _pack(self, batch: Any) -> Packed:
        return pack(batch, self._buffers, self._packer)


class _PutJob:
    """A job in the object store; `BatchMaker` loads it."""

    def __init__(self, references: list[Any], release: str) -> None:
        self._references = references
        self._release = release

    def load(self) -> Job:
        """The job; large arrays in it are read-only views of memory that all workers of a node share.

        Raises:
            WorkerStartError: This machine has a different release of fastload, or cannot import a class.
            FastloadError: The worker cannot open a cache.
        """
        import ray

        host = socket.gethostname()
        if _release() != self._release:
            raise WorkerStartError(
                f"the consumer runs fastload {self._release}, but {host} has {_release()}: install the same "
                "release on all machines of the cluster"
            )
        try:
            job: Job = ray.get(self._references[0])
        except FastloadError:
            raise
        except Exception as error:
            cause = str(error).partition("\n")[0].removeprefix("System error: ")  # then Ray has a traceback
            raise WorkerStartError(
                f"a worker on {host} cannot unpickle the dataset, or what is sent with it: {cause}. Ray "
                "sends the code of the script itself, but no modules: install them on all machines, or pass "
                'ray.init(runtime_env={"working_dir": "."})'
            ) from error
        return job
