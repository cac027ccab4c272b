"""Start, feed, watch and stop worker processes. Runs in the parent, and owns every process, pipe and slot.

The pool does not know samplers and epochs: it takes tasks for a worker and returns the worker's answers, in
the order of the tasks. Rules:

1. Only this process keeps state about tasks and slots; workers share nothing with each other.
2. If a task gets no free slot, or a message finds the pipe full, it waits here and is sent later.
3. If a worker ends while it is needed, an error is raised within moments: the pool watches its process
   instead of waiting for a timeout.
4. close() may be called at any time, in any state, from any thread, and again after it was interrupted. In a
   forked child it only closes descriptors and takes no lock: a thread that does not exist there may have held
   the lock at the fork.
5. Answers are matched to tasks by their serial number. If an answer cannot be received or opened, an error is
   raised at the turn of its task; other tasks are not affected.
6. An exception from a signal handler may end `take`. The next call continues from there, because a task or an
   answer leaves its queue only after the pool has recorded the current step.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import select
import signal
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.batch.iterable_state import LOST
from fastload.batch.packing import unpack
from fastload.device.registered import RegisteredSlots, has_host_leaves
from fastload.errors import BatchLostError, LoaderClosedError, WorkerDiedError, add_note
from fastload.memory.lease import Memory
from fastload.memory.ring import SlotState
from fastload.memory.segment import Segment
from fastload.system.cgroups import oom_kills
from fastload.system.limits import too_many_files
from fastload.system.logs import log
from fastload.system.sent_error import SentError
from fastload.workers.channel import Channel, make_channel
from fastload.workers.death_message import death_message
from fastload.workers.job import Job, PickledJob, pickle_job
from fastload.workers.process import WorkerProcess, WorkerView, wait_for_all
from fastload.workers.starting import check_start, start_helpers
from fastload.workers.task import Task
from fastload.workers.worker import Begin, Fetch, Kind, Reply
from fastload.workers.workers import Workers

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

    from fastload.batch.iterable_state import IterableState
    from fastload.batch.replacing import BatchId
    from fastload.device.cuda import Backend
    from fastload.memory.ring import Ring, Slot
    from fastload.rng.sample_streams import StreamOrigin
    from fastload.workers.channel import Received
    from fastload.workers.tally import Tally

# A worker gets time to finish its current sample; then it gets SIGTERM, and then SIGKILL.
_GRACE_S = 5.0
_TERMINATE_S = 1.0
# After a death the caller waits for the error, and the batches of other workers are lost anyway.
_GRACE_AFTER_DEATH_S = 0.2
# How often a waiting caller checks its workers; a check costs little.
_WATCH_INTERVAL_S = 5.0


class _WorkerHandle:
    """The parent's state of one worker."""

    def __init__(self, process: WorkerProcess, channel: Channel) -> None:
        self.process = process
        self.channel = channel
        self.waiting: deque[Task] = deque()  # tasks without a slot
        self.sent: deque[Task] = deque()  # in the order of their answers; tasks before the caller's are done
        # What a new worker in its place begins with: the state is that of the last answer.
        self.begin = Begin(None, None)
        self.began_at = 0  # the number of the message that began the epoch
        self.loaded_at = 0  # the number of its last message with a state: answers before it do not count


