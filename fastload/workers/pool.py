"""Start, feed, watch and stop worker processes. Runs in the parent, and owns every process, pipe and slot.

The pool knows nothing of samplers and epochs: it takes tasks for a worker and returns the worker's answers,
in the order of the tasks. Rules:

1. Only this process keeps state about tasks and slots; workers share nothing with each other.
2. If a task gets no free slot, or a message finds the pipe full, it waits here and is sent later.
3. If a worker dies while it is needed, an error is raised within moments: the pool watches its process
   instead of waiting for a timeout.
4. close() can be called at any time, in any state, from any thread, and again after it was interrupted. In a
   forked child it only closes descriptors and takes no lock: a thread that does not exist there might have
   held the lock at the fork.
5. Answers are matched to tasks by serial number. If an answer cannot be opened, an error is raised at the
   turn of its task; other tasks are unaffected. If its descriptors cannot be received, `take` raises.
6. An exception from a signal handler that interrupts `wait` changes nothing. After one that interrupts any
   other method, the owner closes the pool.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from fastload.errors import BatchLostError, LoaderClosedError, WorkerDiedError
from fastload.memory.lease import Memory
from fastload.memory.segment import Segment
from fastload.system.cgroups import oom_kills
from fastload.system.limits import too_many_files
from fastload.system.logs import log
from fastload.system.notes import add_note, short_repr
from fastload.workers.channel import Channel, make_channel
from fastload.workers.lending import Lender
from fastload.workers.messages import INTERRUPTED, Begin, Fetch, Task, Work, of_plain
from fastload.workers.process import WorkerProcess, check_start, start_helpers, wait_for_all
from fastload.workers.worker_spec import Job, PickledJob, pickle_job

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.context import BaseContext

    from fastload.batch.dataset_state import DatasetState
    from fastload.memory.ring import Ring
    from fastload.workers.channel import Received

# A worker gets time to finish its current sample; then it gets SIGTERM, and then SIGKILL.
_GRACE_S = 5.0
_TERMINATE_S = 1.0
# After a death the caller waits for the error, and the batches of other workers are lost anyway.
_GRACE_AFTER_DEATH_S = 0.2
# How often a waiting caller checks its workers; a check costs little.
_WATCH_INTERVAL_S = 5.0

_CAUSES: dict[int, str] = {
    signal.SIGKILL: "most often the kernel's out-of-memory killer or a container's memory limit",
    signal.SIGBUS: "memory ran out, or a memory-mapped file shrank",
    signal.SIGTERM: "it was terminated from outside",
}


class _WorkerHandle:
    """The parent's state of one worker."""

    def __init__(self, worker_id: int, process: WorkerProcess, channel: Channel) -> None:
        self.id = worker_id
        self.process = process
        self.channel = channel
        self.waiting: deque[Task] = deque()  # tasks without a slot
        self.sent: deque[Task] = deque()  # in the order of their answers, until `take` returns them
        # What a replacement begins with: the state is that of the last answer.
        self.begin = Begin(None, None)
        self.loaded_at = 0  # answers to tasks with lower serial numbers precede that state
        self.gets_no_more = False  # tasks; the worker ends on its own

    @property
    def has_answer(self) -> bool:
        """Whether the first task is answered."""
        return bool(self.sent) and self.sent[0].answer is not None

    @property
    def is_done(self) -> bool:
        """Whether nothing more is expected of the worker, so its end is no error."""
        return self.gets_no_more and not self.waiting and all(task.answer is not None for task in self.sent)


