"""The order of batches and the books of slots, against a model that knows only the rules."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fastload.memory.lease import private_memory
from fastload.memory.ring import EMPTY_BATCHES, Ring, Slot, SlotState
from fastload.workers.schedule import Schedule

PAGE = 4096


def test_batches_that_hold_no_bytes_are_made_ahead_of_the_caller() -> None:
    """After some of them a worker has as many slots as batches in flight, though no size is known."""
    ring = Ring(1, 3, PAGE)
    counts = []
    for _ in range(EMPTY_BATCHES + 1):
        slots = _acquire_all(ring)
        counts.append(len(slots))
        for slot in slots:
            ring.fill(slot, None, 0)
            ring.release(slot)

    assert counts == [1] * EMPTY_BATCHES + [3]


def _fill(ring: Ring, worker: int = 0, pages: int = 1) -> Any:
    """A slot that the worker has filled, in memory of its own where it had none or too little."""
    slot = ring.acquire(worker)
    assert slot is not None
    is_too_small = slot.memory is None or slot.memory.nbytes < pages * PAGE
    ring.fill(slot, private_memory(pages * PAGE) if is_too_small else None, pages * PAGE)
    return slot


def _fill_all(ring: Ring, slots: list[Slot]) -> None:
    for slot in slots:
        ring.fill(slot, private_memory(PAGE), PAGE)
        ring.release(slot)


def _acquire_all(ring: Ring, worker: int = 0) -> list[Slot]:
    found = []
    while (slot := ring.acquire(worker)) is not None:
        found.append(slot)
    return found


@pytest.mark.parametrize(
    ("num_workers", "in_flight", "limit_pages", "expected"),
    [
        # The share is rounded up; memory does not limit the number.
        *((1, 1, 1 << 18, 5), (1, 2, 1 << 18, 6), (2, 2, 1 << 18, 4), (3, 1, 1 << 18, 3), (5, 2, 1 << 18, 3)),
        # Worker 1 has no slot yet: room is kept for its batch, and for each slot without memory.
        *((2, 4, 1, 1), (2, 4, 2, 1), (2, 4, 3, 2), (2, 4, 4, 3), (2, 4, 9, 6)),
    ],
)
def test_a_worker_has_slots_for_its_batches_in_flight_and_its_share_of_four_that_are_lent(
    num_workers: int, in_flight: int, limit_pages: int, expected: int
) -> None:
    """Within the limit, in which every worker has room for one."""
    ring = Ring(num_workers, in_flight, limit_pages * PAGE)
    ring.release(_fill(ring))

    assert len(_acquire_all(ring)) == expected == ring.num_slots(0)
    assert (ring.acquire(num_workers - 1) is None) == (num_workers == 1)


def test_the_largest_batch_so_far_decides_whether_another_slot_has_room() -> None:
    """A large batch, then small ones and an empty one: the next slot may have to hold a large one."""
    ring = Ring(2, 8, 8 * PAGE)
    ring.release(_fill(ring, 0, 3))
    ring.release(_fill(ring, 1, 1))
    empty = ring.acquire(1)
    assert empty is not None
    ring.fill(empty, None, 0)
    ring.release(empty)

    assert len(_acquire_all(ring, 1)) == 2  # 3 + 1 pages are taken, and 3 fit


def test_only_free_slots_are_given_up_where_batches_outgrow_the_limit() -> None:
    """The newest is with the caller: it stays, and so do those before it, whose numbers are their places."""
    ring = Ring(1, 2, 3 * PAGE)
    ring.release(_fill(ring))
    _fill_all(ring, _acquire_all(ring))
    newest = _fill(ring, pages=4)
    lease = newest.memory.lease()
    assert ring.lend(newest)

    before = ring.slots
    slot = ring.acquire(0)

    assert newest is before[-1]
    assert ring.slots == before
    assert slot is before[-2]
    del lease


def test_a_slot_that_a_forked_child_may_see_loses_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker makes new memory for it."""
    ring = Ring(1, 2, 1 << 30)
    slot = _fill(ring)
    assert ring.lend(slot)
    monkeypatch.setattr(type(slot.memory), "is_fork_shared", True)
    ring.reclaim(0)

    assert (slot.state, slot.memory) == (SlotState.FREE, None)


