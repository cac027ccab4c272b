"""Slots that the device reads in place: when they are registered, when not, and in which order all ends."""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
import os
import types
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload import DataLoader
from fastload.device import cuda
from fastload.device.copies import CopiesAhead
from fastload.device.registered import RegisteredSlots
from fastload.epochs import on_device
from fastload.memory.lease import Memory
from fastload.system import logs
from tests.device.fake import FakeBackend
from tests.device.loaders import on
from tests.kit import datasets

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

IMAGES = datasets.Made(datasets.image, 64)
PERSISTENT: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    """The device of every loader that is asked for one."""
    backend = FakeBackend()
    monkeypatch.setattr(on_device, "choose_backend", lambda device, asker: backend)
    logs.say_once.cache_clear()
    return backend


def to_device(loader: DataLoader, fake: FakeBackend) -> Any:
    """By device=."""
    loader.device = "cuda"
    return loader


def through_prefetcher(loader: DataLoader, fake: FakeBackend) -> Any:
    """By a prefetcher around it."""
    return on(fake, loader)


def shared_memory(nbytes: int = 4096) -> Memory:
    return Memory(mmap.mmap(-1, nbytes), shared=True)


def check_values(batches: list[Any]) -> None:
    for number, (images, labels) in enumerate(batches):
        assert labels.tolist() == list(range(4 * number, 4 * number + 4))
        assert np.array_equal(images.numpy(), np.stack([datasets.image(int(n))[0] for n in labels]))


# --- read in place ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "workers"), [(to_device, {"num_workers": 1}), (through_prefetcher, PERSISTENT)]
)
def test_slots_are_read_in_place_and_registered_once(
    fake: FakeBackend, way: Callable[..., Any], workers: dict[str, Any]
) -> None:
    """Nearly all copies come straight from slots; every registration is undone when the loader is closed."""
    with DataLoader(IMAGES, 4, **workers) as loader:
        batches = way(loader, fake)
        for _ in range(2):
            got = list(batches)
            fake.drain()
            check_values(got)
            num_registered = fake.log.count("register")
        if loader.persistent_workers:
            assert fake.log.count("unregister") == 0
            assert num_registered == len(fake.registered) <= 2 * (2 + 2)

    assert fake.num_read_in_place + fake.num_pinned_copies == fake.num_copies == 2 * 16 * 2
    assert fake.num_read_in_place > fake.num_pinned_copies
    assert fake.log.count("unregister") == fake.log.count("register") == num_registered
    assert fake.registered == {}
    fake.check()


def test_a_plain_epoch_after_a_prefetched_one_lends_nothing_registered(fake: FakeBackend) -> None:
    """With persistent workers: before the plain caller gets a batch, everything is unregistered."""
    with DataLoader(IMAGES, 4, **PERSISTENT) as loader:
        list(on(fake, loader))
        assert fake.registered
        plain = iter(loader)
        next(plain)
        assert fake.registered == {}
        del plain
        list(on(fake, loader))
        assert fake.registered
    fake.check()


def test_a_slot_that_a_plain_caller_still_holds_is_not_registered(fake: FakeBackend) -> None:
    """A batch of an earlier plain epoch stays what it was: memory that no device reads."""
    with DataLoader(IMAGES, 4, **PERSISTENT) as loader:
        held, _ = next(iter(loader))
        list(on(fake, loader))

        assert fake.registered
        assert not fake._is_registered(held)
    assert np.array_equal(held[0].numpy(), datasets.image(0)[0])
    fake.check()


@pytest.mark.parametrize(
    "collate", [datasets.as_arrays, datasets.in_a_box, datasets.beside_a_box, datasets.in_a_set]
)
def test_what_passes_through_is_the_callers_own(fake: FakeBackend, collate: Any) -> None:
    """Arrays, and tensors in objects that no prefetcher looks into, are copied out of their slots."""
    with DataLoader(IMAGES, 4, collate_fn=collate, **PERSISTENT) as loader:
        batches = list(on(fake, loader))

        assert fake.registered == {}
        assert len(batches) == 16
        if collate is datasets.as_arrays:
            assert np.array_equal(batches[3]["x"][0], datasets.image(12)[0])
    fake.check()


