"""The prefetcher on the fake device: order, lifetimes, errors; any consumer, and any order of the work."""

from __future__ import annotations

import contextlib
import gc
import random
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.device import copies
from fastload.errors import LoaderClosedError
from tests.device.fake import FakeBackend
from tests.device.loaders import Loader, Stumbles, batch, on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.mark.parametrize(("length", "depth"), [(0, 1), (2, 5), (7, 2)])
def test_all_batches_come_in_order(length: int, depth: int) -> None:
    """Every batch comes once, in order, in each epoch, whatever the depth."""
    fake = FakeBackend()
    prefetcher = on(fake, Loader(length), depth)
    for _ in range(2):
        batches = list(prefetcher)
        fake.drain()

        assert [int(b[0, 0]) for b in batches] == list(range(length))
        assert all(torch.equal(b, batch(n)) for n, b in enumerate(batches))
    fake.check()


def test_depth_batches_are_under_way_behind_the_one_handed_out() -> None:
    """After each next(), ``depth`` more batches were pulled and their copies begun, no more and no fewer."""
    fake, loader = FakeBackend(), Loader(6)
    iterator = iter(on(fake, loader, depth=2))
    assert loader.num_pulled == 0
    found = [(loader.num_pulled, fake.num_copies, fake.num_device_alive) for _ in iterator]

    assert found == [(3, 3, 3), (4, 4, 3), (5, 5, 3), (6, 6, 3), (6, 6, 2), (6, 6, 1)]
    fake.check()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_host_that_runs_ahead_does_not_fill_the_device(depth: int) -> None:
    """However slow the device, the memory of batches that were dropped is enough for those to come."""
    fake = FakeBackend()
    for number, got in enumerate(on(fake, Loader(100), depth)):
        fake.read(got, batch(number))  # runs only when somebody waits for it
    del got

    assert fake.num_reserved <= 2 * depth + 4
    fake.check()


def test_nests_arrive_whole() -> None:
    """Tensors of a nest are copied once each, with their strides; the loader's own batch is not changed."""
    fake = FakeBackend()
    text, tensor = ["a", "b"], torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    tensor = tensor.to(memory_format=torch.channels_last)
    source = {"image": tensor, "names": text, "pair": (batch(4), 7), "none": None, "again": [tensor]}

    (result,) = on(fake, [source])
    fake.drain()

    assert list(result) == list(source)
    assert torch.equal(result["image"], tensor)
    assert result["image"].stride() == tensor.stride()
    assert result["again"][0] is result["image"]
    assert fake.num_copies == 2
    assert torch.equal(result["pair"][0], batch(4))
    assert result["names"] is text
    assert result["pair"][1:] == (7,)
    assert source["image"] is tensor
    assert result["image"] is not tensor
    fake.check()


# --- streams and events -----------------------------------------------------------------------------------


def test_the_stream_that_is_current_at_hand_over_is_the_consumers() -> None:
    """A caller who changes streams between batches gets each one ordered with the stream current then."""
    fake = FakeBackend()
    iterator = iter(on(fake, Loader(2)))
    for name in ("one", "two"):
        fake.use_stream(name)
        fake.read(next(iterator), batch({"one": 0, "two": 1}[name]))

    waits = [line for line in fake.log if "waits for side" in line]
    assert waits == ["one waits for side 1", "two waits for side 1"]
    fake.check()


def test_pageable_memory_is_let_go_once_it_is_pinned() -> None:
    """The loader's own memory, a lent slot for instance, is free before the batch is even handed out."""
    fake = FakeBackend()
    tensors: list[weakref.ref[torch.Tensor]] = []

    def make(number: int) -> torch.Tensor:
        tensor = batch(number)
        tensors.append(weakref.ref(tensor))
        return tensor

    next(iter(on(fake, Loader(9, make), depth=2)))

    assert [tensor() for tensor in tensors] == [None] * 3
    fake.check()