MB = 1 << 20


@pytest.mark.parametrize("large_bytes", [2 * MB, 4 * MB])
def test_memory_of_batches_of_many_sizes_is_kept(large_bytes: int) -> None:
    """A large batch among each 16 decides, and nobody makes memory for it again."""
    ring = Ring(1, 1, 64 * MB)
    made = []
    for number in range(400):
        slot = ring.acquire(0)
        assert slot is not None
        nbytes = MB if number % 16 else large_bytes
        is_too_small = slot.memory is None or slot.memory.nbytes < nbytes
        made += [number] if is_too_small else []
        ring.fill(slot, private_memory(nbytes) if is_too_small else None, nbytes)
        ring.release(slot)

    assert made == [0]


@pytest.mark.parametrize("move", ["acquire", "lend"])
def test_a_slot_whose_lease_has_ended_counts_as_free_at_once(move: str) -> None:
    """Two slots fill the limit, and the caller drops the batch in the first one."""
    ring = Ring(1, 1, 2 * PAGE)
    first = _fill(ring)
    lease = first.memory.lease()
    assert ring.lend(first)
    second = ring.acquire(0)
    assert second is not None
    waits = ring.acquire(0) is None
    ring.fill(second, private_memory(PAGE), PAGE)
    del lease

    assert waits
    if move == "acquire":
        assert ring.acquire(0) is first
    else:
        assert ring.lend(second)
        assert first.state is SlotState.FREE


