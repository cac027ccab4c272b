"""Caches in RAM against a set: several handles and processes, held samples, locks, and kills."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import pickle
import signal
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fastload.cache.ram.arena import Arena
from fastload.cache.ram.shared import SharedMemoryCache
from fastload.memory.segment import Segment
from fastload.nested.tree import first_difference
from fastload.system.locks import flock_fd
from tests.cache.zoo import Images, MixedImages, RaggedImages
from tests.kit.jobs import Job

NUM_SAMPLES = 24
INDICES = st.integers(0, NUM_SAMPLES - 1)
NUMBERS = st.integers(0, 9)  # of a handle, or of another process


def use(cache: SharedMemoryCache, dataset: Images, work: str, indices: Any) -> Any:
    """Let a handle do something, in any process; gives whether each sample was taken, or is there."""
    if work == "put":
        return [cache.put(index, dataset.sample(index)) for index in indices]
    samples = [cache.get(index) for index in indices]
    for index, sample in zip(indices, samples, strict=True):
        assert (sample is not None) == (index in cache)
        assert sample is None or first_difference(sample, dataset.sample(index)) is None
    return [sample is not None for sample in samples]


def killed(work: Any) -> None:
    """Run in a fork that SIGKILL ends, if not earlier then after all."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            work()
        die()
    os.waitpid(pid, 0)


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_write(call: int) -> None:
    """Let this process die half-way through its `call`-th write to a segment."""
    real, calls = os.pwritev, itertools.count(1)

    def write(fd: int, buffers: Any, offset: int) -> int:
        if next(calls) == call:
            data = b"".join(bytes(buffer) for buffer in buffers)
            real(fd, [data[: len(data) // 2]], offset)
            die()
        return real(fd, buffers, offset)

    os.pwritev, os.pwrite = write, lambda fd, data, offset: write(fd, [data], offset)  # type: ignore[assignment]


class RamMachine(RuleBasedStateMachine):
    """Handles of one cache, in this process and in another one; the model is the set of stored samples."""

    @initialize(
        kind=st.sampled_from([Images, RaggedImages, MixedImages]),
        max_memory=st.sampled_from([1 << 20, 8192, 20_000, 40_000, 60_000]),
    )
    def make(self, kind: Any, max_memory: int) -> None:
        self.dataset = kind(NUM_SAMPLES)
        examples = [self.dataset.sample(index) for index in (0, NUM_SAMPLES // 2, NUM_SAMPLES - 1)]
        self.handles = [SharedMemoryCache(NUM_SAMPLES, examples, max_memory=max_memory)]
        self.max_memory = max_memory
        self.stored: set[int] = set()
        self.held: list[tuple[int, Any]] = []
        self.job = Job(lambda: (self.handles[0], None))
        self.job.answer()

    def ask(self, number: int, work: str, indices: Any) -> Any:
        """Let a handle of this process, or the other process, do something."""
        number %= len(self.handles) + 1
        if number == len(self.handles):
            return self.job.ask(use, self.dataset, work, indices)
        return use(self.handles[number], self.dataset, work, indices)

    @contextlib.contextmanager
    def locked(self) -> Any:
        """Somebody else holds the lock, which nobody else held before."""
        fd = self.handles[0]._arena.segment.reopen()
        assert flock_fd(fd)
        yield
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    @rule(indices=st.lists(INDICES, min_size=1, max_size=6), number=NUMBERS)
    def put(self, indices: Any, number: int) -> None:
        """A sample that was taken stays; to store it again takes no memory."""
        before = self.handles[0].nbytes
        answers = self.ask(number, "put", indices)
        taken = {index for index, was_taken in zip(indices, answers, strict=True) if was_taken}
        assert self.stored & set(indices) <= taken
        assert not taken <= self.stored or self.handles[0].nbytes == before
        self.stored |= taken

    @rule(number=NUMBERS)
    def put_all(self, number: int) -> None:
        """As many as fit, whichever they are."""
        self.put(range(NUM_SAMPLES), number)
        assert len(self.stored) == NUM_SAMPLES or self.max_memory < 1 << 20

    @rule(index=INDICES)
    def put_under_a_held_lock(self, index: int) -> None:
        """A sample that needs the lock is left out at once while another holds it."""
        stored = set(self.stored)
        with self.locked():
            self.put([index], 0)
        assert self.handles[0].layout != "ragged" or self.stored == stored

    @rule(index=INDICES, number=NUMBERS)
    def get(self, index: int, number: int) -> None:
        """What was stored is there, in all processes."""
        assert self.ask(number, "get", [index]) == [index in self.stored]
        self.held.append((index, self.handles[0].get(index)))

    @rule(indices=st.lists(INDICES, min_size=1, max_size=6), number=NUMBERS)
    def gather(self, indices: list[int], number: int) -> None:
        """A batch has the samples' own bytes; of rows of columns, it is always made."""
        cache = self.handles[number % len(self.handles)]
        batch = cache.gather(np.array(indices), np.empty)
        are_rows = all(self.dataset.sample(index)[0].shape == (32, 24, 3) for index in indices)
        is_batch = cache.layout == "uniform" and set(indices) <= self.stored and are_rows
        assert batch is not None or not is_batch
        if batch is not None:
            for row, index in enumerate(indices):
                assert np.array_equal(batch[0][row].numpy(), self.dataset.sample(index)[0])
                assert batch[1][row] == index

    @rule(indices=st.lists(INDICES, min_size=1, max_size=8, unique=True), call=st.integers(1, 12))
    def kill_a_writer(self, indices: list[int], call: int) -> None:
        """Nothing wrong is left, and nothing locked."""
        cache = self.handles[0]
        killed(lambda: (die_in_write(call), [cache.put(i, self.dataset.sample(i)) for i in indices]))
        self.stored |= {index for index in set(indices) if index in cache}
        with self.locked():
            pass

    @rule(through=st.sampled_from(["pickle", "descriptor"]))
    def open_again(self, through: str) -> None:
        """Another handle sees the same samples, through a pickle or through the segment alone."""
        first = self.handles[0]
        if through == "pickle":
            self.handles.append(pickle.loads(pickle.dumps(first)))
        else:
            self.handles.append(
                SharedMemoryCache.of(Arena.attach(Segment.attach(os.dup(first._arena.segment.fd))))
            )
        assert self.handles[-1].layout == first.layout

    @rule(number=st.integers(1, 9))
    def close(self, number: int) -> None:
        """A handle is closed; all others live on."""
        if len(self.handles) > 1:
            self.handles.pop(1 + number % (len(self.handles) - 1)).close()

    @rule()
    def let_go(self) -> None:
        """Samples that were handed out have not changed; now they are gone."""
        for index, sample in self.held:
            assert sample is None or first_difference(sample, self.dataset.sample(index)) is None
        self.held.clear()

    @invariant()
    def the_books_are_right(self) -> None:
        """The budget holds, to a page for each part."""
        if hasattr(self, "handles"):
            cache = self.handles[-1]
            assert cache.num_cached == len(self.stored)
            lacking = sorted(set(range(NUM_SAMPLES)) - self.stored)
            assert set(cache.missing()) <= set(lacking)
            assert cache.missing().tolist() == lacking or self.max_memory < 1 << 20
            assert cache.nbytes <= max(self.max_memory, 8192) + 6 * 4096

    def teardown(self) -> None:
        """All samples that are left are right, and those that were handed out have not changed."""
        if not hasattr(self, "handles"):
            return
        for number in range(len(self.handles) + 1):
            there = self.ask(number, "get", range(NUM_SAMPLES))
            assert there == [index in self.stored for index in range(NUM_SAMPLES)]
        for cache in self.handles:
            cache.close()
        self.let_go()
        self.job.end()


TestRamMachine = pytest.mark.slow(RamMachine.TestCase)
TestRamMachine.settings = settings(
    max_examples=25, stateful_step_count=25, suppress_health_check=list(HealthCheck)
)
