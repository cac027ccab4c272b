"""The prefetcher model-checked: any consumer, and any order in which the device gets its work done."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.device.fake import FakeBackend
from tests.device.loaders import Loader, batch, on

if TYPE_CHECKING:
    from collections.abc import Callable


# --- any consumer, any order of the device's work ---------------------------------------------------------


class Consumer:
    """Takes batches and holds, drops, aliases and reads them; the device gets on as ``choose`` says."""

    def __init__(self, fake: FakeBackend, depth: int, choose: Callable[[int], int]) -> None:
        self.fake = fake
        self.choose = choose
        self.held: list[tuple[torch.Tensor, torch.Tensor]] = []  # on the device, and what it should hold
        self.prefetcher = on(fake, Loader(12, self.make), depth)

    def make(self, number: int) -> dict[str, Any]:
        x, y = batch(number + 1), torch.arange(number, number + 4, dtype=torch.float32)
        return {"x": self.fake.pinned(x) if self.choose(2) else x, "n": [number, y]}

    def run(self) -> None:
        for _ in range(2):
            for got in self.prefetcher:
                self.take(got)
                if self.choose(12) == 11:
                    break  # abandon the epoch
        self.held.clear()

    def take(self, got: dict[str, Any]) -> None:
        number, y = got["n"]
        expected = torch.arange(number, number + 4, dtype=torch.float32)
        self.fake.read(got["x"], batch(number + 1))
        how = self.choose(4)
        if how == 1:
            self.held.append((y, expected))
        elif how == 2:
            self.held.append((y[1:3], expected[1:3]))  # an alias: the batch itself goes
        elif how == 3 and self.held:
            for tensor, content in self.held:  # a late use, on the stream that first had it
                self.fake.read(tensor, content)
            del self.held[self.choose(len(self.held)) :]
        for _ in range(self.choose(3)):
            stream = self.fake.streams[self.choose(len(self.fake.streams))]
            for _ in range(self.choose(10)):  # in bursts, so that one stream can be far behind the other
                self.fake.advance(stream)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_no_consumer_and_no_order_of_work_finds_unordered_use(choices: random.Random, depth: int) -> None:
    """Whoever holds, drops, aliases or delays batches reads what was sent, however the streams get on."""
    fake = FakeBackend()
    Consumer(fake, depth, choices.randrange).run()
    fake.check()


# --- the fake itself finds what it is there to find -------------------------------------------------------


class NoWait(FakeBackend):
    def wait_event(self, stream: Any, event: Any) -> None: ...


class NoRecord(FakeBackend):
    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None: ...


class NoHostWait(FakeBackend):
    def is_done(self, event: Any) -> bool:
        return True

    def synchronize(self, event: Any) -> None: ...


class NoPin(FakeBackend):
    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (NoWait, "did not read what the batch held"),
        (NoRecord, "died that main has to read"),
        (NoHostWait, "pinned memory died"),
        (NoPin, "not pinned"),
    ],
)
def test_each_rule_taken_away_is_noticed(broken: type[FakeBackend], found: str) -> None:
    """Without any one of the prefetcher's steps, the same consumers do find unordered use."""
    noticed = 0
    for seed in range(40):
        fake = broken()
        Consumer(fake, 2, random.Random(seed).randrange).run()
        fake.drain()
        noticed += any(found in violation for violation in fake.violations)

    assert noticed > 10


def test_the_fake_uses_memory_again_too_early_if_nobody_recorded_it() -> None:
    """What NoRecord breaks is real: the next batch is written over one that still has to be read."""
    fake = NoRecord()
    for number, got in enumerate(on(fake, Loader(6), depth=1)):
        fake.read(got, batch(number))
    del got
    while fake.advance(fake.streams[1]):
        pass
    fake.drain()

    assert any("did not read" in violation for violation in fake.violations)
