"""What the pools share whose batches arrive as packed bytes: worker processes and Ray actors.

The bytes of a batch lie in a slot. The caller gets tensors that view the slot, which is lent until the last
of them is gone, or a copy. Workers that die can be replaced, and continue where they were.
"""

from __future__ import annotations

import abc
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from fastload.batch.packing import restore, unpack, views
from fastload.device.registered import RegisteredSlots, hides_tensors
from fastload.memory.lease import SMALL_BYTES
from fastload.memory.ring import SlotState
from fastload.system.logs import log
from fastload.system.notes import add_note
from fastload.system.remote_error import RemoteError
from fastload.workers.messages import BeginEpoch, ReplyKind, WorkerCounters
from fastload.workers.pool import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.batch.dataset_state import DatasetState
    from fastload.batch.packing import Packed
    from fastload.batch.plan import Plan
    from fastload.device.devices import Backend
    from fastload.memory.ring import Ring, Slot
    from fastload.workers.messages import PendingBatch

# How often a waiting caller checks its workers; a check costs little.
WATCH_INTERVAL_S = 5.0

# Small leaves are copied out of their slot: a loop that keeps all labels, for a metric, would otherwise keep
# all images. At most SMALL_BYTES of a batch are copied, or this share of it, whichever is more.
_SMALL_SHARE = 1 / 32


def limit_s(deadline: float | None) -> float:
    """How long a caller waits before it checks its workers.

    Raises:
        TimeoutError: ``deadline``, a time of `time.monotonic`, has passed.
    """
    if deadline is None:
        return WATCH_INTERVAL_S
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return min(WATCH_INTERVAL_S, left_s)


class WorkerHandle:
    """The parent's state of one worker.

    Attributes:
        id: 0 to num_workers - 1.
        sent: Requests in the order of their replies, until `take` returns them.
        begin: What a replacement begins with: the state is that of the last reply.
    """

    def __init__(self, worker_id: int) -> None:
        self.id = worker_id
        self.sent: deque[PendingBatch] = deque()
        self.begin = BeginEpoch(None, None)

    @property
    def oldest(self) -> PendingBatch | None:
        """The request that the worker replies to next."""
        return self.sent[0] if self.sent else None

    def begin_epoch(self, message: BeginEpoch) -> bool:
        """Note the message of an epoch; return whether the worker's copy of the dataset loads its state."""
        state = message.dataset_state
        if state is None or state.has_state or self.begin.dataset_state is None:
            self.begin = message
            return True
        self.begin = self.begin._replace(epoch=message.epoch)  # a persistent worker's copy keeps its state
        return False

    def note_state(self, state: DatasetState | None) -> None:
        """Note the state of the worker's copy of the dataset after a reply."""
        if state is not None and self.begin.dataset_state is not None:
            self.begin = self.begin._replace(dataset_state=state)


Handle = TypeVar("Handle", bound=WorkerHandle)


class SlotPool(WorkerPool, Generic[Handle]):
    """The base of pools whose batches lie in slots.

    Args:
        plan: What the workers run.
        count: As for `WorkerPool`.
        ring: The state of the slots.

    Attributes:
        lock: Between the consumer's thread and the thread that pins batches.
    """

    def __init__(self, plan: Plan, count: Callable[[WorkerCounters], None], ring: Ring) -> None:
        super().__init__(plan, count)
        self.ring = ring
        self.lock = threading.RLock()
        self.registered: RegisteredSlots | None = None  # set while a device reads slots in place
        self._workers: list[Handle] = []
        self._restarts_left = plan.num_restarts

    # --- epochs and restarts ------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int | None, dataset_states: list[DatasetState] | None) -> None:
        """Begin an epoch in each worker; replies to older requests are dropped."""
        with self.lock:
            for worker in self._workers:
                self._drop_requests(worker)
                state = None if dataset_states is None else dataset_states[worker.id]
                self._begin(worker, BeginEpoch(epoch, state))

    @abc.abstractmethod
    def _drop_requests(self, worker: Handle) -> None:
        """Drop the requests of a worker: no caller waits for them."""

    @abc.abstractmethod
    def _begin(self, worker: Handle, message: BeginEpoch) -> None:
        """Begin an epoch in one worker."""

    def _use_restart(self, cause: str) -> None:
        self._restarts_left -= 1
        log.warning(
            "%s A new worker reads its unfinished batches again; max_worker_restarts allows %d more",
            cause,
            self._restarts_left,
        )

    def _note_death(self, who: str, causes: str) -> None:
        """From here on `expect_open` raises WorkerDiedError."""
        self._death = f"DataLoader worker ({who}) exited unexpectedly: {causes}"
        log.error("%s", self._death)

    @staticmethod
    def _note_unsent(error: Exception, pending: PendingBatch, worker: WorkerHandle) -> None:
        add_note(
            error, f"fastload: the index of batch {pending.number} could not be sent to worker {worker.id}"
        )

    # --- from a slot to tensors ---------------------------------------------------------------------------

    def _open(self, pending: PendingBatch) -> None:
        """Restore the batch of a reply, and free the slot unless the batch was lent."""
        reply, slot = pending.reply, pending.slot
        if reply is not None and slot is not None and reply.kind is ReplyKind.BATCH:
            try:
                reply.nbytes = reply.payload.nbytes
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
            small_bytes = max(SMALL_BYTES, int(packed.used_bytes * _SMALL_SHARE))
            leaves = views(packed, lease, small_bytes)
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
