"""The parent's record of slots: which slot of which worker is free, being filled, ready, or lent.

This module does no I/O. A worker makes the memory of a slot, and the parent receives it with the first batch
in that slot. A slot belongs to one worker for life, so each page is mapped only by one worker and the parent.
Messages about the slot order what the two do with it (see `memory_model`).

Slots are made on demand: as many as the batches in flight and the lent batches need, within `max_bytes` in
total. With no free slot, a task waits: this is the back-pressure. A slot that was made for a huge batch gets
smaller memory once batches are small again.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from fastload.memory.lease import SLACK_BYTES, RecentPeak
from fastload.memory.segment import PAGE_BYTES

if TYPE_CHECKING:
    from fastload.memory.lease import Memory

# A training loop holds its current batch while it asks for the next one; prefetchers hold a few more.
LENT_SLOTS = 4

# After this many batches without any bytes (such as lists of strings), a worker can have several in flight
# although their size is unknown. If larger batches follow, the first ones can exceed `max_bytes`.
EMPTY_BATCHES = 8


class SlotState(enum.StrEnum):
    """The state of a slot: FREE -> FILLING -> READY -> LENT -> FREE.

    READY becomes FREE if the batch was copied out or was an error; LENT, when no view of the batch is alive.
    """

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

    def __repr__(self) -> str:
        size = "no memory" if self.memory is None else f"{self.memory.nbytes} bytes"
        return f"<slot {self.number} of worker {self.worker}: {self.state.value}, {size}>"


class Ring:
    """All slots of one loader's workers.

    Args:
        num_workers: How many workers there are.
        slots_in_flight: Batches that a worker can have in flight (the prefetch factor).
        max_bytes: Upper bound on the memory of all slots together.
    """

    def __init__(self, num_workers: int, slots_in_flight: int, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._slots: list[list[Slot]] = [[] for _ in range(num_workers)]
        self._slots_in_flight = slots_in_flight
        self._max_slots = slots_in_flight + -(-LENT_SLOTS // num_workers)
        self._peak = RecentPeak()  # of the memory that a slot needs; 0 until a batch arrived with bytes
        self._num_empty = 0  # batches without bytes before that

    @property
    def nbytes(self) -> int:
        """Bytes of memory of all slots."""
        return sum([slot.memory.nbytes for slots in self._slots for slot in slots if slot.memory is not None])

    @property
    def slots(self) -> list[Slot]:
        """All slots of all workers."""
        return [slot for slots in self._slots for slot in slots]

    def acquire(self, worker: int) -> Slot | None:
        """A slot for the worker's next batch (FREE -> FILLING), or None if the task must wait."""
        self.reclaim(worker)
        slots = self._slots[worker]
        while self.nbytes > self.max_bytes and self._has_surplus(slots):  # batches have grown
            slots.pop()
        slot = None
        for other in slots:
            if other.state is SlotState.FREE:
                slot = other
                if slot.memory is not None and self._peak.is_exceeded_by(slot.memory.nbytes):
                    slot.memory = None  # the worker makes new memory, and both give up the old one
                    break
        if slot is None:
            if not self._may_grow(worker):
                return None
            slot = Slot(worker, len(slots))
            slots.append(slot)
        slot.state = SlotState.FILLING
        return slot

    def fill(self, slot: Slot, memory: Memory | None, used_bytes: int) -> None:
        """Record the worker's answer (FILLING -> READY).

        Args:
            slot: The slot.
            memory: The new memory, if the worker made some.
            used_bytes: The size of the batch; 0 if there is none.
        """
        self._expect(slot, SlotState.FILLING)
        if memory is not None:
            slot.memory = memory
        if used_bytes and slot.memory is not None:
            # What the worker would make for this batch alone; the slot can be that of a larger one.
            self._peak.add(min(slot.memory.nbytes, used_bytes + SLACK_BYTES + PAGE_BYTES))
        elif not self._peak.nbytes:  # a batch without bytes does not tell the size of the next one
            self._num_empty += 1
        slot.state = SlotState.READY

    def lend(self, slot: Slot) -> bool:
        """Lend the slot to the caller (READY -> LENT); False if its worker would have no slot left."""
        self._expect(slot, SlotState.READY)
        self.reclaim(slot.worker)
        slots = self._slots[slot.worker]
        if not any(other is not slot and other.state is not SlotState.LENT for other in slots):
            if not self._may_grow(slot.worker):
                # Lent, it would be the last one: the worker would wait for the caller, who might wait for
                # the worker's next batch. The caller gets a copy instead, and the slot is free at once.
                return False
            # Reserve the next slot now: later, other workers might have used up the limit.
            slots.append(Slot(slot.worker, len(slots)))
        slot.state = SlotState.LENT
        return True

    def release(self, slot: Slot) -> None:
        """Take back a slot whose batch was copied out, or that holds no batch (READY, FILLING -> FREE)."""
        self._expect(slot, SlotState.READY, SlotState.FILLING)
        slot.state = SlotState.FREE

    def reclaim(self, worker: int) -> None:
        """Take back the worker's lent slots that have no view left (LENT -> FREE)."""
        for slot in self._slots[worker]:
            if slot.state is SlotState.LENT and slot.memory is not None and not slot.memory.is_leased:
                slot.state = SlotState.FREE
                if slot.memory.is_fork_shared:
                    slot.memory = None  # the worker makes new memory for the next batch

    def num_slots(self, worker: int) -> int:
        """How many slots the worker has; slots with higher numbers were dropped."""
        return len(self._slots[worker])

    def forget(self, worker: int) -> None:
        """Drop all slots of a worker; lent memory is freed with its last view."""
        self._slots[worker] = []

    def clear(self) -> None:
        """Drop all slots; lent memory is freed with its last view."""
        for slots in self._slots:
            slots.clear()

    def _has_surplus(self, slots: list[Slot]) -> bool:
        # Only the newest slot is dropped, so slot numbers stay list positions; the worker keeps a slot.
        is_idle = len(slots) > 1 and slots[-1].state is SlotState.FREE
        return is_idle and any(slot.state is not SlotState.LENT for slot in slots[:-1])

    def _may_grow(self, worker: int) -> bool:
        slots = self._slots[worker]
        if not slots:
            return True  # whatever the limit: without a slot the worker could never answer
        if not self._peak.nbytes:  # nothing says yet how many would fit
            return self._num_empty >= EMPTY_BATCHES and len(slots) < self._slots_in_flight
        # Bytes are reserved for slots without memory yet, and for workers without a slot.
        num_reserved = sum(slot.memory is None for slot in self.slots)
        num_reserved += sum(not slots_of_worker for slots_of_worker in self._slots)
        grown_bytes = self.nbytes + (num_reserved + 1) * self._peak.nbytes
        return len(slots) < self._max_slots and grown_bytes <= self.max_bytes

    def _expect(self, slot: Slot, *states: SlotState) -> None:
        if slot.state not in states:
            raise ValueError(f"expected a slot that is {' or '.join(states)}, got {slot!r}")
