"""Start, feed, watch and stop worker processes. Runs in the parent, and owns every process, pipe and slot.

Only this process keeps state about batches and slots; workers share nothing with each other. An exception
from a signal handler that interrupts `wait` changes nothing. After one that interrupts any other method, the
owner closes the pool.
"""

from __future__ import annotations

import select
import signal
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import multiprocessing

from fastload.batch.packing import restore, unpack, views
from fastload.device.registered import RegisteredSlots, hides_tensors
from fastload.errors import BatchLostError
from fastload.memory.lease import Memory
from fastload.memory.ring import Ring, SlotState
from fastload.memory.segment import Segment
from fastload.system.notes import short_repr
from fastload.system.remote_error import RemoteError
from fastload.system.worker_memory import memory_to_keep
from fastload.workers.channel import make_channel
from fastload.workers.messages import (
    BatchReply,
    BeginEpoch,
    FetchRequest,
    ReplyKind,
    WorkerCounters,
)
from fastload.workers.pool import GRACE_S, WorkerHandle, WorkerPool, asked, limit_s, note_unsent
from fastload.workers.process import WorkerProcess, start_helpers, wait_for_all
from fastload.workers.sent_plan import PickledPlan, pickle_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.batch.dataset_state import DatasetState
    from fastload.batch.packing import Packed
    from fastload.batch.plan import Plan
    from fastload.device.devices import Backend
    from fastload.memory.ring import Slot
    from fastload.workers.channel import Channel
    from fastload.workers.messages import PendingBatch

# After GRACE_S, a worker gets SIGTERM, and then SIGKILL.
_TERMINATE_S = 1.0
# After a death the caller waits for the error, and the batches of other workers are lost anyway.
_GRACE_AFTER_DEATH_S = 0.2

_CAUSES: dict[int, str] = {
    signal.SIGKILL: "most often the kernel's out-of-memory killer or a container's memory limit",
    signal.SIGBUS: "memory ran out, or a memory-mapped file shrank",
    signal.SIGTERM: "it was terminated from outside",
}


class _ProcessHandle(WorkerHandle):
    """The parent's state of one worker process."""

    def __init__(self, worker_id: int, process: WorkerProcess, channel: Channel) -> None:
        super().__init__(worker_id)
        self.process = process
        self.channel = channel
        # What waits for a slot, or for room in the pipe: requests, before them perhaps a new epoch.
        self.waiting: deque[PendingBatch | BeginEpoch] = deque()
        self.gets_no_more = False  # requests; the worker ends on its own

    @property
    def oldest(self) -> PendingBatch | None:
        """The request that the worker replies to next; it may wait to be sent."""
        waiting = (one for one in self.waiting if not isinstance(one, BeginEpoch))
        return super().oldest or next(waiting, None)

    @property
    def is_done(self) -> bool:
        """Whether nothing more is expected of the worker, so its end is no error."""
        return (
            self.gets_no_more and not self.waiting and all(pending.reply is not None for pending in self.sent)
        )


