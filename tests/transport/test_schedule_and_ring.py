"""The order of batches and the books of slots, against a model that knows only the rules."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fastload.transport.memory import private_memory
from fastload.transport.ring import Ring, SlotState
from fastload.transport.schedule import Schedule

PAGE = 4096


def test_tasks_go_round_and_come_back_in_order() -> None:
    """Task k goes to worker k mod W."""
    schedule = Schedule(3)

    assert [schedule.assign() for _ in range(7)] == [(k, k % 3) for k in range(7)]
    assert [schedule.answer() for _ in range(7)] == [(k, k % 3) for k in range(7)]
    assert schedule.head() is None


def test_an_exhausted_worker_gets_no_more_tasks() -> None:
    """The others keep their cycle; with none left there is no task."""
    schedule = Schedule(3)
    schedule.exhaust(1)

    assert [schedule.assign() for _ in range(4)] == [(0, 0), (1, 2), (2, 0), (3, 2)]
    schedule.exhaust(0)
    schedule.exhaust(2)
    assert schedule.assign() is None


@pytest.mark.parametrize("move", ["fill", "lend", "release"])
def test_an_illegal_move_raises_and_changes_nothing(move: str) -> None:
    """A free slot cannot be filled, lent or released."""
    ring = Ring(1, 2, 1 << 20)
    slot = ring.acquire(0)
    assert slot is not None
    ring.fill(slot, None)
    ring.release(slot)

    with pytest.raises(ValueError, match=r"expected a slot that is \w+, got <slot 0 of worker 0: free"):
        ring.fill(slot, None) if move == "fill" else getattr(ring, move)(slot)

    assert slot.state is SlotState.FREE


class Transport(RuleBasedStateMachine):
    """Workers that answer in order, a caller that holds and drops as it likes, and a tight ring."""

    @initialize(num_workers=st.integers(1, 3), in_flight=st.integers(1, 3), pages=st.integers(1, 12))
    def start(self, num_workers: int, in_flight: int, pages: int) -> None:
        self.num_workers = num_workers
        self.in_flight = in_flight
        self.limit_bytes = pages * PAGE
        self.ring = Ring(num_workers, in_flight, self.limit_bytes)
        self.schedule = Schedule(num_workers)
        self.waiting: list[tuple[int, int]] = []
        self.sent: dict[int, list[tuple[int, Any]]] = {worker: [] for worker in range(num_workers)}
        self.held: dict[int, tuple[Any, Any]] = {}  # batch -> (slot, lease)
        self.due = 0

    @rule()
    def submit(self) -> None:
        if self.schedule.num_pending < self.num_workers * self.in_flight:
            assigned = self.schedule.assign()
            assert assigned is not None
            self.waiting.append(assigned)
        self._feed()

    def _feed(self) -> None:
        for task, worker in list(self.waiting):
            if any(other == worker for _, other in self.waiting[: self.waiting.index((task, worker))]):
                continue
            slot = self.ring.acquire(worker)
            if slot is None:
                continue
            # Never a slot that the caller still looks at, or that another batch is in.
            assert not (slot.memory is not None and slot.memory.is_leased)
            assert all(slot is not other for _, other in self.sent[worker])
            self.waiting.remove((task, worker))
            self.sent[worker].append((task, slot))

    @rule()
    def receive(self) -> None:
        head = self.schedule.head()
        if head is None:
            return
        task, worker = head
        assert task == self.due
        self._feed()
        # Never a deadlock: the task that is due has a slot, whatever the caller holds.
        assert self.sent[worker]
        assert self.sent[worker][0][0] == task
        _, slot = self.sent[worker].pop(0)
        self.ring.fill(slot, private_memory(PAGE) if slot.memory is None else None)
        lease = slot.memory.lease()
        if self.ring.lend(slot):
            self.held[task] = (slot, lease)
        else:
            self.ring.release(slot)
        self.schedule.answer()
        self.due += 1

    @rule(choice=st.integers(0, 100))
    def drop(self, choice: int) -> None:
        if self.held:
            del self.held[sorted(self.held)[choice % len(self.held)]]

    @invariant()
    def the_ring_keeps_to_its_limit(self) -> None:
        if hasattr(self, "ring"):
            assert self.ring.nbytes <= max(self.limit_bytes, self.num_workers * PAGE)

    @invariant()
    def held_slots_are_lent(self) -> None:
        if hasattr(self, "ring"):
            assert all(slot.state is SlotState.LENT for slot, _ in self.held.values())
            assert len({id(slot) for slot, _ in self.held.values()}) == len(self.held)


TestTransport = Transport.TestCase
TestTransport.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
