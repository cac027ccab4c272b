"""Turn the packed bytes of a batch into tensors for the caller: views of lent slots, or copies.

Runs in the consumer's process, for the transports whose batches arrive as bytes (`pool`, `ray_pool`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.batch.packing import restore, unpack, views
from fastload.device.registered import RegisteredSlots, hides_tensors
from fastload.memory.ring import SlotState
from fastload.system.remote_error import RemoteError
from fastload.workers.messages import Kind, Work

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastload.batch.packing import Packed
    from fastload.device.cuda import Backend
    from fastload.memory.ring import Ring, Slot
    from fastload.workers.messages import Task


class Lender:
    """The base of pools whose batches lie in slots.

    Args:
        ring: Their state.
        note_work: Called with the copies of batches whose slot could not be lent.
    """

    def __init__(self, ring: Ring, note_work: Callable[[Work], None]) -> None:
        self.ring = ring
        self._note_work = note_work
        self.registered: RegisteredSlots | None = None  # set while a device reads slots in place

    def _open(self, task: Task) -> None:
        """Restore the batch of an answer, and free the slot unless the batch was lent."""
        answer, slot = task.answer, task.slot
        if answer is not None and slot is not None and answer.kind is Kind.BATCH:
            try:
                answer.nbytes = answer.payload.used_bytes
                answer.payload = self._unpacked(answer.payload, slot)
            except Exception as error:  # noqa: BLE001  # fails only this batch
                answer.kind, answer.payload = Kind.ERROR, RemoteError(error)
        self._give_back(task)

    def _unpacked(self, packed: Packed, slot: Slot) -> Any:
        """The batch, as a view of its slot if that can be lent, else as a copy."""
        if not packed.used_bytes or slot.memory is None:
            return unpack(packed, b"")
        lease = slot.memory.lease()
        leaves = views(packed, lease)
        if self.registered is not None:
            # A prefetcher passes arrays on to its caller, who must never see pinned slots.
            leaves = [leaf.copy(order="K") if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
        batch = restore(packed, leaves)
        is_private = self.registered is not None and hides_tensors(packed, batch)
        if (
            self.registered is not None
            and not is_private
            and not all(isinstance(leaf, np.ndarray) for leaf in leaves)
        ):
            self.registered.add(slot.memory, (other.memory for other in self.ring.slots))
        if not is_private and self.ring.lend(slot):
            return batch
        self._note_work(Work(num_copies=1))
        del batch, leaves
        return unpack(packed, np.array(np.frombuffer(lease, np.uint8, packed.used_bytes)))

    def _give_back(self, task: Task) -> None:
        """Free the slot of an abandoned task, unless its batch was lent."""
        slot, task.slot = task.slot, None
        if slot is not None and slot.state is SlotState.READY:
            self.ring.release(slot)

    def let_read(self, backend: Backend, stream: Any) -> None:
        """Let a device read slots in place; the caller keeps each batch until the device has read it."""
        if self.registered is None or self.registered.stream is not stream:
            self.unregister()
            self.registered = RegisteredSlots(backend, stream)

    def unregister(self) -> None:
        """Stop reading slots in place; waits for the copies in flight."""
        if self.registered is not None:
            self.registered.close()
            self.registered = None
