"""SharedMemoryCache against a dict: stored, reopened, killed or held up, no sample is ever wrong."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fastload.cache.locks import try_lock
from fastload.cache.ram.shared import SharedMemoryCache
from fastload.memory.segment import Segment
from tests.cache.zoo import Images, MixedImages, RaggedImages
from tests.kit.batches import assert_same_samples

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_SAMPLES = 24
INDICES = st.integers(0, NUM_SAMPLES - 1)


def killed_at(call: int, work: Callable[[], object]) -> None:
    """Run in a fork that SIGKILL ends half-way through its `call`-th write to the segment, or after all."""
    pid = os.fork()
    if pid == 0:
        real, calls = os.pwritev, 0

        def write(fd: int, buffers: Any, offset: int) -> int:
            nonlocal calls
            calls += 1
            if calls == call:
                data = b"".join(bytes(buffer) for buffer in buffers)
                real(fd, [data[: len(data) // 2]], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(fd, buffers, offset)

        def write_one(fd: int, data: Any, offset: int) -> int:
            return write(fd, [data], offset)

        os.pwritev, os.pwrite = write, write_one  # type: ignore[assignment]
        with contextlib.suppress(BaseException):
            work()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


class CacheMachine(RuleBasedStateMachine):
    """Several handles of one cache; the model is the set of samples that are known to be stored."""

    @initialize(
        kind=st.sampled_from([Images, RaggedImages, MixedImages]),
        budget=st.sampled_from([1 << 20, 8192, 20_000, 60_000]),
    )
    def make(self, kind: type[Images], budget: int) -> None:
        self.dataset = kind(NUM_SAMPLES)
        examples = [self.dataset.sample(index) for index in (0, NUM_SAMPLES // 2, NUM_SAMPLES - 1)]
        self.handles = [SharedMemoryCache(NUM_SAMPLES, examples, budget=budget)]
        self.budget = budget
        self.stored: set[int] = set()
        self.held: list[tuple[int, Any]] = []

    def handle(self, number: int) -> SharedMemoryCache:
        return self.handles[number % len(self.handles)]

    @rule(index=INDICES, number=st.integers(0, 9))
    def put(self, index: int, number: int) -> None:
        """A sample that was taken stays."""
        if self.handle(number).put(index, self.dataset.sample(index)):
            self.stored.add(index)
        else:
            assert index not in self.stored

    @rule(index=INDICES, number=st.integers(0, 9))
    def get(self, index: int, number: int) -> None:
        """What is there is right; what was stored is there."""
        cache = self.handle(number)
        sample = cache.get(index)
        assert (sample is not None) == (index in cache)
        if sample is None:
            assert index not in self.stored
        else:
            assert_same_samples(sample, self.dataset.sample(index))
            self.held.append((index, sample))

    @rule(indices=st.lists(INDICES, min_size=1, max_size=6), number=st.integers(0, 9))
    def gather(self, indices: list[int], number: int) -> None:
        """A batch is made of the samples' own bytes, or not made."""
        batch = self.handle(number).gather(np.array(indices), np.empty)
        if batch is not None:
            for row, index in enumerate(indices):
                assert np.array_equal(batch[0][row].numpy(), self.dataset.sample(index)[0])
                assert batch[1][row] == index

    @rule(through=st.sampled_from(["pickle", "descriptor"]))
    def open_again(self, through: str) -> None:
        """Another handle sees the same samples, through a pickle or through the segment alone."""
        first = self.handles[0]
        if through == "pickle":
            self.handles.append(pickle.loads(pickle.dumps(first)))
        else:
            self.handles.append(SharedMemoryCache.attach(Segment.attach(os.dup(first.fd))))
            assert self.handles[-1].layout == first.layout

    @rule(number=st.integers(0, 9))
    def close(self, number: int) -> None:
        """A handle is closed; the others live on."""
        if len(self.handles) > 1:
            self.handles.pop(number % len(self.handles)).close()

    @rule(indices=st.lists(INDICES, min_size=1, max_size=8, unique=True), call=st.integers(1, 12))
    def kill_a_writer(self, indices: list[int], call: int) -> None:
        """A process is killed in the middle of a write; nothing wrong is left, and nothing locked."""
        cache = self.handles[0]
        killed_at(call, lambda: [cache.put(index, self.dataset.sample(index)) for index in indices])
        fd = cache._now.segment.reopen()
        assert try_lock(fd)
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    @rule(index=INDICES)
    def put_under_a_held_lock(self, index: int) -> None:
        """While another holds the lock a put may fail, and harms nothing."""
        cache = self.handles[0]
        fd = cache._now.segment.reopen()
        assert try_lock(fd)
        try:
            self.put(index, 0)
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    @invariant()
    def the_budget_holds(self) -> None:
        """Memory in use stays within the budget, to a page for each part."""
        if hasattr(self, "handles"):
            assert self.handles[0].nbytes <= max(self.budget, 8192) + 6 * 4096

    def teardown(self) -> None:
        """All samples that are left are right, and those that were handed out have not changed."""
        if not hasattr(self, "handles"):
            return
        for index in range(NUM_SAMPLES):
            sample = self.handles[0].get(index)
            assert (index not in self.stored) or sample is not None
            if sample is not None:
                assert_same_samples(sample, self.dataset.sample(index))
        for cache in self.handles:
            cache.close()
        for index, sample in self.held:
            assert_same_samples(sample, self.dataset.sample(index))
        self.held.clear()


TestCacheMachine = pytest.mark.slow(CacheMachine.TestCase)
TestCacheMachine.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
