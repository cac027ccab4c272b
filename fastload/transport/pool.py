"""Start, feed, watch and stop workers. Runs in the parent, and owns every process, pipe and slot.

The pool knows nothing of samplers and epochs: it takes tasks for a worker and gives answers of a worker,
in the order in which the tasks were given. Rules:

1. Only this process keeps books; workers share nothing with each other.
2. A task that finds no free slot, or a message that finds its pipe full, waits here and is sent later.
3. A worker that ends while it is needed is an error within moments: its process is watched, not timed.
4. close() may be called at any time, from any state and thread, twice, and in a forked child, where it only
   lets go (and takes no lock: a thread that does not exist there may have held it at the fork).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.device.registered import RegisteredSlots
from fastload.errors import LoaderClosedError, WorkerDiedError
from fastload.transport.channel import Channel, make_channel
from fastload.transport.job import Job, PickledJob, pickle_job
from fastload.transport.memory import Memory
from fastload.transport.obituary import obituary
from fastload.transport.packing import has_leaves_that_stay, unpack
from fastload.transport.ring import SlotState
from fastload.transport.segment import Segment
from fastload.transport.starting import check_start, preload_forkserver
from fastload.transport.worker import Fetch, Kind, Reply, Restart, Setup, main

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

    from fastload.device.cuda import Backend
    from fastload.rng.draws import Draw
    from fastload.transport.ring import Ring, Slot
    from fastload.transport.stream_state import StreamState

# A worker may finish the sample it is at; then it is asked, then it is ended.
_GRACE_S = 5.0
_TERMINATE_S = 1.0
# After a death the caller waits for its error, and what the other workers are at is lost anyway.
_GRACE_AFTER_DEATH_S = 0.2
# One look at a pool of live processes costs less than this matters.
_WATCH_INTERVAL_S = 5.0


class Task:
    """A task that a worker has been given, or will be as soon as a slot is free."""

    __slots__ = ("dataset_state", "draw", "index", "is_stale", "number", "slot")

    def __init__(self, number: int, index: Any, draw: Draw | None) -> None:
        self.number = number
        self.index = index
        self.draw = draw
        self.slot: Slot | None = None
        self.dataset_state: StreamState | None = None  # of the worker's stream, after this task
        self.is_stale = False  # of an epoch that was left; its answer is dropped


class _WorkerHandle:
    """What the parent knows of one worker."""

    def __init__(self, process_: Any, channel: Channel) -> None:
        self.process = process_
        self.channel = channel
        self.waiting: deque[Task] = deque()  # no slot yet
        self.sent: deque[Task] = deque()  # in the order in which answers will come


class Pool:
    """The workers of one iterator.

    Args:
        job: What they do.
        context: The multiprocessing context that starts them.
        ring: The books of their slots.

    Raises:
        WorkerStartError: Processes cannot be started from here.
    """

    def __init__(self, job: Job, context: BaseContext, ring: Ring) -> None:
        self.ring = ring
        self.registered: RegisteredSlots | None = None  # where a device reads slots in place
        self.lock = threading.RLock()  # between the consumer's thread and the one that pins its batches
        self._pid = os.getpid()
        self._workers: list[_WorkerHandle] = []
        self._is_closed = False
        self._death = ""  # what was said of workers that died, if that closed the pool
        method = context.get_start_method()
        check_start(job, method)
        shipped: Job | PickledJob = job
        try:
            if method == "forkserver":
                preload_forkserver()
            if method != "fork":
                shipped = pickle_job(job)
            for worker_id in range(job.num_workers):
                self._start(worker_id, shipped, context, is_fork=method == "fork")
        except BaseException:
            self.close()
            raise
        finally:
            if isinstance(shipped, PickledJob):
                shipped.close()

    def _start(self, worker_id: int, job: Job | PickledJob, context: BaseContext, *, is_fork: bool) -> None:
        ours, theirs = make_channel()
        inherited = [*(worker.channel for worker in self._workers), ours] if is_fork else []
        setup = Setup(worker_id, job, theirs, os.getpid(), inherited)
        process_ = context.Process(  # type: ignore[attr-defined]  # typeshed's BaseContext lacks it
            target=main, args=(setup,), name=f"fastload-worker-{worker_id}", daemon=True
        )
        # Ctrl-C while a forked worker is on its way to our code would print a traceback of multiprocessing's:
        # it waits until the worker is where it can leave without a word.
        held_back = {signal.SIGINT} if is_fork else set()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, held_back)
        try:
            process_.start()
        except BaseException:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.socket.close()
        self._workers.append(_WorkerHandle(process_, ours))

    @property
    def is_ours(self) -> bool:
        """Whether this process started the workers, and not one that was forked from it."""
        return os.getpid() == self._pid

    @property
    def pids(self) -> list[int]:
        """The workers' process ids, by worker number."""
        return [worker.process.pid for worker in self._workers]

    def submit(self, worker_id: int, number: int, index: Any, draw: Draw | None = None) -> None:
        """Give a worker its next task; never blocks."""
        with self.lock:
            self.expect_open()
            worker = self._workers[worker_id]
            worker.waiting.append(Task(number, index, draw))
            self._feed(worker, worker_id)

    def restart(self, epoch: int | None, dataset_states: list[StreamState] | None) -> None:
        """Tell all workers that a new epoch begins; answers to older tasks still come first.

        Args:
            epoch: Its number, for datasets that have a set_epoch(); None if the user never set one.
            dataset_states: Where each worker's stream goes on, if it does.
        """
        with self.lock:
            for worker_id, worker in enumerate(self._workers):
                worker.waiting.clear()  # no worker has seen these
                for task in worker.sent:
                    task.is_stale = True
                state = None if dataset_states is None else dataset_states[worker_id]
                self._send(worker, worker_id, Restart(epoch, state))

    def take(self, worker_id: int, timeout_s: float) -> tuple[Task, Kind, Any]:
        """The worker's answer to its oldest task, and the batch or the error that it brings.

        A batch is a view of its slot, lent to the caller, or a private copy when slots are scarce.

        Args:
            worker_id: The worker whose answer is due.
            timeout_s: How long to wait; 0 waits for ever.

        Raises:
            TimeoutError, WorkerDiedError, LoaderClosedError: See `receive`.
        """
        task, reply = self.receive(worker_id, timeout_s)
        task.dataset_state = reply.dataset_state
        slot = task.slot
        if slot is None:
            raise AssertionError("an answered task has a slot")
        try:
            return task, reply.kind, self._open(slot, reply)
        except Exception as error:  # noqa: BLE001  # it has cost this batch, and comes at its turn
            with self.lock:
                if slot.state is SlotState.READY:
                    self.ring.release(slot)
            return task, Kind.ERROR, error

    def _open(self, slot: Slot, reply: Reply) -> Any:
        """What a READY slot holds, or what the reply brings without it."""
        packed = reply.packed
        with self.lock:
            if packed is None or not packed.used_bytes or slot.memory is None:
                self.ring.release(slot)
                if reply.kind is Kind.ERROR:
                    return load_error(reply)
                return None if packed is None else unpack(packed, b"")
            lease = slot.memory.lease()
            batch = unpack(packed, lease)
            # What a prefetcher passes on as it is goes to its caller, who shall have nothing registered.
            is_private = self.registered is not None and has_leaves_that_stay(packed, batch)
            if self.registered is not None and not is_private:
                self.registered.add(slot.memory, (other.memory for other in self.ring.slots))
            if not is_private and self.ring.lend(slot):
                return batch
            del batch
        copy = np.array(np.frombuffer(lease, np.uint8, packed.used_bytes))
        with self.lock:
            self.ring.release(slot)
        return unpack(packed, copy)

    def receive(self, worker_id: int, timeout_s: float) -> tuple[Task, Reply]:
        """The worker's answer to its oldest task; the task's slot is READY.

        Args:
            worker_id: The worker whose answer is due.
            timeout_s: How long to wait; 0 waits for ever.

        Raises:
            TimeoutError: No answer came in time.
            WorkerDiedError: A worker has ended.
            LoaderClosedError: The pool was closed.
        """
        deadline = time.monotonic() + timeout_s if timeout_s else None
        while True:
            with self.lock:
                self.expect_open()
                worker = self._workers[worker_id]
                for other_id, other in enumerate(self._workers):
                    self._feed(other, other_id)
                received = worker.channel.receive()
                if received is not None:
                    task, reply = self._accept(worker, *received)
                    if not task.is_stale:
                        return task, reply
                    if task.slot is not None:
                        self.ring.release(task.slot)
                    continue
            self._wait(worker, deadline)

    def expect_open(self) -> None:
        """Do nothing while answers may still come.

        Raises:
            WorkerDiedError: A worker has died; the thread that pins batches may have found out first.
            LoaderClosedError: The pool was closed.
        """
        if self._death:
            raise WorkerDiedError(self._death)
        if self._is_closed:
            raise LoaderClosedError

    def _accept(self, worker: _WorkerHandle, reply: Reply, fd: int | None) -> tuple[Task, Reply]:
        task = worker.sent.popleft()
        memory = None
        if fd is not None:
            segment = Segment.attach(fd)
            try:
                memory = Memory(segment.map(writable=True), shared=True)
            finally:
                segment.close()
        if task.slot is None or task.number != reply.task:
            raise AssertionError(f"expected the answer to task {task.number}, got that to {reply.task}")
        self.ring.fill(task.slot, memory)
        return task, reply

    def _feed(self, worker: _WorkerHandle, worker_id: int) -> None:
        """Send what has been waiting for a slot or for room in the pipe."""
        while worker.waiting:
            slot = self.ring.acquire(worker_id)
            if slot is None:
                break
            task = worker.waiting.popleft()
            task.slot = slot
            worker.sent.append(task)
            message = Fetch(
                task.number,
                slot.number,
                slot.memory is not None,
                self.ring.num_slots(worker_id),
                task.index,
                task.draw,
            )
            self._send(worker, worker_id, message)
        else:
            # receive() finds out about a worker that is gone, and says so.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                worker.channel.flush()

    def _send(self, worker: _WorkerHandle, worker_id: int, message: Fetch | Restart) -> None:
        try:
            worker.channel.send(message)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the worker is gone: receive() finds out why and says so
        except Exception as error:
            if isinstance(message, Fetch):
                error.add_note(
                    f"fastload: the index of batch {message.task} could not be sent to worker {worker_id}"
                )
            self.close()  # the worker would never answer this task
            raise

    def _wait(self, worker: _WorkerHandle, deadline: float | None) -> None:
        """Wait until the worker has answered, some pipe has room, some worker has ended, or close()."""
        poller = select.poll()
        sentinels = {}
        with self.lock:
            self.expect_open()
            for worker_id, other in enumerate(self._workers):
                events = select.POLLIN if other is worker else 0
                if not other.channel.is_flushed:
                    events |= select.POLLOUT
                if events:
                    poller.register(other.channel, events)
                poller.register(other.process.sentinel, select.POLLIN)
                sentinels[other.process.sentinel] = worker_id
        wait_s = _WATCH_INTERVAL_S
        if deadline is not None:
            wait_s = min(wait_s, deadline - time.monotonic())
            if wait_s <= 0:
                raise TimeoutError
        ready = poller.poll(wait_s * 1000)
        dead = [sentinels[fd] for fd, _ in ready if fd in sentinels]
        if dead:
            with self.lock:
                self.expect_open()  # workers that were stopped are no deaths
                if not worker.channel.has_message():
                    self._report_death(dead)

    def _report_death(self, dead: list[int]) -> None:
        messages = []
        for worker_id in dead:
            worker = self._workers[worker_id]
            worker.process.join(_TERMINATE_S)
            task = worker.sent[0] if worker.sent else None
            messages.append(obituary(worker_id, worker.process.exitcode, task))
        pids = ", ".join(str(self._workers[worker_id].process.pid) for worker_id in dead)
        self._death = f"DataLoader worker (pid(s) {pids}) exited unexpectedly: " + " ".join(messages)
        self.close(_GRACE_AFTER_DEATH_S)
        raise WorkerDiedError(self._death)

    def let_read(self, backend: Backend, stream: Any) -> None:
        """From now on a device reads slots in place, for a caller that keeps each batch until it was read."""
        if self.registered is None or self.registered.stream is not stream:
            self.unregister()
            self.registered = RegisteredSlots(backend, stream)

    def unregister(self) -> None:
        """From now on no slot is read in place; waits for the copies that are under way."""
        if self.registered is not None:
            self.registered.close()
            self.registered = None

    def close(self, grace_s: float | None = None) -> None:
        """Stop the workers and let go of all slots; batches that the caller holds stay valid.

        Args:
            grace_s: How long workers may finish the sample they are at; None: as long as they usually may.
        """
        if not self.is_ours:
            self._is_closed = True
            for worker in self._workers:
                worker.channel.abandon()
            return
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
            for worker in self._workers:
                worker.channel.close()  # ends a wait in another thread too
        grace_s = _GRACE_S if grace_s is None else grace_s
        for limit_s, end in ((grace_s, "terminate"), (_TERMINATE_S, "kill"), (_TERMINATE_S, None)):
            deadline = time.monotonic() + limit_s
            for worker in self._workers:
                worker.process.join(max(deadline - time.monotonic(), 0.0))
            if end is not None:
                for worker in self._workers:
                    if worker.process.is_alive():
                        getattr(worker.process, end)()
        with self.lock:
            for worker in self._workers:
                with contextlib.suppress(ValueError):  # it outlived SIGKILL: in uninterruptible sleep
                    worker.process.close()
            self._workers.clear()
            self.ring.clear()
            self.unregister()


def load_error(reply: Reply) -> Any:
    """The ExceptionWrapper that an error reply brings."""
    if reply.error is None:
        raise AssertionError("only error replies bring an error")
    return pickle.loads(reply.error)