def test_pinned_batches_are_kept_whole_until_their_event() -> None:
    """Not the tensors alone: the batch around them, which may own the memory, lives until the copy ran."""
    fake = FakeBackend()
    owners: list[weakref.ref[Owner]] = []

    class Owner(dict[str, Any]):
        pass

    def make(number: int) -> Owner:
        owner = Owner(x=fake.pinned(batch(number)))
        owners.append(weakref.ref(owner))
        return owner

    iterator = iter(on(fake, Loader(1, make)))
    next(iterator)
    assert owners[0]() is not None
    fake.drain()

    assert list(iterator) == []
    assert owners[0]() is None
    assert fake.num_pinned_alive == 0
    fake.check()


def test_host_memory_that_waits_is_bounded() -> None:
    """With a device that never gets on by itself, no more than depth + 1 batches wait for their copies."""
    fake = FakeBackend()
    most = 0
    for _ in on(fake, Loader(20), depth=3):
        most = max(most, fake.num_waiting_copies)

    assert most == 4
    assert fake.num_waiting_copies == 0
    fake.check()


# --- leaving early ----------------------------------------------------------------------------------------


def test_an_abandoned_iteration_leaves_nothing_pending() -> None:
    """After break, the copies that were begun are done, and neither host nor device memory is kept."""
    fake = FakeBackend()
    for _ in on(fake, Loader(10, lambda n: fake.pinned(batch(n)))):
        break
    del _
    gc.collect()

    assert fake.num_waiting_copies == fake.num_pinned_alive == fake.num_device_alive == 0
    fake.check()


def test_an_abandoned_iteration_lets_the_loaders_iterator_go() -> None:
    """The loader sees the end of its own iterator, so that it can stop its workers."""
    ended = []

    def source() -> Iterator[torch.Tensor]:
        try:
            yield from (batch(n) for n in range(9))
        finally:
            ended.append(True)

    next(iter(on(FakeBackend(), source())))
    gc.collect()

    assert ended == [True]


def test_a_forked_child_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process that did not begin the copies, dropping the iterator asks no event, and frees nothing."""
    fake = FakeBackend()
    iterator = iter(on(fake, Loader(3)))
    next(iterator)
    monkeypatch.setattr(copies.os, "getpid", lambda: -1)
    del iterator

    assert fake.num_waiting_copies == 3
    assert fake.num_pinned_alive == 3
    assert fake.violations == []


# --- errors -----------------------------------------------------------------------------------------------


def test_an_error_comes_out_after_the_batches_before_it() -> None:
    """The loader's own exception object is raised in its batch's turn, and the iteration can go on."""
    error = KeyError("three")
    fake = FakeBackend()
    iterator = iter(on(fake, Stumbles(6, {3: error})))
    before = [next(iterator) for _ in range(3)]
    with pytest.raises(KeyError) as info:
        next(iterator)
    after = list(iterator)
    fake.drain()

    assert info.value is error
    assert [int(b[0, 0]) for b in before + after] == [0, 1, 2, 4, 5]
    fake.check()


def test_nothing_is_pulled_past_an_error_before_it_was_raised() -> None:
    """Whether the loader is asked again after an error is the caller's decision."""
    loader = Stumbles(6, {1: KeyError(1)})
    iterator = iter(on(FakeBackend(), loader, depth=4))
    next(iterator)

    assert next(loader.numbers) == 2


class _Late:
    """A leaf that is moved when its batch is handed over; the move of number 1 raises."""

    def __init__(self, number: int, error: BaseException) -> None:
        self.number, self.error = number, error

    def to(self, device: torch.device, non_blocking: bool = False) -> int:
        if self.number == 1:
            raise self.error
        return self.number


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_interrupt_while_a_batch_is_handed_over_closes_the_iterator(error: BaseException) -> None:
    """An error of the leaf itself costs its batch alone."""
    iterator = iter(on(FakeBackend(), [_Late(number, error) for number in range(3)]))
    assert next(iterator) == 0
    with pytest.raises(type(error)):
        next(iterator)

    if isinstance(error, Exception):
        assert next(iterator) == 2
    else:
        with pytest.raises(LoaderClosedError, match="an exception interrupted this iterator"):
            next(iterator)