class Pool(Workers):
    """The worker processes of one iterator, from `start` on.

    Args:
        job: Their job.
        context: The multiprocessing context that starts them.
        ring: The state of their slots.
        tally: Counts their work; other pools may share it.
        num_restarts: How many dead workers may be replaced; their unfinished tasks are done again.
    """

    def __init__(
        self, job: Job, context: BaseContext, ring: Ring, tally: Tally, *, num_restarts: int = 0
    ) -> None:
        self.ring = ring
        self._tally = tally
        self.registered: RegisteredSlots | None = None  # set while a device reads slots in place
        self.lock = threading.RLock()  # between the consumer's thread and the thread that pins batches
        self._closing = threading.RLock()
        self._pid = os.getpid()
        self._serials = itertools.count(1)  # of messages to workers
        self._workers: list[_WorkerHandle] = []
        self.processes: list[WorkerView] = []  # stays after close()
        self._is_closed = False
        self._death = ""  # the error message, if the pool closed because workers died
        self._context = context
        self._job: Job | PickledJob = job  # in the form that is sent to workers
        self._restarts_left = num_restarts
        self._oom_kills = oom_kills()

    def start(self) -> None:
        """Start the workers.

        Raises:
            WorkerStartError: Processes cannot be started from here.
        """
        job, method = self._job, self._context.get_start_method()
        if isinstance(job, PickledJob):
            raise AssertionError("the workers are started once")
        check_start(job, method)
        if method != "fork":
            start_helpers(method)
            self._job = pickle_job(job)
        for worker_id in range(job.num_workers):
            self._start(worker_id)
        if not self._restarts_left and isinstance(self._job, PickledJob):
            self._job.close()

    def _start(self, worker_id: int) -> _WorkerHandle:
        """Start a worker, or a new one instead of a dead one."""
        ours, theirs = make_channel()
        worker = _WorkerHandle(WorkerProcess(worker_id, self._context), ours)
        self._workers[worker_id : worker_id + 1] = [worker]  # before it starts: close() ends it in any case
        worker.process.start(self._job, theirs, [other.channel for other in self._workers])
        self.processes[worker_id : worker_id + 1] = [WorkerView(worker.process)]
        return worker

    @property
    def is_ours(self) -> bool:
        """Whether this process started the workers."""
        return os.getpid() == self._pid

    @property
    def pids(self) -> list[int]:
        """The workers' process ids, by worker number."""
        return [worker.process.pid for worker in self._workers]

    def submit(
        self,
        worker_id: int,
        number: int,
        index: Any,
        origin: StreamOrigin | None = None,
        batch_id: BatchId | None = None,
    ) -> None:
        """Give a worker its next task; never blocks."""
        with self.lock:
            self.expect_open()
            worker = self._workers[worker_id]
            worker.waiting.append(Task(number, index, origin, batch_id))
            self._feed(worker, worker_id)

    def begin_epoch(self, epoch: int | None, dataset_states: list[IterableState] | None) -> None:
        """Send the message of an epoch; answers to older tasks still arrive first, and are dropped."""
        with self.lock:
            for worker_id, worker in enumerate(self._workers):
                for task in [*worker.sent, *worker.waiting]:
                    task.is_stale = True
                while worker.waiting and worker.waiting[0].slot is None:
                    worker.waiting.popleft()  # never sent to a worker
                message = Begin(epoch, None if dataset_states is None else dataset_states[worker_id])
                self._begin(worker, worker_id, message)

    def _begin(self, worker: _WorkerHandle, worker_id: int, message: Begin) -> None:
        serial, state = next(self._serials), message.dataset_state
        if state is None or state.has_state or worker.begin.dataset_state is None:
            worker.begin, worker.loaded_at = message, serial
        else:  # the copy of a persistent worker keeps its state
            worker.begin = worker.begin._replace(epoch=message.epoch)
        worker.began_at = serial
        self._send(worker, worker_id, message, serial)

    def take(self, worker_id: int, number: int, timeout_s: float) -> Task:
        """The answer; a batch is a view of its slot, lent to the caller, or a copy when slots are scarce."""
        task = self._answered(worker_id, number, timeout_s)
        if task.kind is None:
            try:
                kind, payload = self._open(task)
            except Exception as error:  # noqa: BLE001  # fails only this batch; raised in order
                kind, payload = Kind.ERROR, SentError(error)
            task.payload = payload
            task.kind = kind
            task.lease = None
        with self.lock:
            self._give_back(task)
        return task

    def _open(self, task: Task) -> tuple[Kind, Any]:
        """The kind and payload of a task's answer. A second call changes nothing but the slot's state."""
        slot, reply = task.slot, task.reply
        if slot is None or reply is None:
            raise AssertionError("an answered task has a slot and a reply")
        task.dataset_state = reply.dataset_state
        task.failed = reply.failed
        if reply.kind is Kind.ERROR:
            return Kind.ERROR, reply.error
        packed = reply.packed
        if packed is None:
            return reply.kind, None
        task.size = reply.work.num_samples, packed.used_bytes
        with self.lock:
            if not packed.used_bytes or slot.memory is None:
                return reply.kind, unpack(packed, b"")
            if task.lease is None:
                task.lease = slot.memory.lease()
            batch = unpack(packed, task.lease)
            if slot.state is SlotState.LENT:
                return reply.kind, batch  # an earlier call lent it, and a signal interrupted that call
            # A prefetcher passes host leaves on to its caller, who must never see registered (pinned) slots.
            is_private = self.registered is not None and has_host_leaves(packed, batch)
            if self.registered is not None and not is_private:
                self.registered.add(slot.memory, (other.memory for other in self.ring.slots))
            if not is_private:
                if self.ring.lend(slot):
                    return reply.kind, batch
                self._tally.add_copy()
            del batch
        copy = np.array(np.frombuffer(task.lease, np.uint8, packed.used_bytes))
        return reply.kind, unpack(packed, copy)

    def _give_back(self, task: Task) -> None:
        """Free the slot of an opened task, unless its batch was lent."""
        slot = task.slot
        if slot is not None and slot.serial == task.serial and slot.state is SlotState.READY:
            self.ring.release(slot)

    def _answered(self, worker_id: int, number: int, timeout_s: float) -> Task:
        """The task of this number, once its answer is there and its slot is READY."""
        deadline = time.monotonic() + timeout_s if timeout_s else None
        while True:
            with self.lock:
                self.expect_open()
                worker = self._workers[worker_id]
                self._drop_done(worker, number)  # first, because `_feed` may use the slots that it frees
                for other_id, other in enumerate(self._workers):
                    self._feed(other, other_id)
                task = worker.sent[0] if worker.sent else None
                if task is not None and task.reply is not None:
                    return task
                received = worker.channel.peek()
                if received is not None:
                    self._accept(worker, received)
                    continue
            self._wait(worker, deadline)

    def _drop_done(self, worker: _WorkerHandle, number: int) -> None:
        """Forget tasks that the caller no longer needs, and answered tasks of an abandoned epoch."""
        while worker.sent:
            task = worker.sent[0]
            if not (task.is_stale and task.reply is not None) and (task.is_stale or task.number >= number):
                break
            self._give_back(task)
            worker.sent.popleft()

    def expect_open(self) -> None:
        """Raise LoaderClosedError if the pool was closed, WorkerDiedError if a worker died."""
        if self._death:
            raise WorkerDiedError(self._death)
        if self._is_closed:
            raise LoaderClosedError

    def _accept(self, worker: _WorkerHandle, received: Received) -> None:
        """Record an answer that has arrived; answers that should have come before it are lost."""
        for task in worker.sent:
            if task.serial < received.number and task.reply is None:
                self._lose(worker, task, "the answer to it never arrived")
            elif task.serial == received.number and task.reply is None:
                self._fill(worker, task, received)
        worker.channel.take_out()  # also an answer that was recorded before a signal interrupted this method

    def _note_state(self, worker: _WorkerHandle, task: Task, state: IterableState | None) -> None:
        """Note where a new worker would go on; answers to tasks older than a loaded state change nothing."""
        if state is not None and worker.begin.dataset_state is not None and task.serial > worker.loaded_at:
            worker.begin = worker.begin._replace(dataset_state=state)

    def _fill(self, worker: _WorkerHandle, task: Task, received: Received) -> None:
        if received.is_cut:
            self._lose(worker, task, f"its memory could not be received, {too_many_files()}")
        else:
            try:
                reply, memory = Reply.of_plain(received.load()), None
            except Exception as error:  # an answer may contain indices, which are the user's objects
                if received.is_readable:
                    raise  # raised by a signal handler; the answer is still here for the next call
                self._lose(worker, task, f"the answer could not be unpickled: {error!r}")
                return
            if received.fd is not None:
                try:
                    memory = Memory(
                        Segment(received.fd, os.fstat(received.fd).st_size).map(writable=True), shared=True
                    )
                except (OSError, MemoryError, ValueError) as error:
                    is_limit = getattr(error.__cause__, "errno", None) == errno.EMFILE
                    self._lose(worker, task, f"{error}, {too_many_files()}" if is_limit else str(error))
                    return
            self._note_state(worker, task, reply.dataset_state)
            self.ring.fill(_slot_of(task), memory)
            task.reply = reply
            self._tally.add(reply.work)

    def _lose(self, worker: _WorkerHandle, task: Task, reason: str) -> None:
        """Make the answer to a task an error; the worker then makes new memory for the task's slot."""
        error = BatchLostError(f"a batch was lost on its way from a worker: {reason}")
        slot = _slot_of(task)
        if slot.state is SlotState.FILLING:
            self.ring.fill(slot, None)
        slot.memory = None
        self._note_state(worker, task, LOST)
        task.payload, task.kind, task.dataset_state = SentError(error), Kind.ERROR, LOST
        task.reply = Reply(Kind.ERROR)

    def _feed(self, worker: _WorkerHandle, worker_id: int) -> None:
        """Send the tasks that were waiting for a slot or for room in the pipe."""
        while worker.waiting:
            task = worker.waiting[0]
            if task.slot is None:
                task.slot = self.ring.acquire(worker_id)
            if task.slot is None:
                break
            if not task.serial:
                task.serial = next(self._serials)
            task.slot.serial = task.serial
            if not worker.sent or worker.sent[-1] is not task:
                worker.sent.append(task)
            message = Fetch(
                worker.began_at,
                task.slot.number,
                task.slot.memory is not None,
                self.ring.num_slots(worker_id),
                task.index,
                task.origin,
                task.batch_id,
            )
            self._send(worker, worker_id, message, task.serial, task)
            worker.waiting.popleft()
        if not worker.channel.is_flushed:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # _wait() notices and reports it
                worker.channel.flush()

    def _send(
        self,
        worker: _WorkerHandle,
        worker_id: int,
        message: Fetch | Begin,
        serial: int,
        task: Task | None = None,
    ) -> None:
        try:
            worker.channel.send(message.to_plain() if isinstance(message, Fetch) else message, number=serial)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the worker is gone: _wait() notices and reports it
        except Exception as error:
            if task is not None:
                add_note(
                    error,
                    f"fastload: the index of batch {task.number} could not be sent to worker {worker_id}",
                )
            self._is_closed = True  # the worker would never answer this task; the iterator ends the workers
            raise

    def _wait(self, worker: _WorkerHandle, deadline: float | None) -> None:
        """Wait until the worker has answered, a pipe has room, a worker has ended, or close() was called."""
        poller = select.poll()
        by_fd = {}
        with self.lock:
            self.expect_open()
            for worker_id, other in enumerate(self._workers):
                events = select.POLLIN if other is worker else 0
                if not other.channel.is_flushed:
                    events |= select.POLLOUT
                if events:
                    poller.register(other.channel, events)
                poller.register(other.process, select.POLLIN)
                by_fd[other.process.fileno()] = worker_id
        wait_s = _WATCH_INTERVAL_S
        if deadline is not None:
            wait_s = min(wait_s, deadline - time.monotonic())
            if wait_s <= 0:
                raise TimeoutError
        ready = poller.poll(wait_s * 1000)
        dead = [by_fd[fd] for fd, _ in ready if fd in by_fd]
        if dead:
            with self.lock:
                self.expect_open()  # workers that close() stopped are not dead workers
                if worker.channel.peek() is not None:
                    return
                if len(dead) <= self._restarts_left:
                    try:
                        for worker_id in dead:
                            self._replace(worker_id)
                    except BaseException:
                        self._is_closed = True  # no worker would ever answer its unfinished tasks
                        raise
                    return
                self._note_death(dead)
            self.close(_GRACE_AFTER_DEATH_S)  # expect_open() raises the error in the caller

    def _take_answers(self, worker: _WorkerHandle) -> None:
        """Record all answers of a dead worker, so that its first task without an answer ended it."""
        while (received := worker.channel.peek()) is not None:
            self._accept(worker, received)

    def _note_death(self, dead: list[int]) -> None:
        for worker_id in dead:
            self._take_answers(self._workers[worker_id])
        messages = [self._cause_of_death(worker_id) for worker_id in dead]
        pids = ", ".join(str(self._workers[worker_id].process.pid) for worker_id in dead)
        self._death = f"DataLoader worker (pid(s) {pids}) exited unexpectedly: " + " ".join(messages)
        log.error("%s", self._death)

    def _cause_of_death(self, worker_id: int) -> str:
        worker = self._workers[worker_id]
        task = next((task for task in worker.sent if task.reply is None), None)
        return death_message(worker_id, worker.process.exit_code(), task, oom_kills() - self._oom_kills)

    def _replace(self, worker_id: int) -> None:
        """Start a worker in place of a dead one, and give it the unanswered tasks."""
        worker = self._workers[worker_id]
        self._take_answers(worker)
        self._restarts_left -= 1
        log.warning(
            "%s A new worker reads its unfinished batches again; restart_workers allows %d more",
            self._cause_of_death(worker_id),
            self._restarts_left,
        )
        self._oom_kills = oom_kills()
        self.ring.forget(worker_id)  # the new process has none of its memory
        worker.channel.close()
        worker.process.clean_up()
        new = self._start(worker_id)
        self._tally.add_restart()
        self._begin(new, worker_id, worker.begin)
        new.sent.extend(task for task in worker.sent if task.reply is not None)
        for task in dict.fromkeys([*worker.sent, *worker.waiting]):
            if task.reply is None and not task.is_stale:
                new.waiting.append(Task(task.number, task.index, task.origin, task.batch_id))

    def let_read(self, backend: Backend, stream: Any) -> None:
        """Let a device read slots in place; the caller keeps each batch until the device has read it."""
        if self.registered is None or self.registered.stream is not stream:
            self.unregister()
            self.registered = RegisteredSlots(backend, stream)

    def unregister(self) -> None:
        """End reading of slots in place; waits for the copies in flight."""
        if self.registered is not None:
            self.registered.close()
            self.registered = None

    def close(self, grace_s: float | None = None) -> None:
        """Stop the workers and release all slots; batches that the caller holds stay valid.

        If an exception interrupts this call, the workers are killed immediately.

        Args:
            grace_s: How long workers may take to finish their current sample; None: the default time.
        """
        if not self.is_ours:
            self._is_closed = True
            for worker in self._workers:
                worker.channel.abandon()
                worker.process.abandon()
            if isinstance(self._job, PickledJob):
                self._job.close()
            return
        with self.lock:
            self._is_closed = True
            for worker in self._workers:
                worker.channel.close()  # ends a wait in another thread too
        with self._closing:
            processes = [worker.process for worker in self._workers]
            try:
                if not wait_for_all(processes, _GRACE_S if grace_s is None else grace_s):
                    for process in processes:
                        process.send_signal(signal.SIGTERM)
                    wait_for_all(processes, _TERMINATE_S)
            finally:
                for process in processes:
                    process.send_signal(signal.SIGKILL)
                wait_for_all(processes, _TERMINATE_S)
                for process in processes:
                    process.clean_up()
                with self.lock:
                    self._workers.clear()
                    self.ring.clear()
                    self.unregister()
                    if isinstance(self._job, PickledJob):
                        self._job.close()


def _slot_of(task: Task) -> Slot:
    if task.slot is None:
        raise AssertionError("a task that was sent has a slot")
    return task.slot