def test_objects_that_move_themselves_are_read_in_place(fake: FakeBackend) -> None:
    """Their copies are not given up for those of objects that stay."""
    with DataLoader(IMAGES, 4, collate_fn=datasets.packed, **PERSISTENT) as loader:
        batches = list(on(fake, loader))

        assert fake.registered
        assert [int(batch.data[0]) for batch in batches] == list(range(0, 64, 4))
    fake.check()


def test_memory_that_a_slot_gave_up_is_unregistered(fake: FakeBackend) -> None:
    """Batches that grow bring new memory, and the registrations follow what slots hold."""
    with DataLoader(datasets.Made(datasets.growing, 40), 4, **PERSISTENT) as loader:
        got = list(on(fake, loader))
        fake.drain()
        slots = loader._iterator._pool.ring.slots

        assert [int(batch.flatten()[0]) for batch in got] == list(range(0, 40, 4))
        assert fake.log.count("unregister") > 0
        assert set(fake.registered) <= {slot.memory.address for slot in slots if slot.memory is not None}
    fake.check()


# --- refused ----------------------------------------------------------------------------------------------


def test_a_refusal_is_said_once_and_batches_come_all_the_same(
    fake: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """One attempt a pool, one line with the reason, and pinned copies of every batch."""
    fake.refuses = "cudaHostRegister gave error 2, out of memory"
    with caplog.at_level(logging.WARNING, "fastload"):
        for _ in range(2):
            with DataLoader(IMAGES, 4, num_workers=1) as loader:
                got = list(on(fake, loader))
                fake.drain()
                check_values(got)

    (line,) = [record.message for record in caplog.records]
    assert "copied to pinned memory first" in line
    assert "error 2, out of memory" in line
    assert fake.num_refused == 2
    assert fake.num_pinned_copies == fake.num_copies == 2 * 16 * 2
    fake.check()


def test_a_refusal_in_the_middle_keeps_what_is_registered(fake: FakeBackend) -> None:
    """Slots that were registered before the first failure are read in place, the others are not tried."""
    slots, memories = RegisteredSlots(fake, fake.make_stream()), [shared_memory() for _ in range(3)]
    slots.add(memories[0], memories)
    fake.refuses = "no more"
    slots.add(memories[1], memories)
    slots.add(memories[2], memories)

    assert fake.num_refused == 1
    assert list(fake.registered) == [memories[0].address]
    slots.close()
    assert fake.registered == {}
    fake.check()


def test_a_device_without_memory_costs_the_batch_alone(
    fake: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the registration itself is raised at its batch; who goes on gets all that follow."""
    refusals = iter([torch.OutOfMemoryError("full")] * 3)
    register = fake.register

    def full(address: int, nbytes: int) -> str:
        for error in refusals:
            raise error
        return register(address, nbytes)

    monkeypatch.setattr(fake, "register", full)
    with DataLoader(IMAGES, 4, timeout=20, **PERSISTENT) as loader:
        iterator = iter(on(fake, loader))
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError):
                next(iterator)

        rest = list(iterator)
        fake.drain()
        assert [int(labels[0]) for _, labels in rest] == list(range(12, 64, 4))
    fake.check()


@pytest.mark.parametrize(
    ("failures", "kind"), [(1, RuntimeError), (2, RuntimeError), (2, torch.OutOfMemoryError)]
)
def test_a_failed_call_leaves_no_error_behind(
    monkeypatch: pytest.MonkeyPatch, failures: int, kind: type[RuntimeError]
) -> None:
    """The next kernel takes the pending error, unseen; one that stays is the device's own, and raised.

    A device without memory for a kernel has none.
    """
    monkeypatch.setattr(cuda, "why_unavailable", lambda index: None)
    backend: Any = cuda.choose_backend("cuda:0", "this test")
    launches = iter([kind("CUDA error: invalid argument")] * failures + [None] * 2)

    def launch() -> None:
        error = next(launches)
        if error is not None:
            raise error

    backend._launch = launch
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    runtime = types.SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: 1,
        cudaGetErrorString=lambda code: "invalid argument",
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)

    if failures == 1 or kind is torch.OutOfMemoryError:
        assert backend.register(4096, 4096) == "cudaHostRegister gave error 1, invalid argument"
        assert next(launches) is None
    else:
        with pytest.raises(RuntimeError, match="invalid argument"):
            backend.register(4096, 4096)


# --- order ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_close", [True, False])
def test_memory_is_unregistered_before_it_is_unmapped(fake: FakeBackend, by_close: bool) -> None:
    """The registry holds the mapping until then, whoever else has let go of it."""
    slots = RegisteredSlots(fake, fake.make_stream())
    mapping = mmap.mmap(-1, 4096)
    weakref.finalize(mapping, fake.log.append, "unmapped").atexit = False
    memory: Memory | None = Memory(mapping, shared=True)
    del mapping
    slots.add(memory, [memory])  # type: ignore[arg-type]
    memory = None
    gc.collect()
    if by_close:
        slots.close()
    else:
        other = shared_memory()
        slots.add(other, [other])
        slots.close()

    assert fake.log.index("unregister") < fake.log.index("unmapped")
    fake.check()


def test_closing_waits_for_the_copies(fake: FakeBackend) -> None:
    """Nothing is unregistered while the device reads it, when the pool is closed in mid-epoch."""
    loader = DataLoader(IMAGES, 4, **PERSISTENT)
    iterator = iter(loader)
    stream = fake.make_stream()
    copies: Any = CopiesAhead(iterator, fake, stream, 2)
    next(copies)
    assert fake.num_waiting_copies > 0
    loader.close()

    assert fake.num_waiting_copies == 0
    assert fake.registered == {}
    del copies
    fake.check()


@pytest.mark.slow
def test_a_real_fork_in_the_middle_of_an_epoch_leaves_the_registrations(fake: FakeBackend) -> None:
    """The child drops everything and leaves; the parent's epoch comes whole."""
    with DataLoader(IMAGES, 4, **PERSISTENT) as loader:
        iterator = iter(on(fake, loader))
        got = [next(iterator)]
        pid = os.fork()
        if pid == 0:
            before = len(fake.registered)
            del iterator
            loader.close()
            os._exit(0 if len(fake.registered) == before else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        got += iterator
        fake.drain()
        check_values(got)
        del iterator
    fake.check()


class FailsAtTheEnd(FakeBackend):
    """The device is lost when the pool is closed."""

    def synchronize(self, event: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")


def test_a_lost_device_does_not_keep_a_pool_from_closing(
    fake: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said, and the caller hears of it from what they asked of the device."""
    broken = FailsAtTheEnd()
    slots, memory = RegisteredSlots(broken, broken.make_stream()), shared_memory()
    slots.add(memory, [memory])
    with caplog.at_level(logging.WARNING, "fastload"):
        slots.close()

    assert "device-side assert" in caplog.text


# --- any consumer -----------------------------------------------------------------------------------------


class Consumer:
    """Takes batches of a loader and holds, drops, aliases and reads them; the device gets on as chosen."""

    next_number = 0

    def __init__(self, fake: FakeBackend, choose: Callable[[int], int]) -> None:
        self.fake = fake
        self.choose = choose
        self.held: list[tuple[torch.Tensor, torch.Tensor]] = []

    def run(self, batches: Any) -> None:
        for images, labels in batches:
            first = self.next_number
            self.next_number += 4
            expected = torch.arange(first, first + 4)
            self.fake.read(labels, expected)
            pixels = torch.from_numpy(np.stack([datasets.image(n)[0] for n in range(first, first + 4)]))
            self.fake.read(images, pixels)
            how = self.choose(4)
            if how == 1:
                self.held.append((images, pixels))
            elif how == 2:
                self.held.append((labels[1:3], expected[1:3]))  # an alias: the batch itself goes
            elif how == 3 and self.held:
                for tensor, content in self.held:
                    self.fake.read(tensor, content)
                del self.held[self.choose(len(self.held)) :]
            for _ in range(self.choose(8)):
                self.fake.advance(self.fake.streams[self.choose(len(self.fake.streams))])
            if self.choose(20) == 19:
                break


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 3), st.sampled_from(["auto", 4096, 300_000]))
def test_no_consumer_finds_a_slot_that_came_back_early(
    choices: random.Random, depth: int, prefetch_memory: int | str
) -> None:
    """Whoever holds, drops or aliases batches reads what workers wrote; slots come back late."""
    fake = FakeBackend()
    consumer = Consumer(fake, choices.randrange)
    with DataLoader(IMAGES, 4, prefetch_memory=prefetch_memory, **PERSISTENT) as loader:
        batches = on(fake, loader, depth)
        for _ in range(3):
            consumer.next_number = 0
            consumer.run(batches)
        consumer.held.clear()
    assert (fake.num_read_in_place > 0) == (
        prefetch_memory != 4096
    )  # in which there is room for no second slot
    fake.check()
