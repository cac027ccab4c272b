"""What every store promises, as one suite: a subclass says how a store is made, and inherits the tests."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import signal
import threading
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fastload.cache.records import LMDB_PLACE, decode, encode, is_intact
from tests.kit.jobs import Job

NUM_KEYS = 12


def key_of(number: int) -> bytes:
    """Keys differ at their ends, and in their first bytes, too."""
    return (number * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "little").ljust(16, b"k")


@functools.lru_cache(maxsize=256)
def array_of(number: int) -> Any:
    """A value: some are small, some are larger than a page, and than a chunk of a store."""
    nbytes = (100, 5_000, 70_000, 300_000)[number % 4] + number
    return np.random.RandomState(number).randint(0, 256, nbytes, np.uint8)


def record_of(number: int) -> bytes:
    """The record of a value."""
    return encode(array_of(number), key_of(number))


def put(store: Any, numbers: Any) -> list[int]:
    """Store what a dataset would store; the numbers of what was kept."""
    return [
        number
        for number in numbers
        if store.put(key_of(number), [record_of(number)[:50], record_of(number)[50:]])
    ]


def right(store: Any, numbers: Any) -> list[int]:
    """The numbers of the records that are there, each of which is right."""
    there = []
    for number in numbers:
        key = key_of(number)
        record = store.get(key)
        if record is not None:
            assert is_intact(record[: len(record_of(number))], key)
            assert np.array_equal(decode(record), array_of(number))
            there.append(number)
    return there


def flush(store: Any) -> None:
    """Run in a job."""
    store.flush()


def spawned(store: Any, numbers: list[int], answers: Any) -> None:
    """Run in a process that inherits nothing: what is there, and something new."""
    answers.put(right(store, range(NUM_KEYS)))
    put(store, numbers)
    store.close()
    answers.put(None)


class Model(RuleBasedStateMachine):
    """A store beside a set of numbers: this process, and jobs that come, go and are killed."""

    contract: StoreContract
    folder: Any

    def __init__(self) -> None:
        super().__init__()
        self.store = self.contract.make(self.folder())
        self.jobs: list[Job] = []
        self.stored: set[int] = set()  # by all to be found
        self.pending: list[set[int]] = [set()]  # by those who put them to be found; this process is first

    def _ask(self, who: int, work: Any, *args: Any) -> Any:
        return self.jobs[who - 1].ask(work, *args) if who else work(self.store, *args)

    def _who(self, data: Any) -> int:
        return int(data.draw(st.integers(0, len(self.jobs)), label="who"))

    @rule(data=st.data(), numbers=st.lists(st.integers(0, NUM_KEYS - 1), max_size=4))
    def put(self, data: Any, numbers: list[int]) -> None:
        who = self._who(data)
        kept = self._ask(who, put, numbers)
        assert kept == numbers  # there is room
        self.pending[who] |= {*numbers} - self.stored

    @rule(data=st.data())
    def flush(self, data: Any) -> None:
        who = self._who(data)
        self._ask(who, flush)
        self.stored |= self.pending[who]
        self.pending[who] = set()

    @rule(data=st.data())
    def read(self, data: Any) -> None:
        who = self._who(data)
        there = {*self._ask(who, right, range(NUM_KEYS))}
        assert self.stored | self.pending[who] <= there <= self.stored.union(*self.pending)

    @rule(data=st.data())
    def ask_what_is_held(self, data: Any) -> None:
        keys = [key_of(number) for number in range(NUM_KEYS)]
        held = self.store.holds(np.frombuffer(b"".join(keys), np.uint8).reshape(NUM_KEYS, 16))
        assert held.dtype == np.bool_
        there = {*np.flatnonzero(held).tolist()}
        assert self.stored | self.pending[0] <= there <= self.stored.union(*self.pending)

    @rule()
    def fork(self) -> None:
        if len(self.jobs) < 2:
            job = Job(lambda: (self.store, None))
            job.answer()
            self.jobs.append(job)
            self.pending.append(set())

    @rule(data=st.data())
    def kill(self, data: Any) -> None:
        if self.jobs:
            who = int(data.draw(st.integers(1, len(self.jobs)), label="killed"))
            self.jobs.pop(who - 1).end()
            # What was not flushed may be there, or not.
            there = {*right(self.store, self.pending.pop(who) - self.stored)}
            self.stored |= there - self.pending[0]

    @precondition(lambda self: self.contract.reopens)
    @rule()
    def close(self) -> None:
        """It is opened again by the next access."""
        self.store.close()
        self.stored |= self.pending[0]
        self.pending[0] = set()

    @invariant()
    def reads_nothing_that_was_not_put(self) -> None:
        assert {*right(self.store, range(NUM_KEYS))} <= self.stored.union(*self.pending)

    def teardown(self) -> None:
        for job in self.jobs:
            job.end()
        self.store.close()


class StoreContract(ABC):
    """Tests of a store.

    Attributes:
        reopens: Whether a store that was closed is opened by the next access.
    """

    reopens = True

    @abstractmethod
    def make(self, folder: Any) -> Any:
        """An empty store with room for all that these tests put."""

    def test_finds_what_a_dict_would_find(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        """Whoever puts, flushes, forks, ends and is killed."""
        kind = type(
            "Model", (Model,), {"contract": self, "folder": lambda _: tmp_path_factory.mktemp("store")}
        )
        run_state_machine_as_test(kind, settings=settings(max_examples=15, stateful_step_count=20))

    def test_records_come_back_byte_for_byte(self, tmp_path: Any) -> None:
        """Read-only, where their arrays are aligned, and others than those that are missing."""
        store = self.make(tmp_path)
        assert put(store, range(8)) == [*range(8)]
        for _ in range(2):
            for number in range(8):
                record = store.get(key_of(number))
                assert bytes(record[: len(record_of(number))]) == record_of(number)
                with pytest.raises(ValueError, match="WRITEABLE"):
                    np.frombuffer(record, np.uint8).flags.writeable = True
                assert np.frombuffer(record, np.uint8).ctypes.data % 64 == (LMDB_PLACE if store.lasts else 0)
            assert store.get(key_of(9)) is None
            store.flush()
        assert store.nbytes > 0

    def test_a_key_that_is_stored_is_not_stored_again(self, tmp_path: Any) -> None:
        """The first record stays, before and after a flush, and the others take no memory."""
        store = self.make(tmp_path)
        key, before = key_of(3), 0
        for number in (3, 7, 11):  # all of them large
            assert store.put(key, [encode(array_of(number), key)])
            assert right(store, [3]) == [3]
            if number == 7:
                store.flush()
                before = store.nbytes
        store.flush()
        assert right(store, [3]) == [3]
        assert store.nbytes == before
        assert before < 2 * array_of(3).nbytes

    def test_records_outlive_the_store(self, tmp_path: Any) -> None:
        """What was handed out stays valid and unchanged."""
        store = self.make(tmp_path)
        put(store, range(4))
        store.flush()
        held = [store.get(key_of(number)) for number in range(4)]
        put(store, range(4, NUM_KEYS))
        store.close()
        del store
        gc.collect()
        assert [np.array_equal(decode(record), array_of(number)) for number, record in enumerate(held)] == [
            True
        ] * 4

    def test_buffers_are_not_referred_to_afterwards(self, tmp_path: Any) -> None:
        """Whoever put them may change them, before and after a flush."""
        store = self.make(tmp_path)
        buffer = bytearray(record_of(2))
        assert store.put(key_of(2), [buffer])
        buffer[:] = bytes(len(buffer))
        assert right(store, [2]) == [2]
        store.flush()
        assert right(store, [2]) == [2]

    def test_threads_share_a_store(self, tmp_path: Any) -> None:
        """All that they put is there, while they read and fork."""
        store = self.make(tmp_path)
        forks: list[int] = []

        def work(number: int) -> bool:
            kept = put(store, [number]) == [number]
            if number == 5:
                pid = os.fork()
                if not pid:
                    os._exit(right(store, [0]) not in ([], [0]))
                forks.append(os.waitpid(pid, 0)[1])
            return kept and right(store, [number]) == [number]

        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(work, range(NUM_KEYS)))
        assert forks == [0]
        store.flush()
        assert right(store, range(NUM_KEYS)) == [*range(NUM_KEYS)]

    def test_a_fork_while_a_thread_reads_and_writes(self, tmp_path: Any) -> None:
        """The child reads and stores, and so does its child."""
        store, ends = self.make(tmp_path), threading.Event()
        put(store, range(4))
        store.flush()

        def work() -> None:
            while not ends.is_set():
                right(store, range(4))
                put(store, range(4, 6))

        thread = threading.Thread(target=work)
        thread.start()
        try:
            for number in range(6, 10):
                pid = os.fork()
                if not pid:
                    failed = right(store, range(4)) != [*range(4)]
                    pid = os.fork()
                    if not pid:
                        failed = right(store, range(4)) != [*range(4)]
                        put(store, [number])
                        store.close()
                        os._exit(failed)
                    os._exit(failed or os.waitpid(pid, 0)[1] != 0)
                assert os.waitpid(pid, 0)[1] == 0
        finally:
            ends.set()
            thread.join()
        assert right(store, range(6, 10)) == [*range(6, 10)]

    @pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.thorough)])
    def test_other_processes_share_a_pickled_store(self, method: str, tmp_path: Any) -> None:
        """Also while this one has it open."""
        store, context = self.make(tmp_path), multiprocessing.get_context(method)
        put(store, range(4))
        store.flush()
        answers = context.Queue()
        process = context.Process(target=spawned, args=(store, [5, 6], answers))
        process.start()
        assert answers.get(timeout=60) == [0, 1, 2, 3]
        assert answers.get(timeout=60) is None
        process.join()
        answers.close()
        answers.join_thread()
        assert right(store, range(NUM_KEYS)) == [0, 1, 2, 3, 5, 6]

    def test_kills_leave_whole_records(self, tmp_path: Any) -> None:
        """Whenever they come; what was flushed before is there, and others go on."""
        store = self.make(tmp_path)
        for kill in range(8):
            reader, writer = os.pipe()
            pid = os.fork()
            if not pid:
                for number in range(NUM_KEYS):
                    put(store, [number])
                    store.flush()
                    os.write(writer, b".")
                os._exit(1)
            os.close(writer)
            for _ in range(kill):
                os.read(reader, 1)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(reader)
            assert right(store, range(NUM_KEYS))[:kill] == [*range(kill)]
        assert put(store, range(NUM_KEYS)) == [*range(NUM_KEYS)]
        store.flush()
        assert right(store, range(NUM_KEYS)) == [*range(NUM_KEYS)]