class Pool(Lender):
    """The worker processes of one iterator, from `start` on.

    Args:
        job: Their job.
        context: The multiprocessing context that starts them.
        ring: The state of their slots.
        note_work: Called with their work.
        num_restarts: How many dead workers can be replaced; their unfinished tasks are done again.
    """

    def __init__(
        self,
        job: Job,
        context: BaseContext,
        ring: Ring,
        note_work: Callable[[Work], None],
        *,
        num_restarts: int = 0,
    ) -> None:
        super().__init__(ring, note_work)
        self.lock = threading.RLock()  # between the consumer's thread and the thread that pins batches
        self._closing = threading.RLock()
        self._pid = os.getpid()
        self._serials = itertools.count(1)  # of messages to workers
        self._workers: list[_WorkerHandle] = []
        self.processes: list[Any] = []  # multiprocessing's objects; stays after close()
        self._is_closed = False
        self._death = ""  # the error message, if the pool closed because workers died
        self._context = context
        self._job: Job | PickledJob = job  # in the form sent to workers
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
        check_start(method)
        if method != "fork":
            start_helpers(method)
            self._job = pickle_job(job)
        for worker_id in range(job.num_workers):
            self._start(worker_id)
        if not self._restarts_left:
            self._job.close()

    def _start(self, worker_id: int) -> _WorkerHandle:
        """Start a worker, or a new one instead of a dead one."""
        ours, theirs = make_channel()
        worker = _WorkerHandle(worker_id, WorkerProcess(worker_id, self._context), ours)
        self._workers[worker_id : worker_id + 1] = [worker]  # before it starts: close() stops it in any case
        worker.process.start(self._job, theirs, [other.channel for other in self._workers])
        self.processes[worker_id : worker_id + 1] = [worker.process.process]
        return worker

    @property
    def is_ours(self) -> bool:
        """Whether this process started the workers."""
        return os.getpid() == self._pid

    def submit(self, worker_id: int, task: Task) -> None:
        """Give a worker its next task; never blocks."""
        with self.lock:
            self.expect_open()
            worker = self._workers[worker_id]
            worker.waiting.append(task)
            self._feed(worker)

    def finish(self, worker_id: int) -> None:
        """Let a worker exit when it has done its tasks: there are no more.

        So it exits while the caller computes: a process that has mapped gigabytes takes a tenth of a second
        to exit, for which `close` would wait.
        """
        with self.lock:
            self.expect_open()
            worker = self._workers[worker_id]
            worker.gets_no_more = True
            self._feed(worker)

    def begin_epoch(self, epoch: int | None, dataset_states: list[DatasetState] | None) -> None:
        """Send the message of an epoch; answers to older tasks still arrive first, and are dropped."""
        with self.lock:
            for worker in self._workers:
                for task in worker.sent:
                    task.is_stale = True
                worker.waiting.clear()
                self._begin(
                    worker, Begin(epoch, None if dataset_states is None else dataset_states[worker.id])
                )

    def _begin(self, worker: _WorkerHandle, message: Begin) -> None:
        state = message.dataset_state
        if state is None or state.has_state or worker.begin.dataset_state is None:
            worker.begin, worker.loaded_at = message, next(self._serials)
        else:  # the copy of a persistent worker keeps its state
            worker.begin = worker.begin._replace(epoch=message.epoch)
        self._send(worker, message, 0)

    def take(self, worker_id: int) -> Task | None:
        """The next answered task; a batch is a view of its slot, lent to the caller, or a copy."""
        with self.lock:
            self.expect_open()
            worker = self._workers[worker_id]
            while True:
                while worker.has_answer and worker.sent[0].is_stale:
                    self._give_back(worker.sent.popleft())
                for other in self._workers:
                    self._feed(other)
                if worker.has_answer:
                    task = worker.sent.popleft()
                    self._open(task)
                    return task
                received = worker.channel.receive()
                if received is None:
                    return None
                self._accept(worker, received)

    @property
    def was_interrupted(self) -> bool:
        """Whether Ctrl-C has ended a worker."""
        processes = [worker.process for worker in self._workers]
        return any(process.has_ended and process.exitcode == INTERRUPTED for process in processes)

    def expect_open(self) -> None:
        """Raise LoaderClosedError if the pool was closed, WorkerDiedError if a worker died."""
        if self._death:
            raise WorkerDiedError(self._death)
        if self._is_closed:
            raise LoaderClosedError

    def _accept(self, worker: _WorkerHandle, received: Received) -> None:
        """Record an answer that has arrived."""
        for task in worker.sent:
            if task.serial == received.number and task.answer is None:
                self._fill(worker, task, received)
        received.close()

    def _fill(self, worker: _WorkerHandle, task: Task, received: Received) -> None:
        if received.is_cut:
            raise BatchLostError(f"the memory of a batch could not be received, {too_many_files()}")
        try:
            answer, memory = of_plain(received.load()), None
        except Exception as error:  # of an index, which is the user's object
            where = f"the answer to batch {task.number} of worker {worker.id}"
            add_note(error, f"fastload: raised while {where} was unpickled")
            raise
        if received.fd is not None:
            try:
                segment = Segment(received.fd, os.fstat(received.fd).st_size)
                memory = Memory(segment.map(writable=True), shared=True)
            except (OSError, MemoryError, ValueError) as error:
                raise BatchLostError(f"the memory of a batch could not be received: {error}") from error
        state, begin = answer.dataset_state, worker.begin
        # Answers to tasks older than a loaded state do not say where a new worker would continue.
        if state is not None and begin.dataset_state is not None and task.serial > worker.loaded_at:
            worker.begin = begin._replace(dataset_state=state)
        if task.slot is not None:
            self.ring.fill(task.slot, memory)
        self._note_work(answer.work)
        task.answer = answer

    def _feed(self, worker: _WorkerHandle) -> None:
        """Send the tasks that waited for a slot or for room in the pipe."""
        while worker.waiting:
            slot = self.ring.acquire(worker.id)
            if slot is None:
                break
            task = worker.waiting.popleft()
            task.slot, task.serial = slot, next(self._serials)
            worker.sent.append(task)
            num_slots = self.ring.num_slots(worker.id)
            has_memory = slot.memory is not None
            message = Fetch(slot.number, has_memory, num_slots, task.index, task.key)
            try:
                self._send(worker, tuple(message), task.serial)
            except Exception as error:
                add_note(
                    error,
                    f"fastload: the index of batch {task.number} could not be sent to worker {worker.id}",
                )
                raise
        if not worker.channel.is_flushed:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # wait() notices and reports it
                worker.channel.flush()
        if worker.gets_no_more and not worker.waiting and worker.channel.is_flushed:
            worker.channel.finish()

    def _send(self, worker: _WorkerHandle, message: Any, serial: int) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # as above
            worker.channel.send(message, number=serial)

    def wait(self, worker_id: int, deadline: float | None) -> None:
        """Wait until the worker has answered, a pipe has room, a worker has died, or close() was called."""
        poller = select.poll()
        by_fd = {}
        with self.lock:
            if self._is_closed:
                return
            for other in self._workers:
                events = select.POLLIN if other.id == worker_id else 0
                if not other.channel.is_flushed:
                    events |= select.POLLOUT
                if events:
                    poller.register(other.channel, events)
                if not other.is_done:
                    poller.register(other.process, select.POLLIN)
                    by_fd[other.process.fileno()] = other
        wait_s = _WATCH_INTERVAL_S
        if deadline is not None:
            wait_s = min(wait_s, deadline - time.monotonic())
            if wait_s <= 0:
                raise TimeoutError
        ready = poller.poll(wait_s * 1000)
        dead = [by_fd[fd] for fd, _ in ready if fd in by_fd]
        if dead:
            with self.lock:
                if not self._is_closed:  # workers that close() stopped are not dead workers
                    self._bury(worker_id, dead)
            if self._death:
                self.close(_GRACE_AFTER_DEATH_S)  # `take` raises the error

    def _bury(self, worker_id: int, dead: list[_WorkerHandle]) -> None:
        """Replace dead workers, or note their death, unless the caller's answer has arrived."""
        try:
            for worker in {self._workers[worker_id], *dead}:
                while (received := worker.channel.receive()) is not None:
                    self._accept(worker, received)
            dead = [worker for worker in dead if not worker.is_done]
            if self._workers[worker_id].has_answer or not dead:
                return
            if len(dead) <= self._restarts_left:
                for worker in dead:
                    self._replace(worker)
                return
            causes = " ".join(map(self._cause_of_death, dead))
        except BaseException:
            self._is_closed = True  # no worker would ever answer the unfinished tasks
            raise
        pids = ", ".join(str(worker.process.process.pid) for worker in dead)
        self._death = f"DataLoader worker (pid(s) {pids}) exited unexpectedly: {causes}"
        log.error("%s", self._death)

    def _cause_of_death(self, worker: _WorkerHandle) -> str:
        """How a worker ended, the likely cause, and what it was doing."""
        code = worker.process.exitcode
        num_oom_kills = oom_kills() - self._oom_kills
        if code is None:
            how = "ended, and other code in this program took its exit code (os.wait(), a SIGCHLD handler)"
        elif code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            how = f"was killed by {name} ({_CAUSES.get(-code, 'native code crashed; see stderr')})"
            if -code == signal.SIGKILL and num_oom_kills > 0:
                how += f"; memory.events of the cgroup counts {num_oom_kills} more out-of-memory kills"
        elif code == INTERRUPTED:
            how = (
                f"exited with code {code} (terminals and notebooks send Ctrl-C to the workers too; "
                "the next loop over the loader starts new ones)"
            )
        else:
            how = (
                f"exited with code {code} (user code called sys.exit() or os._exit(), or the process could "
                "not start: see stderr, and check that the script has an `if __name__ == '__main__':` guard)"
            )
        task = next((task for task in worker.sent if task.answer is None), None)
        doing = "had no unfinished batch"
        if task is not None:
            doing = f"was working on batch {task.number}, index {short_repr(task.index)}"
        return f"worker {worker.id} {how}. It {doing}. num_workers=0 runs the same code in this process."

    def _replace(self, worker: _WorkerHandle) -> None:
        """Replace a dead worker, and give the new one the unanswered tasks."""
        self._restarts_left -= 1
        log.warning(
            "%s A new worker reads its unfinished batches again; max_worker_restarts allows %d more",
            self._cause_of_death(worker),
            self._restarts_left,
        )
        self._oom_kills = oom_kills()
        self.ring.forget(worker.id)  # the new process has none of its memory
        worker.channel.close()
        worker.process.clean_up()
        new = self._start(worker.id)
        self._note_work(Work(num_restarts=1))
        self._begin(new, worker.begin)
        new.gets_no_more = worker.gets_no_more
        for task in [*worker.sent, *worker.waiting]:
            if task.answer is not None:
                new.sent.append(task)
            elif not task.is_stale:
                new.waiting.append(task)

    def close(self, grace_s: float | None = None) -> None:
        """Stop the workers and release all slots; batches that the caller holds stay valid.

        If an exception interrupts this call, the workers are killed immediately.

        Args:
            grace_s: How long workers can take to finish their current sample; None: the default time.
        """
        if not self.is_ours:
            self._is_closed = True
            for worker in self._workers:
                worker.channel.abandon()
                worker.process.abandon()
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
                    self._job.close()
