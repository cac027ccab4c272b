"""The parent's books: which slot of which worker is free, being filled, ready, or lent to the caller.

No I/O here; the memory behind a slot is made by its worker and arrives with the first batch in it. Rules:

1. A slot belongs to one worker for life, so that each page is mapped by one worker and the parent.
2. FREE -> FILLING -> READY -> LENT -> FREE; READY -> FREE when the batch was copied out or was an error.
   LENT becomes FREE when nothing that was made from the lease is alive (see memory.py).
3. Slots are made on demand, up to what batches in flight and lent ones need, and to `ring_bytes` in all.
   Every worker may always have one slot, and has no more until the size of a batch is known.
   Where batches grow later, free slots are given up until the rest keeps to the limit again.
4. With nothing free a task waits, and never for ever: a slot is lent only while its worker keeps or may
   have another to work with. Otherwise the caller gets a copy, and the slot goes back at once.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from fastload.system import budget

if TYPE_CHECKING:
    from fastload.memory.lease import Memory

# A training loop holds the batch it works on while it asks for the next; prefetchers hold a few more.
LENT_SLOTS = 4


# Of the memory that is free when an epoch starts; several loaders and the caches need the rest.
_AUTO_SHARE = 0.25


def limit_bytes(ring_bytes: int | float | str) -> int:
    """The loader's setting `ring_bytes` in bytes."""
    if ring_bytes == "auto":
        return int(budget.available_bytes() * _AUTO_SHARE)
    return budget.parse_budget(ring_bytes, name="ring_bytes")


# Once so many batches held no bytes at all, such as lists of strings, a worker may have several under way
# though nothing is known of their size. If larger ones follow, the first of them may exceed `ring_bytes`.
EMPTY_BATCHES = 8


class SlotState(enum.Enum):
    """Where a slot stands."""

    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    LENT = "lent"


class Slot:
    """One slot: memory for one batch of one worker."""

    def __init__(self, worker: int, number: int) -> None:
        self.worker = worker
        self.number = number
        self.state = SlotState.FREE
        self.memory: Memory | None = None
        self.serial = 0  # of the task that it was given to last

    def __repr__(self) -> str:
        size = "no memory" if self.memory is None else f"{self.memory.nbytes} bytes"
        return f"<slot {self.number} of worker {self.worker}: {self.state.value}, {size}>"


class Ring:
    """All slots of one loader's workers.

    Args:
        num_workers: How many workers there are.
        slots_in_flight: Batches that a worker may have under way or waiting (the prefetch factor).
        ring_bytes: Upper bound for the memory of all slots together.
    """

    def __init__(self, num_workers: int, slots_in_flight: int, ring_bytes: int) -> None:
        self.ring_bytes = ring_bytes
        self._slots: list[list[Slot]] = [[] for _ in range(num_workers)]
        self._slots_in_flight = slots_in_flight
        self._max_slots = slots_in_flight + -(-LENT_SLOTS // num_workers)
        self._largest_bytes: int | None = None  # of a slot; None until a batch has brought memory
        self._num_empty = 0  # batches before that
        self.num_copies = 0  # batches that were copied out because slots were scarce

    @property
    def nbytes(self) -> int:
        """Memory that all slots hold now."""
        return sum(slot.memory.nbytes for slots in self._slots for slot in slots if slot.memory is not None)

    @property
    def slots(self) -> list[Slot]:
        """Every slot there is."""
        return [slot for slots in self._slots for slot in slots]

    def acquire(self, worker: int) -> Slot | None:
        """A slot for the worker's next batch (FREE -> FILLING), or None if the task must wait."""
        self.reclaim(worker)
        slots = self._slots[worker]
        while self.nbytes > self.ring_bytes and self._has_surplus(slots):
            slots.pop()
        for slot in reversed(slots):
            if slot.state is SlotState.FREE:
                slot.state = SlotState.FILLING
                return slot
        if not self._may_grow(worker):
            return None
        slot = Slot(worker, len(slots))
        slots.append(slot)
        slot.state = SlotState.FILLING  # last: an exception from a signal handler leaves a free slot
        return slot

    def fill(self, slot: Slot, memory: Memory | None) -> None:
        """The worker has answered (FILLING -> READY), in new memory if it brought some."""
        self._expect(slot, SlotState.FILLING)
        if memory is not None:
            slot.memory = memory
        nbytes = 0 if slot.memory is None else slot.memory.nbytes
        if nbytes:  # a batch of none says nothing of the next one
            self._largest_bytes = max(self._largest_bytes or 0, nbytes)
        elif self._largest_bytes is None:
            self._num_empty += 1
        slot.state = SlotState.READY

    def lend(self, slot: Slot) -> bool:
        """Lend the slot to the caller (READY -> LENT), unless its worker could not go on without it."""
        self._expect(slot, SlotState.READY)
        self.reclaim(slot.worker)
        slots = self._slots[slot.worker]
        if not any(other is not slot and other.state is not SlotState.LENT for other in slots):
            if not self._may_grow(slot.worker):
                self.num_copies += 1
                return False
            # Taken at once: were it left for later, other workers might have used the room up by then.
            slots.append(Slot(slot.worker, len(slots)))
        slot.state = SlotState.LENT
        return True

    def release(self, slot: Slot) -> None:
        """Take a slot back whose batch was copied out or brought none (READY -> FREE)."""
        self._expect(slot, SlotState.READY)
        slot.state = SlotState.FREE

    def reclaim(self, worker: int) -> None:
        """Take back the worker's lent slots that nobody looks at any more (LENT -> FREE)."""
        for slot in self._slots[worker]:
            if slot.state is SlotState.LENT and slot.memory is not None and not slot.memory.is_leased:
                slot.state = SlotState.FREE
                if slot.memory.is_spent:
                    slot.memory = None

    def num_slots(self, worker: int) -> int:
        """How many slots the worker has: those with higher numbers are given up."""
        return len(self._slots[worker])

    def forget(self, worker: int) -> None:
        """Give up all slots of a worker; memory that is lent goes with its last view."""
        self._slots[worker] = []

    def clear(self) -> None:
        """Forget all slots; memory that is lent goes with its last view."""
        for slots in self._slots:
            slots.clear()

    def _has_surplus(self, slots: list[Slot]) -> bool:
        # The newest, so that numbers stay places in the list; and never the one to go on with.
        is_idle = len(slots) > 1 and slots[-1].state is SlotState.FREE
        return is_idle and any(slot.state is not SlotState.LENT for slot in slots[:-1])

    def _may_grow(self, worker: int) -> bool:
        slots = self._slots[worker]
        if not slots:
            return True
        if self._largest_bytes is None:
            return self._num_empty >= EMPTY_BATCHES and len(slots) < self._slots_in_flight
        # Room is spoken for by slots whose memory is still to be made, and by workers without a slot.
        spoken_for = sum(slot.memory is None for slot in self.slots) + sum(
            not others for others in self._slots
        )
        grown_bytes = self.nbytes + (spoken_for + 1) * self._largest_bytes
        return len(slots) < self._max_slots and grown_bytes <= self.ring_bytes

    def _expect(self, slot: Slot, state: SlotState) -> None:
        if slot.state is not state:
            raise ValueError(f"expected a slot that is {state.value}, got {slot!r}")
