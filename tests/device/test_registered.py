"""Slots that the device reads in place: when they are registered, when not, and in which order all ends."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import weakref
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload import DataLoader
from fastload.device import devices
from fastload.device.registered import RegisteredSlots
from fastload.memory.lease import Memory
from tests.device.fake import FakeBackend
from tests.device.loaders import Consumer, Place, on
from tests.kit import datasets

if TYPE_CHECKING:
    import random

OOM = torch.OutOfMemoryError
IMAGES = datasets.Made(datasets.image, 64)
PERSISTENT: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}


def shared_memory(nbytes: int = 4096) -> Memory:
    return Memory(mmap.mmap(-1, nbytes), shared=True)


def content(number: int) -> list[torch.Tensor]:
    """The images and labels of a batch of 4."""
    labels = range(4 * number, 4 * number + 4)
    return [torch.from_numpy(np.stack([datasets.image(n)[0] for n in labels])), torch.tensor(labels)]


def check_values(batches: list[Any]) -> None:
    for number, (images, labels) in enumerate(batches):
        assert torch.equal(images, content(number)[0])
        assert torch.equal(labels, content(number)[1])


# --- read in place ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("by_loader", "workers"), [(True, {"num_workers": 1}), (False, PERSISTENT)])
def test_slots_are_registered_once(fake: FakeBackend, by_loader: bool, workers: dict[str, Any]) -> None:
    """Nearly all copies come straight from slots; every registration is undone when the loader is closed."""
    with DataLoader(IMAGES, 4, device="cuda" if by_loader else None, **workers) as loader:
        batches = loader if by_loader else on(fake, loader)
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


def test_a_plain_epoch_after_a_prefetched_one_lends_nothing_pinned(place: Place) -> None:
    """Before a plain caller gets a batch, all is unregistered; one of an earlier plain epoch stays."""
    with DataLoader(IMAGES, 4, **PERSISTENT) as loader:
        held, _ = next(iter(loader))
        for _ in range(2):
            list(place.prefetch(loader))
            if place.fake is not None:
                assert place.fake.registered
                assert not place.fake._is_registered(held)
        assert not held.is_pinned()
        plain = iter(loader)
        images, _ = next(plain)
        assert not images.is_pinned()
        assert place.fake is None or place.fake.registered == {}
        assert not any(images.is_pinned() for images, _ in plain)
        del plain, images
    assert torch.equal(held, content(0)[0])


@pytest.mark.parametrize(
    ("collate", "is_in_place"),
    [
        *((datasets.as_arrays, False), (datasets.in_a_box, False), (datasets.beside_a_box, False)),
        *((datasets.in_a_set, False), (datasets.packed, True)),
    ],
)
def test_what_passes_through_is_the_callers_own(fake: FakeBackend, collate: Any, is_in_place: bool) -> None:
    """Arrays, and tensors in objects nobody looks into, are copied; a PackedSequence is not."""
    with DataLoader(IMAGES, 4, collate_fn=collate, **PERSISTENT) as loader:
        batches = list(on(fake, loader))
        assert bool(fake.registered) == is_in_place
        assert len(batches) == 16
        if collate is datasets.as_arrays:
            assert np.array_equal(batches[3]["x"][0], datasets.image(12)[0])
        if is_in_place:
            assert [int(batch.data[0]) for batch in batches] == list(range(0, 64, 4))


def with_ids(samples: list[Any]) -> Any:
    """Images and labels, and an array."""
    images, labels = torch.utils.data.default_collate(samples)
    return images, labels, {"ids": np.arange(len(samples)) + 10 * int(labels[0])}


def test_an_array_beside_tensors_costs_its_own_copy(fake: FakeBackend) -> None:
    """The tensors are read in place as ever; each array is the caller's, and stays what it was."""
    with DataLoader(IMAGES, 4, collate_fn=with_ids, **PERSISTENT) as loader:
        batches = list(on(fake, loader))
        fake.drain()
        num_copies = loader.stats().num_copies
    check_values([batch[:2] for batch in batches])
    assert [batch[2]["ids"].tolist() for batch in batches] == [
        [40 * number + place for place in range(4)] for number in range(16)
    ]
    assert all(batch[2]["ids"].flags.writeable for batch in batches)
    assert fake.num_read_in_place > fake.num_pinned_copies
    assert num_copies < 16