class ProcessPool(WorkerPool):
    """The worker processes of one iterator; see `WorkerPool`.

    The bytes of a batch lie in a slot. The caller gets tensors that view the slot, which is lent until the
    last of them is gone, or a copy.
    """

    uses_multiprocessing = True

    def __init__(
        self, plan: Plan, count: Callable[[WorkerCounters], None], pin: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__(plan, count)
        self.ring = Ring(plan.num_workers, plan.prefetch_factor, plan.max_bytes)
        self.registered: RegisteredSlots | None = None  # set while a device reads slots in place
        self._workers: list[_ProcessHandle] = []
        self._lock = threading.RLock()  # between the consumer's thread and the thread that pins batches
        self._context = plan.context or multiprocessing.get_context()
        self._sent_plan: Plan | PickledPlan = plan  # in the form that workers get
        self._closing = threading.RLock()

    def start(self) -> None:
        """Start the workers.

        Raises:
            WorkerStartError: Processes cannot be started from here.
        """
        method = self._context.get_start_method()
        self._plan.kept_bytes = memory_to_keep(self._plan.num_workers)
        if method != "fork":
            start_helpers(method)
            self._sent_plan = pickle_plan(self._plan)
        for worker_id in range(self._plan.num_workers):
            self._start(worker_id)
        if not self._restarts_left:
            self._sent_plan.close()

    def _start(self, worker_id: int) -> _ProcessHandle:
        """Start a worker, or a new one instead of a dead one."""
        channel, worker_end = make_channel()
        worker = _ProcessHandle(worker_id, WorkerProcess(worker_id, self._context), channel)
        self._workers[worker_id : worker_id + 1] = [worker]  # before it starts: close() stops it in any case
        worker.process.start(self._sent_plan, worker_end, [other.channel for other in self._workers])
        self.processes[worker_id : worker_id + 1] = [worker.process.process]
        return worker

    def submit(self, pending: PendingBatch) -> None:
        """Request a batch from its worker; never blocks."""
        with self._lock:
            self.expect_open()
            worker = self._workers[pending.worker]
            worker.waiting.append(pending)
            self._feed(worker)

    def finish(self, worker_id: int) -> None:
        """Let a worker exit when it has replied to its requests: there are no more."""
        with self._lock:
            self.expect_open()
            worker = self._workers[worker_id]
            worker.gets_no_more = True
            self._feed(worker)

    def begin_epoch(self, epoch: int | None, dataset_states: list[DatasetState] | None) -> None:
        """Begin an epoch in each worker; replies to older requests are dropped."""
        with self._lock:
            for worker in self._workers:
                for pending in worker.sent:  # the worker still replies to them first
                    pending.is_stale = True
                worker.waiting.clear()
                worker.waiting.append(worker.begin_epoch(epoch, dataset_states))
                self._feed(worker)

    def take(self, worker_id: int | None) -> PendingBatch | None:
        """The worker's next batch with its reply, or that of any; None if it has not replied yet."""
        with self._lock:
            self.expect_open()
            for worker in self._workers:
                if worker.waiting:
                    self._feed(worker)
            for worker in asked(self._workers, worker_id):
                pending = self._take(worker)
                if pending is not None:
                    return pending
            return None

    def _take(self, worker: _ProcessHandle) -> PendingBatch | None:
        while True:
            while worker.has_reply and worker.sent[0].is_stale:
                self._free_slot(worker.sent.popleft())
            if worker.waiting:
                self._feed(worker)
            if worker.has_reply:
                pending = worker.sent.popleft()
                self._open(pending)
                return pending
            received = worker.channel.receive()
            if received is None:
                return None
            self._accept(worker, *received)

    def _accept(self, worker: _ProcessHandle, message: tuple[Any, ...], fd: int | None) -> None:
        """Record a reply that has arrived: they come in the order of the requests."""
        pending = next(pending for pending in worker.sent if pending.reply is None)
        reply, memory = BatchReply.from_plain(message), None
        if fd is not None:
            try:
                memory = Memory(Segment.attach(fd).map(writable=True), shared=True)
            except (OSError, MemoryError, ValueError) as error:
                raise BatchLostError(f"the memory of a batch could not be received: {error}") from error
        if pending.slot is not None:
            used_bytes = reply.payload.used_bytes if reply.kind is ReplyKind.BATCH else 0
            self.ring.fill(pending.slot, memory, used_bytes)
        self._count(reply.counters)
        pending.reply = reply

    # --- from a slot to tensors ---------------------------------------------------------------------------

    def _open(self, pending: PendingBatch) -> None:
        """Restore the batch of a reply, and free the slot unless the batch was lent."""
        reply, slot = pending.reply, pending.slot
        if reply is not None and slot is not None and reply.kind is ReplyKind.BATCH:
            try:
                reply.payload = self._unpack(reply.payload, slot)
            except Exception as error:  # noqa: BLE001  # fails only this batch
                reply.kind, reply.payload = ReplyKind.ERROR, RemoteError(error)
        self._free_slot(pending)

    def _unpack(self, packed: Packed, slot: Slot) -> Any:
        """The batch, as a view of its slot if that can be lent, else as a copy."""
        if not packed.used_bytes or slot.memory is None:
            return unpack(packed, b"")
        lease = slot.memory.lease()
        is_private = False
        if self.registered is not None:
            leaves = views(packed, lease)
            # A prefetcher passes arrays on to its caller, who must never see pinned slots.
            leaves = [leaf.copy(order="K") if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
            batch = restore(packed, lease, leaves)
            is_private = hides_tensors(batch)
            if not is_private and not all(isinstance(leaf, np.ndarray) for leaf in leaves):
                self.registered.add(slot.memory, (other.memory for other in self.ring.slots))
        else:
            leaves = views(packed, lease, packed.small_bytes)
            batch = restore(packed, lease, leaves)
        del lease
        if not slot.memory.is_leased:
            return batch  # all of it is copied
        if not is_private and self.ring.lend(slot):
            return batch
        self._count(WorkerCounters(num_copies=1))
        del batch, leaves
        return unpack(packed, slot.memory.lease(), max_copied_bytes=sys.maxsize)

    def _free_slot(self, pending: PendingBatch) -> None:
        """Free the slot of a batch, unless it was lent."""
        slot, pending.slot = pending.slot, None
        if slot is not None and slot.state is SlotState.READY:
            self.ring.release(slot)

    def read_slots(self, backend: Backend, stream: Any) -> None:
        """Let a device read slots in place; the caller keeps each batch until the device has read it."""
        if self.registered is None or self.registered.stream is not stream:
            self.stop_reading_slots()
            self.registered = RegisteredSlots(backend, stream)

    def stop_reading_slots(self) -> None:
        """Stop what `read_slots` began; waits for the copies in flight."""
        if self.registered is not None:
            self.registered.close()
            self.registered = None

    # --- requests and deaths ------------------------------------------------------------------------------

    def _feed(self, worker: _ProcessHandle) -> None:
        """Send what waits, as far as there are slots, and room in the pipe: this never blocks the caller."""
        while worker.waiting:
            waiting = worker.waiting[0]
            if isinstance(waiting, BeginEpoch):
                if not self._send(worker, waiting):
                    return
            elif not self._request(worker, waiting):
                return
            worker.waiting.popleft()
        if worker.gets_no_more:
            worker.channel.finish()

    def _request(self, worker: _ProcessHandle, pending: PendingBatch) -> bool:
        slot = self.ring.acquire(worker.id)
        if slot is None:
            return False
        num_slots, has_memory = self.ring.num_slots(worker.id), slot.memory is not None
        message = FetchRequest(slot.number, has_memory, num_slots, pending.index, pending.key)
        try:
            is_sent = self._send(worker, tuple(message))
        except Exception as error:
            note_unsent(error, pending)
            raise
        if is_sent:
            pending.slot = slot
            worker.sent.append(pending)
        else:
            self.ring.release(slot)
        return is_sent

    def _send(self, worker: _ProcessHandle, message: Any) -> bool:
        try:
            return worker.channel.send(message)
        except (BrokenPipeError, ConnectionResetError):
            return True  # `wait` notices the death and reports it

    def wait(self, worker_id: int | None, deadline: float | None) -> None:
        """Wait for a reply of the worker, or of any, a death, or close()."""
        # The processes are watched too, so the caller learns of a death within moments, without a timeout.
        poller = select.poll()
        by_fd = {}
        with self._lock:
            if self._is_closed:
                return
            awaited = asked(self._workers, worker_id)
            for other in awaited:
                poller.register(other.channel, select.POLLIN)
            for other in self._workers:
                if not other.is_done:
                    poller.register(other.process, select.POLLIN)
                    by_fd[other.process.fileno()] = other
        ready = poller.poll(limit_s(deadline) * 1000)
        dead = [by_fd[fd] for fd, _ in ready if fd in by_fd]
        if dead:
            with self._lock:
                if not self._is_closed:  # workers that close() stopped are not dead workers
                    self._handle_deaths(awaited, dead)
            if self._death:
                self.close(_GRACE_AFTER_DEATH_S)  # `take` raises the error

    def _handle_deaths(self, awaited: list[_ProcessHandle], dead: list[_ProcessHandle]) -> None:
        """Replace dead workers, or note their death, unless the caller's reply has arrived."""
        try:
            for worker in {*awaited, *dead}:
                while (received := worker.channel.receive()) is not None:
                    self._accept(worker, *received)
            dead = [worker for worker in dead if not worker.is_done]
            if any(worker.has_reply for worker in awaited) or not dead:
                return
            if len(dead) <= self._restarts_left:
                for worker in dead:
                    self._replace(worker)
                return
            causes = " ".join(map(self._cause_of_death, dead))
        except BaseException:
            self._is_closed = True  # no worker would ever reply to the unfinished requests
            raise
        pids = ", ".join(str(worker.process.process.pid) for worker in dead)
        self._note_death(f"pid(s) {pids}", causes)

    def _cause_of_death(self, worker: _ProcessHandle) -> str:
        """How a worker ended, the likely cause, and what it was doing."""
        code = worker.process.exitcode
        if code is None:
            how = "ended, and other code in this program took its exit code (os.wait(), a SIGCHLD handler)"
        elif code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            how = f"was killed by {name} ({_CAUSES.get(-code, 'native code crashed; see stderr')})"
        else:
            how = (
                f"exited with code {code} (user code called sys.exit() or os._exit(), or the process could "
                "not start: see stderr, and check that the script has an `if __name__ == '__main__':` guard)"
            )
        pending = next((pending for pending in worker.sent if pending.reply is None), None)
        doing = "had no unfinished batch"
        if pending is not None:
            doing = f"was working on batch {pending.number}, index {short_repr(pending.index)}"
        return f"worker {worker.id} {how}. It {doing}. num_workers=0 runs the same code in this process."

    def _replace(self, worker: _ProcessHandle) -> None:
        """Replace a dead worker, and give the new one the requests without a reply."""
        self._use_restart(self._cause_of_death(worker))
        self.ring.forget(worker.id)  # the new process has none of its memory
        worker.channel.close()
        worker.process.clean_up()
        new = self._start(worker.id)
        new.begin, new.gets_no_more = worker.begin, worker.gets_no_more
        new.waiting.append(worker.begin)
        for pending in [*worker.sent, *worker.waiting]:
            if isinstance(pending, BeginEpoch):
                continue
            if pending.reply is not None:
                new.sent.append(pending)
            elif not pending.is_stale:
                new.waiting.append(pending)

    def close(self, grace_s: float | None = None) -> None:
        """Stop the workers and release all slots; batches that the caller holds stay valid.

        If an exception interrupts this call, the workers are killed immediately.

        Args:
            grace_s: How long workers can take to finish their current sample; None: GRACE_S.
        """
        if not self.is_ours:
            # Takes no lock: a thread that does not exist in this forked child may have held it at the fork.
            self._is_closed = True
            for worker in self._workers:
                worker.channel.abandon()
                worker.process.abandon()
            self._sent_plan.close()
            return
        with self._lock:
            self._is_closed = True
            for worker in self._workers:
                worker.channel.close()  # ends a wait in another thread too
        with self._closing:
            processes = [worker.process for worker in self._workers]
            try:
                if not wait_for_all(processes, GRACE_S if grace_s is None else grace_s):
                    for process in processes:
                        process.send_signal(signal.SIGTERM)
                    wait_for_all(processes, _TERMINATE_S)
            finally:
                for process in processes:
                    process.send_signal(signal.SIGKILL)
                wait_for_all(processes, _TERMINATE_S)
                for process in processes:
                    process.clean_up()
                with self._lock:
                    self._workers.clear()
                    self.ring.clear()
                    self.stop_reading_slots()
                    self._sent_plan.close()
