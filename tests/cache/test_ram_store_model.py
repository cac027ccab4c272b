"""The store of decoded files against a model: several processes, kills at any point, limits that run out."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fastload.cache.ram import registry
from fastload.cache.ram import store as ram_store
from fastload.cache.ram.arena import Arena
from fastload.cache.ram.store import SharedStore
from fastload.memory.segment import Segment
from fastload.system.locks import flock_fd
from tests.cache.test_ram_model import die, killed
from tests.cache.test_ram_store import MB
from tests.kit.jobs import Job
from tests.kit.numbered_files import KB, files_in, key_of, put, right

NUMBERS = st.lists(st.integers(0, 120), min_size=1, max_size=30)
WHO = st.integers(0, 9)  # a handle, or another process
# What changes memory or the registry, and so where a killed process can leave something unfinished.
STEPS = {
    (Segment, "write"),
    (Segment, "reopen"),
    (Arena, "publish"),
    (registry, "register"),
    (registry, "unregister"),
    (Arena, "create"),
}


def die_at(step: int) -> None:
    """Let this process die before, in, or after its `step`-th step."""
    steps = itertools.count(1)

    def watched(real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if next(steps) == step:
                die()
            if real is write and next(steps) == step:
                segment, data, *rest = args
                real(segment, memoryview(data)[: len(data) // 2], *rest)
                die()
            result = real(*args, **options)
            if next(steps) == step:
                die()
            return result

        return call

    write = Segment.write
    for owner, name in STEPS:
        setattr(owner, name, watched(getattr(owner, name)))


def work(store: SharedStore, what: str, numbers: Any) -> Any:
    """Store, or read and compare, or make tables, in any process."""
    if what == "poll":
        return store.poll()
    return {"put": put, "right": right}[what](store, numbers)


class StoreMachine(RuleBasedStateMachine):
    """Handles of one store in this process, and another process; files of 8 KB under limits of a few of them.

    A file that changes has another key. So numbers are files, and those that are not read again are dead.
    """

    @initialize(limit=st.sampled_from([128 * KB, 300 * KB, MB]), idle_s=st.sampled_from([-1.0, 1e9]))
    def make(self, limit: int, idle_s: float) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(ram_store, "_MIN_TABLE_BYTES", 128 * KB)
        self.patch.setattr(ram_store, "_FIRST_LEVEL", 4)
        self.patch.setattr(ram_store, "_IDLE_S", idle_s)
        for name in ("_LOOK_EVERY_S", "_GROW_WAIT_S"):
            self.patch.setattr(ram_store, name, 0.0)
        self.limit, self.keeps = limit, idle_s > 0
        self.handles = [SharedStore(limit)]
        self.stored: set[int] = set()
        self.held: list[Any] = []
        self.job = Job(lambda: (SharedStore(limit), None))
        self.job.answer()

    def ask(self, who: int, what: str, numbers: Any = ()) -> Any:
        who %= len(self.handles) + 1
        if who == len(self.handles):
            return self.job.ask(work, what, numbers)
        return work(self.handles[who], what, numbers)

    @rule(numbers=NUMBERS, who=WHO)
    def put(self, numbers: Any, who: int) -> None:
        """What was stored is there; while nothing is dead or idle, it stays."""
        taken = set(self.ask(who, "put", numbers))
        assert not self.keeps or self.stored & set(numbers) <= taken
        self.stored |= taken

    @rule(numbers=NUMBERS, who=WHO)
    def get(self, numbers: Any, who: int) -> None:
        """Every value is that of a fresh decode, in all processes."""
        there = set(self.ask(who, "right", numbers))
        assert there <= self.stored
        assert not self.keeps or there == self.stored & set(numbers)
        self.held += [(n, array.array, array.array.copy()) for n, array in self.read(0, numbers)]

    def read(self, handle: int, numbers: Any) -> Any:
        store = files_in(self.handles[handle])

        return [(n, stored) for n in numbers if (stored := store.get(key_of(n))) is not None]

    @rule(who=WHO)
    def poll(self, who: int) -> None:
        """Tables are made, and let go of."""
        self.ask(who, "poll")

    @rule(numbers=NUMBERS, step=st.integers(1, 80), opens=st.booleans())
    def kill_a_process(self, numbers: Any, step: int, opens: bool) -> None:
        """Nothing wrong is left, and nothing locked."""

        def run() -> None:
            die_at(step)
            store = SharedStore(self.limit) if opens else self.handles[0]
            store.poll()
            put(store, numbers)
            store.close()

        killed(run)
        self.stored |= set(right(self.handles[0], numbers))
        for table in self.handles[0]._tables:
            fd = table.segment.reopen()
            assert flock_fd(fd)
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)
        with registry.creating(wait_s=0.0) as is_alone:
            assert is_alone

    @rule(numbers=NUMBERS, steps=st.lists(st.integers(1, 200), min_size=2, max_size=3))
    def kill_processes_that_work_at_once(self, numbers: Any, steps: list[int]) -> None:
        """Whatever they did at the same time, the values are right."""
        pids = []
        for place, step in enumerate(steps):
            pid = os.fork()
            if pid == 0:
                with contextlib.suppress(BaseException):
                    die_at(step)
                    put(self.handles[0], numbers[place:] + numbers[:place])
                os.kill(os.getpid(), signal.SIGKILL)
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)
        self.stored |= set(right(self.handles[0], numbers))

    @rule()
    def open_again(self) -> None:
        """Another handle finds the same files."""
        self.handles.append(SharedStore(self.limit))

    @rule(who=WHO)
    def close(self, who: int) -> None:
        """A handle is closed; all others live on."""
        if len(self.handles) > 1:
            self.handles.pop(1 + who % (len(self.handles) - 1)).close()

    @rule()
    def retire(self) -> None:
        """All processes forget all files."""
        for _, table in registry.arenas():
            table.retire()
            table.close()
        self.stored.clear()

    @rule()
    def let_go(self) -> None:
        """Arrays that were handed out have not changed; now they are gone."""
        assert all((array == before).all() for _, array, before in self.held)
        self.held.clear()

    @invariant()
    def the_limit_holds(self) -> None:
        """In each process."""
        for store in getattr(self, "handles", ()):
            store.poll()
            assert store.nbytes <= self.limit

    def teardown(self) -> None:
        if not hasattr(self, "handles"):
            return
        numbers = range(121)
        there = [set(self.ask(who, "right", numbers)) for who in range(len(self.handles) + 1)]
        assert all(each == there[0] for each in there)
        assert there[0] == self.stored or (there[0] <= self.stored and not self.keeps)
        self.let_go()
        for store in self.handles:
            store.close()
        self.job.end()
        self.patch.undo()


@pytest.mark.slow
@pytest.mark.usefixtures("registry_folder")
class TestStoreMachine(StoreMachine.TestCase):  # type: ignore[misc,name-defined]
    """With a registry of its own."""

    settings = settings(max_examples=12, stateful_step_count=20, suppress_health_check=list(HealthCheck))