def test_a_copy_that_fails_is_raised_in_its_turn() -> None:
    """When the device refuses a batch's second tensor, the first one's source lives until its copy ran."""

    class Full(FakeBackend):
        def copy(self, pinned: torch.Tensor, stream: Any) -> torch.Tensor:
            if self.num_copies == 3:
                self.num_copies += 1
                raise torch.OutOfMemoryError("no room")
            return super().copy(pinned, stream)

    fake = Full()
    iterator = iter(on(fake, Loader(4, lambda n: [batch(n), batch(n + 10)])))
    kept = [next(iterator)]
    with pytest.raises(torch.OutOfMemoryError, match="no room") as caught:
        next(iterator)
    assert caught.value.__notes__ == [
        "raised while a batch was copied ahead; the device holds 3 batches in addition to yours"
    ]
    kept += list(iterator)
    fake.drain()

    assert [int(b[1][0, 0]) for b in kept] == [10, 12, 13]
    fake.check()


def test_a_raised_error_is_not_kept() -> None:
    """An error that was raised dies with its handler, although its traceback goes through our frames."""

    class BrokenError(ValueError):
        pass

    raised: list[weakref.ref[BrokenError]] = []

    def source() -> Iterator[torch.Tensor]:
        error = BrokenError("file")
        raised.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error
        yield

    iterator = iter(on(FakeBackend(), source()))
    gc.disable()  # a circle would not go without it
    try:
        with contextlib.suppress(BrokenError):
            next(iterator)
        alive = raised[0]()
    finally:
        gc.enable()

    assert alive is None


# --- leaves that are no plain tensors ---------------------------------------------------------------------


class Graph:
    """Moves itself; notes how it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def to(self, device: torch.device, non_blocking: bool = False) -> tuple[str, torch.device, bool]:
        self.asked.append(device)
        return "moved", device, non_blocking


def special_leaves() -> dict[str, Any]:
    return {
        "gradient": torch.zeros(2, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.zeros(2)),
        "sparse": torch.eye(2).to_sparse(),
        "subclass": torch.zeros(2).as_subclass(type("Mine", (torch.Tensor,), {})),
        "elsewhere": torch.zeros(2, device="meta"),
        "packed": torch.nn.utils.rnn.pack_sequence([torch.zeros(3)]),
    }


@pytest.mark.parametrize("name", special_leaves())
def test_special_leaves_move_on_the_callers_stream(name: str) -> None:
    """What is no plain CPU tensor is not copied ahead, but moved by its own ``to`` when it is handed over.

    The side stream is behind that: who waits for it waits for all reads of host memory.
    """

    class Notes(FakeBackend):
        def move(self, value: Any) -> Any:
            super().move(value.to("cpu") if name != "elsewhere" else torch.zeros(2))
            return f"{type(value).__name__} moved"

    fake, leaf = Notes(), special_leaves()[name]
    (result,) = on(fake, [{"special": leaf, "plain": batch(1)}])

    assert result["special"] == f"{type(leaf).__name__} moved"
    assert fake.num_copies == 1
    assert fake.log[-3:] == ["move on main", "record on main", "side 1 waits for main"]
    fake.check()


def test_objects_with_a_to_of_their_own_are_moved_without_blocking() -> None:
    """``to(device, non_blocking=True)`` is called once, when the batch is handed over."""
    fake, graph = FakeBackend(), Graph()
    iterator = iter(on(fake, [batch(0), (graph, batch(1))]))
    next(iterator)
    assert graph.asked == []
    moved, _ = next(iterator)

    assert moved == ("moved", fake.device, True)
    assert graph.asked == [fake.device]
    fake.check()


# --- any consumer, any order of the device's work --------------------------------------------------------


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