def test_memory_that_a_slot_gave_up_is_unregistered(fake: FakeBackend) -> None:
    """Batches that grow bring new memory, and the registrations follow what slots hold."""
    with DataLoader(datasets.Made(datasets.growing, 40), 4, **PERSISTENT) as loader:
        got = list(on(fake, loader))
        fake.drain()
        slots = loader._iterator._pool.ring.slots
        assert [int(batch.flatten()[0]) for batch in got] == list(range(0, 40, 4))
        assert fake.log.count("unregister") > 0
        assert set(fake.registered) <= {slot.memory.address for slot in slots if slot.memory is not None}


def test_dropped_memory_is_unregistered_at_the_next_batch(fake: FakeBackend) -> None:
    """No new memory has to come first."""
    slots, (kept, dropped) = RegisteredSlots(fake, fake.make_stream()), (shared_memory(), shared_memory())
    for memory in (kept, dropped):
        slots.add(memory, [kept, dropped])
    slots.add(kept, [kept])
    assert list(fake.registered) == [kept.address]
    slots.close()


# --- refused ----------------------------------------------------------------------------------------------


def test_a_refusal_is_said_once(fake: FakeBackend, caplog: pytest.LogCaptureFixture) -> None:
    """One attempt a pool, one line with the reason, and pinned copies of every batch."""
    fake.refuses = "cudaHostRegister gave error 2, out of memory"
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


def test_lack_of_memory_costs_the_batch(fake: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the registration itself is raised at its batch; who goes on gets all that follow."""
    refusals, register = iter([OOM("full")] * 3), fake.register

    def full(address: int, nbytes: int) -> str:
        for error in refusals:
            raise error
        return register(address, nbytes)

    monkeypatch.setattr(fake, "register", full)
    with DataLoader(IMAGES, 4, timeout=20, **PERSISTENT) as loader:
        iterator = iter(on(fake, loader))
        for _ in range(3):
            with pytest.raises(OOM):
                next(iterator)
        rest = list(iterator)
        fake.drain()
        assert [int(labels[0]) for _, labels in rest] == list(range(12, 64, 4))


@pytest.mark.parametrize(("times", "kind"), [(1, RuntimeError), (2, RuntimeError), (2, OOM)])
def test_a_failed_call_leaves_no_error(monkeypatch: pytest.MonkeyPatch, times: int, kind: Any) -> None:
    """The next kernel takes it, unseen, or lacks memory; one that stays is the device's own, and raised."""
    monkeypatch.setattr(devices, "why_unavailable", lambda index: None)
    backend: Any = devices.choose_backend("cuda:0", "this test")
    backend._launch = mock.Mock(side_effect=[kind("CUDA error: invalid argument")] * times + [None])
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    runtime = mock.Mock(**{"cudaHostRegister.return_value": 1, "cudaGetErrorString.return_value": "invalid"})
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    if times == 1 or kind is OOM:
        assert backend.register(4096, 4096) == "cudaHostRegister gave error 1, invalid"
        assert backend._launch.call_count == 2
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
    memory = Memory(mapping, shared=True)
    slots.add(memory, [memory])
    del mapping, memory
    gc.collect()
    if not by_close:
        other = shared_memory()
        slots.add(other, [other])
    slots.close()
    assert fake.log.index("unregister") < fake.log.index("unmapped")


def test_closing_waits_for_the_copies(fake: FakeBackend) -> None:
    """Nothing is unregistered while the device reads it, when the pool is closed in mid-epoch."""
    loader = DataLoader(IMAGES, 4, **PERSISTENT)
    iterator = iter(on(fake, loader))
    next(iterator)
    assert fake.num_waiting_copies > 0
    loader.close()
    assert fake.num_waiting_copies == 0
    assert fake.registered == {}


@pytest.mark.slow
def test_a_real_fork_in_the_middle_of_an_epoch_leaves_the_registrations(fake: FakeBackend) -> None:
    """The child, which drops everything, waits for no copy and frees nothing; the parent's epoch is whole."""

    def held() -> tuple[int, ...]:
        return len(fake.registered), fake.num_waiting_copies, fake.num_alive[0]

    with DataLoader(IMAGES, 4, **PERSISTENT) as loader:
        iterator = iter(on(fake, loader))
        got = [next(iterator)]
        pid = os.fork()
        if pid == 0:
            before = held()
            del iterator
            loader.close()
            os._exit(0 if held() == before else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        got += iterator
        fake.drain()
        check_values(got)
        del iterator


def test_a_pool_closes_on_a_lost_device(fake: FakeBackend, caplog: Any, monkeypatch: Any) -> None:
    """It is said, and the caller hears of it from what they asked of the device."""
    slots, memory = RegisteredSlots(fake, fake.make_stream()), shared_memory()
    slots.add(memory, [memory])
    monkeypatch.setattr(fake, "synchronize", mock.Mock(side_effect=RuntimeError("device-side assert")))
    slots.close()
    assert "device-side assert" in caplog.text


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 3), st.sampled_from(["auto", "4096B", "300kB"]))
def test_no_slot_comes_back_early(choices: random.Random, depth: int, max_prefetch_memory: Any) -> None:
    """Whoever holds, drops or aliases batches reads what workers wrote; slots come back late."""
    fake = FakeBackend()
    consumer = Consumer(fake, choices.randrange)
    with DataLoader(IMAGES, 4, max_prefetch_memory=max_prefetch_memory, **PERSISTENT) as loader:
        for _ in range(3):
            consumer.run(on(fake, loader, depth), content)
        consumer.held.clear()
    # With 4096 bytes there is room for no second slot.
    assert (fake.num_read_in_place > 0) == (max_prefetch_memory != "4096B")
    fake.check()


