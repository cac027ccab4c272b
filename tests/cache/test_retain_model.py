"""`retain` against a model: several handles and processes, held views, and makers that are killed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fastload.cache.ram import generation
from fastload.cache.ram.shared import SharedMemoryCache
from tests.cache.zoo import Images, MixedImages, RaggedImages
from tests.kit.batches import assert_same_samples

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

NUM_SAMPLES = 24
INDICES = st.integers(0, NUM_SAMPLES - 1)
PARTS = st.none() | st.sets(INDICES, max_size=NUM_SAMPLES)
FORK = multiprocessing.get_context("fork")


def as_indices(part: set[int] | None) -> Any:
    return None if part is None else np.array(sorted(part), np.intp)


def serve(cache: SharedMemoryCache, dataset: Images, pipe: Connection, copied: list[Connection]) -> None:
    """Run in a child: do what the pipe asks for until the parent is gone, whose pipes a fork has copied."""
    for other in copied:
        other.close()
    while True:
        try:
            work, value = pipe.recv()
        except EOFError:
            return
        if work == "put":
            pipe.send(cache.put(value, dataset.sample(value)))
        elif work == "get":
            sample = cache.get(value)
            if sample is not None:
                assert_same_samples(sample, dataset.sample(value))
            pipe.send(sample is not None)
        elif work == "retain":
            cache.retain(as_indices(value))
            pipe.send(cache.generation)


def retain_and_die(cache: SharedMemoryCache, part: set[int] | None, when: str) -> None:
    """Run in a fork: SIGKILL ends it in the middle of retain()."""

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if when == "before the pointer":
        generation.Generation.announce = die  # type: ignore[method-assign]
    cache.retain(as_indices(part))
    die()


class RetainMachine(RuleBasedStateMachine):
    """Handles of one cache, in this process and in two others.

    The model is the set of samples that may be stored, and the set of those that are known to be stored.
    """

    @initialize(
        kind=st.sampled_from([Images, RaggedImages, MixedImages]),
        budget=st.sampled_from([1 << 20, 8192, 20_000, 40_000]),
    )
    def make(self, kind: type[Images], budget: int) -> None:
        self.dataset = kind(NUM_SAMPLES)
        examples = [self.dataset.sample(index) for index in (0, NUM_SAMPLES // 2, NUM_SAMPLES - 1)]
        self.handles = [SharedMemoryCache(NUM_SAMPLES, examples, budget=budget)]
        self.budget = budget
        self.retained = set(range(NUM_SAMPLES))
        self.stored: set[int] = set()
        self.held: list[tuple[int, Any]] = []
        self.children: list[tuple[Any, Connection]] = []
        for _ in range(2):
            pipe, other = FORK.Pipe()
            copied = [pipe, *(earlier for _, earlier in self.children)]
            child = FORK.Process(target=serve, args=(self.handles[0], self.dataset, other, copied))
            child.start()
            other.close()
            self.children.append((child, pipe))

    def ask(self, number: int, work: str, value: Any) -> Any:
        """Let a handle of this process, or of another one, do something."""
        places = len(self.handles) + len(self.children)
        number %= places
        if number >= len(self.handles):
            pipe = self.children[number - len(self.handles)][1]
            pipe.send((work, value))
            return pipe.recv()
        cache = self.handles[number]
        if work == "put":
            return cache.put(value, self.dataset.sample(value))
        if work == "retain":
            cache.retain(as_indices(value))
            return cache.generation
        sample = cache.get(value)
        assert (sample is not None) == (value in cache)
        if sample is not None:
            assert_same_samples(sample, self.dataset.sample(value))
            self.held.append((value, sample))
        return sample is not None

    @rule(index=INDICES, number=st.integers(0, 9))
    def put(self, index: int, number: int) -> None:
        """A sample that was taken is retained, and stays."""
        if self.ask(number, "put", index):
            assert index in self.retained
            self.stored.add(index)
        else:
            assert index not in self.stored

    @rule(number=st.integers(0, 9))
    def put_all(self, number: int) -> None:
        """As many as fit; a budget that is enough takes all that are retained."""
        for index in range(NUM_SAMPLES):
            self.put(index, number)
        if self.budget == 1 << 20:
            assert self.stored == self.retained

    @rule(index=INDICES, number=st.integers(0, 9))
    def get(self, index: int, number: int) -> None:
        """What was stored and is retained is there, in all processes; what is not retained is not."""
        assert self.ask(number, "get", index) == (index in self.stored)

    @rule(indices=st.lists(INDICES, min_size=1, max_size=6), number=st.integers(0, 9))
    def gather(self, indices: list[int], number: int) -> None:
        """A batch is made of the samples' own bytes, or not made."""
        batch = self.handles[number % len(self.handles)].gather(np.array(indices), np.empty)
        if batch is not None:
            assert set(indices) <= self.stored
            for row, index in enumerate(indices):
                assert np.array_equal(batch[0][row].numpy(), self.dataset.sample(index)[0])
                assert batch[1][row] == index

    @rule(part=PARTS, number=st.integers(0, 9))
    def retain(self, part: set[int] | None, number: int) -> None:
        """All handles see the same part from here on."""
        self.ask(number, "retain", part)
        retained = set(range(NUM_SAMPLES)) if part is None else part
        if retained != self.retained:
            self.stored.clear()
        self.retained = retained

    @rule(part=PARTS, numbers=st.lists(st.integers(0, 9), min_size=2, max_size=3))
    def retain_the_same(self, part: set[int] | None, numbers: list[int]) -> None:
        """The calls after the first one change nothing."""
        self.retain(part, numbers[0])
        assert len({self.ask(number, "retain", part) for number in numbers}) == 1

    @rule(part=PARTS, when=st.sampled_from(["before the pointer", "behind the pointer"]))
    def kill_a_maker(self, part: set[int] | None, when: str) -> None:
        """Its generation is gone with it."""
        cache = self.handles[0]
        pid = os.fork()
        if pid == 0:
            retain_and_die(cache, part, when)
        os.waitpid(pid, 0)
        missing = set(cache.missing().tolist())
        assert missing <= self.retained

    @rule()
    def open_again(self) -> None:
        """A pickle leads to the same samples."""
        self.handles.append(pickle.loads(pickle.dumps(self.handles[0])))

    @rule(number=st.integers(1, 9))
    def close(self, number: int) -> None:
        """A handle that all others have followed is closed; they live on."""
        if len(self.handles) > 1:
            for place in range(len(self.handles) + len(self.children)):
                self.ask(place, "get", 0)
            self.handles.pop(1 + number % (len(self.handles) - 1)).close()

    @rule()
    def let_go(self) -> None:
        """Samples that were handed out have not changed; now they are gone."""
        for index, sample in self.held:
            assert_same_samples(sample, self.dataset.sample(index))
        self.held.clear()

    @invariant()
    def the_budget_holds(self) -> None:
        """The memory of a generation stays within the budget, to a page for each part."""
        if hasattr(self, "handles"):
            assert self.handles[0].nbytes <= max(self.budget, 8192) + 6 * 4096

    def teardown(self) -> None:
        """All samples that are left are right, and those that were handed out have not changed."""
        if not hasattr(self, "handles"):
            return
        for number in range(len(self.handles) + len(self.children)):
            for index in range(NUM_SAMPLES):
                assert self.ask(number, "get", index) == (index in self.stored)
        for cache in self.handles:
            cache.close()
        self.let_go()
        for child, pipe in self.children:
            pipe.close()
            child.join()
            child.close()


TestRetainMachine = pytest.mark.slow(RetainMachine.TestCase)
TestRetainMachine.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