class Transport(RuleBasedStateMachine):
    """Workers answer with batches of any size, a caller holds and drops some; the ring is tight."""

    @initialize(
        num_workers=st.integers(1, 3),
        in_flight=st.integers(1, 3),
        pages=st.integers(1, 12),
        shares=st.none() | st.lists(st.integers(0, 8), min_size=3, max_size=3),
        in_order=st.booleans(),
    )
    def start(
        self, num_workers: int, in_flight: int, pages: int, shares: list[int] | None, in_order: bool
    ) -> None:
        self.num_workers = num_workers
        self.in_flight = in_flight
        self.limit_bytes = pages * PAGE
        self.shares = shares  # of an iterable dataset: how many batches each worker has
        self.ring = Ring(num_workers, in_flight, self.limit_bytes)
        self.in_order = in_order
        self.schedule = Schedule(num_workers, in_order=in_order)
        self.waiting: list[tuple[int, int]] = []
        self.sent: dict[int, list[tuple[int, Any]]] = {worker: [] for worker in range(num_workers)}
        self.held: dict[int, tuple[Any, Any]] = {}  # batch -> (slot, lease)
        self.num_assigned = self.turn = 0
        self.num_received = 0
        self.num_given = [0] * num_workers
        self.sizes_seen = {0}
        self.num_empty = 0  # batches, before the first that was not

    @rule()
    def submit(self) -> None:
        if self.num_assigned - self.num_received < self.num_workers * self.in_flight:
            self._assign()
        self._feed()

    def _assign(self) -> None:
        worker = self.schedule.assign()
        if worker is None:
            assert self.shares is not None
            assert not any(self.schedule.is_active(worker) for worker in range(self.num_workers))
        else:
            active = [self.schedule.is_active(worker) for worker in range(self.num_workers)]
            if self.in_order:
                while not active[self.turn % self.num_workers]:  # without those that have ended
                    self.turn += 1
                assert worker == self.turn % self.num_workers
            else:
                counts = [self._num_pending(other) for other in range(self.num_workers) if active[other]]
                assert active[worker]
                assert self._num_pending(worker) == min(counts)
            self.turn = worker + 1
            self.waiting.append((self.num_assigned, worker))
            self.num_assigned += 1

    def _num_pending(self, worker: int) -> int:
        return len(self.sent[worker]) + sum(other == worker for _, other in self.waiting)

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
            assert slot.number < self.ring.num_slots(worker)
            self.waiting.remove((task, worker))
            self.sent[worker].append((task, slot))

    @rule(pages=st.integers(0, 4), choice=st.integers(0, 2))
    def receive(self, pages: int, choice: int) -> None:
        assert len(self.schedule.pending) == self.num_assigned - self.num_received
        if not len(self.schedule.pending):
            return
        worker = self.schedule.due()
        assert (worker is not None) == self.in_order
        if worker is None:  # any worker with a request can be the first to reply
            asked = [other for other in range(self.num_workers) if self._num_pending(other)]
            worker = asked[choice % len(asked)]
        self._feed()
        # Never a deadlock: the task that is due has a slot, whatever the caller holds.
        assert self.sent[worker]
        task, slot = self.sent[worker].pop(0)
        assert not self.in_order or task == self.num_received
        self.schedule.remove(worker)
        self.num_received += 1
        if self.shares is not None and self.num_given[worker] >= self.shares[worker]:
            self._end(worker, slot)
        else:
            self.num_given[worker] += 1
            self._give(task, slot, pages * PAGE)

    def _end(self, worker: int, slot: Any) -> None:
        self.num_empty += len(self.sizes_seen) == 1
        self.ring.fill(slot, None, 0)
        self.ring.release(slot)
        if self.schedule.is_active(worker):
            self.schedule.exhaust(worker)
            self._assign()

    def _give(self, task: int, slot: Any, nbytes: int) -> None:
        self.sizes_seen.add(nbytes)
        self.num_empty += len(self.sizes_seen) == 1
        is_too_small = slot.memory is None or slot.memory.nbytes < nbytes
        self.ring.fill(slot, private_memory(nbytes) if nbytes and is_too_small else None, nbytes)
        if not nbytes:
            self.ring.release(slot)
            return
        lease = slot.memory.lease()
        if self.ring.lend(slot):
            self.held[task] = (slot, lease)
        else:
            # A copy is made for want of slots only: all others of this worker are with the caller.
            others = [other for other in self.ring.slots if other.worker == slot.worker and other is not slot]
            assert all(other.state is SlotState.LENT for other in others)
            self.ring.release(slot)

    @rule(choice=st.integers(0, 100))
    def drop(self, choice: int) -> None:
        if self.held:
            slot, lease = self.held.pop(sorted(self.held)[choice % len(self.held)])
            memory = slot.memory
            self.ring.reclaim(slot.worker)
            assert slot.state is SlotState.LENT  # not before the lease ends
            del lease
            self.ring.reclaim(slot.worker)
            assert (slot.state, slot.memory) == (SlotState.FREE, memory)

    @invariant()
    def the_ring_keeps_to_its_limit(self) -> None:
        if hasattr(self, "ring") and len(self.sizes_seen) <= 2:  # all batches that are not empty are alike
            slots = self.num_workers
            if self.num_empty >= EMPTY_BATCHES:  # a worker may have had several slots when the first one came
                slots *= self.in_flight
            assert self.ring.nbytes <= max(self.limit_bytes, slots * max(self.sizes_seen))

    @invariant()
    def held_slots_are_lent(self) -> None:
        if hasattr(self, "ring"):
            assert all(slot.state is SlotState.LENT for slot, _ in self.held.values())
            assert len({id(slot) for slot, _ in self.held.values()}) == len(self.held)

    def teardown(self) -> None:
        if not hasattr(self, "ring"):
            return
        while len(self.schedule.pending):
            self.receive(1, 0)
        self.held.clear()
        for worker in range(self.num_workers):
            self.ring.reclaim(worker)
        assert {slot.state for slot in self.ring.slots} <= {SlotState.FREE}
        for worker in range(self.num_workers):  # one turn each, and slots that batches outgrew are given up
            slot = self.ring.acquire(worker)
            assert slot is not None
            self.ring.fill(slot, None, 0)
            self.ring.release(slot)
        assert self.ring.nbytes <= max(self.limit_bytes, self.num_workers * max(self.sizes_seen))
        self.ring.clear()
        assert (self.ring.nbytes, self.ring.slots) == (0, [])


TestTransport = pytest.mark.slow(Transport.TestCase)
TestTransport.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