class MovesItself:
    """An object that moves what it holds."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> MovesItself:
        return MovesItself(self.tensor.to(device, copy=True))


def shared_dict_and_box(samples: list[Any]) -> Any:
    images, _ = torch.utils.data.default_collate(samples)
    one = {"images": images}
    return [one, one, datasets.Box(images.clone())]


def mover(samples: list[Any]) -> Any:
    images, _ = torch.utils.data.default_collate(samples)
    return [images, MovesItself(images.clone())]


def same_tensor_in_a_box(samples: list[Any]) -> Any:
    images, _ = torch.utils.data.default_collate(samples)
    return [images, datasets.Box(images)]


def box_in_an_array(samples: list[Any]) -> Any:
    images, _ = torch.utils.data.default_collate(samples)
    return [images, np.array([datasets.Box(images.clone())], object)]


def known_parts(samples: list[Any]) -> Any:
    images, _ = torch.utils.data.default_collate(samples)
    return [images, {"x": (images.clone(), "text", b"", 1.5, None)}, np.int64(3), (3,), (3,)]


@pytest.mark.parametrize(
    ("collate", "is_copied"),
    [
        *((shared_dict_and_box, True), (mover, True), (same_tensor_in_a_box, True)),
        *((box_in_an_array, True), (known_parts, False)),
    ],
)
def test_hidden_tensors_are_never_those_of_registered_slots(
    fake: FakeBackend, collate: Any, is_copied: bool
) -> None:
    """A batch with an object of an unknown type is copied whole, also if the object moves itself."""
    with DataLoader(IMAGES, 4, collate_fn=collate, device="cuda", **PERSISTENT) as loader:
        for batch in loader:
            parts = [part[0] if isinstance(part, np.ndarray) else part for part in batch]
            hidden = [part.content for part in parts if isinstance(part, datasets.Box)]
            assert not any(map(fake._is_registered, hidden))
            fake.drain()
        assert (loader.stats().num_copies == 16) == is_copied
