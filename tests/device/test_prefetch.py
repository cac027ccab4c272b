"""The prefetcher: order, lifetimes, errors; any consumer, and any order of the device's work."""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import gc
import random
import subprocess
import sys
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload import DataLoader
from fastload.device.device_prefetcher import DevicePrefetcher
from fastload.device.devices import choose_backend
from fastload.device.stream_prefetcher import StreamPrefetcher
from fastload.errors import LoaderClosedError
from fastload.memory.lease import Memory
from fastload.memory.segment import Segment, populate
from fastload.transforms import Normalize, RandomHorizontalFlip, RandomResizedCrop
from tests.device.conftest import CUDA
from tests.device.fake import FakeBackend
from tests.device.loaders import SHORT_CYCLES, Consumer, Loader, Place, batch, on
from tests.kit import datasets

if TYPE_CHECKING:
    from collections.abc import Iterator

# --- on any device ----------------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "a b")
IMAGES = datasets.Made(datasets.image, 40)


def numbered(number: int) -> torch.Tensor:
    """``(64, 257) int32``, different in every element and batch."""
    return torch.arange(64 * 257, dtype=torch.int32).reshape(64, 257) + number * 1_000_003


def test_nests_arrive_whole(place: Place) -> None:
    """Tensors are copied once each, with their strides; the rest, and the loader's batch, is as it was."""
    image, gaps = torch.rand(2, 3, 5, 7).to(memory_format=torch.channels_last), torch.arange(12).reshape(3, 4)
    permuted = torch.arange(6).reshape(1, 2, 3).permute(0, 2, 1)
    source = {
        "image": image,
        "names": ["a", "b"],
        "pair": Pair(torch.tensor(3), "text"),
        "list": [gaps[:, ::2], torch.arange(3).expand(4, 3), permuted],
        "again": [image],
        "packed": torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]),
        "gradient": torch.ones(2, requires_grad=True),
    }
    if place.fake is None:  # the fake knows no empty memory
        source["list"].append(torch.empty(0, 3))
    (result,) = place.prefetch([source])
    assert list(result) == list(source)
    assert torch.equal(place.content(result["image"]), image)
    assert result["image"].stride() == image.stride()
    assert result["again"][0] is result["image"] is not image is source["image"]
    assert type(result["pair"]) is Pair
    assert (int(place.content(result["pair"].a)), result["pair"].b) == (3, "text")
    assert result["names"] is source["names"]
    assert all(torch.equal(place.content(a), b) for a, b in zip(result["list"], source["list"], strict=True))
    assert place.content(result["packed"].data).tolist() == [1] * 5
    assert not image.is_cuda
    if place.fake is None:
        assert result["gradient"].grad_fn is not None
    else:
        assert place.fake.num_copies == 5  # and none of the late ones


# --- how far ahead ----------------------------------------------------------------------------------------


def test_depth_batches_are_under_way_behind_the_one_handed_out(fake: FakeBackend) -> None:
    """After each next(), ``depth`` more batches were pulled and their copies begun, no more and no fewer.

    A batch that is dropped before its copy has run keeps its memory until then, here the last one but one.
    """
    loader = Loader(6)
    iterator = iter(on(fake, loader, depth=2))
    assert loader.num_pulled == 0
    found = [(loader.num_pulled, fake.num_copies, fake.num_alive[1]) for _ in iterator]
    assert found == [(3, 3, 3), (4, 4, 3), (5, 5, 3), (6, 6, 3), (6, 6, 2), (6, 6, 2)]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_host_that_runs_ahead_fills_neither_memory(fake: FakeBackend, depth: int) -> None:
    """However slow the device, dropped batches' memory is enough, and depth + 1 wait for their copies."""
    waiting = []
    for number, got in enumerate(on(fake, Loader(100), depth)):
        fake.read(got, batch(number))  # runs only when somebody waits for it
        waiting.append(fake.num_waiting_copies)
    del got
    assert fake.num_reserved <= 2 * depth + 4
    assert max(waiting) == depth + 1
    assert fake.num_waiting_copies == 0


class Owner(dict[str, Any]):
    """Owns memory."""


@pytest.mark.parametrize("is_pinned", [False, True])
def test_host_memory_lives_as_long_as_it_is_read(fake: FakeBackend, is_pinned: bool) -> None:
    """A pageable batch is free before it is handed out; a pinned one, which may own memory, is kept whole."""
    owners: list[weakref.ref[Owner]] = []

    def make(number: int) -> Owner:
        owner = Owner(x=fake.pinned(batch(number)) if is_pinned else batch(number))
        owners.append(weakref.ref(owner))
        return owner

    iterator = iter(on(fake, Loader(3, make)))
    next(iterator)
    assert [owner() is not None for owner in owners] == [is_pinned] * 3
    fake.drain()
    assert len(list(iterator)) == 2
    assert [owner() for owner in owners] == [None] * 3


def test_an_abandoned_iteration_leaves_nothing_pending(fake: FakeBackend) -> None:
    """The copies that were begun are done, no memory is kept, and the loader sees the end of its iterator."""
    ended = []

    def source() -> Iterator[torch.Tensor]:
        try:
            yield from (fake.pinned(batch(number)) for number in range(9))
        finally:
            ended.append(True)

    next(iter(on(fake, source())))
    gc.collect()
    assert (fake.num_waiting_copies, *fake.num_alive) == (0, 0, 0)
    assert ended == [True]


# --- errors -----------------------------------------------------------------------------------------------


class Late:
    """A leaf that is moved when its batch is handed over; the move of number 1 raises."""

    def __init__(self, number: int, error: BaseException) -> None:
        self.number, self.error = number, error

    def to(self, device: torch.device) -> int:
        if self.number == 1:
            raise self.error
        return self.number


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_interrupt_while_a_batch_is_handed_over_closes_the_iterator(error: BaseException) -> None:
    """An error of the leaf itself costs its batch alone."""
    iterator = iter(on(FakeBackend(), [Late(number, error) for number in range(3)]))
    assert next(iterator) == 0
    with pytest.raises(type(error)):
        next(iterator)
    if isinstance(error, Exception):
        assert next(iterator) == 2
    else:
        with pytest.raises(LoaderClosedError, match="an exception interrupted this iterator"):
            next(iterator)


class Full(FakeBackend):
    """A device that has no memory for some allocations, by their number."""

    def __init__(self, *lacking: int) -> None:
        super().__init__()
        self.lacking = lacking
        self.num_allocations = 0

    def allocate_one(self, like: torch.Tensor, stream: Any) -> torch.Tensor:
        self.num_allocations += 1
        if self.num_allocations - 1 in self.lacking:
            raise torch.OutOfMemoryError("no room")
        return super().allocate_one(like, stream)


def pair(number: int) -> list[torch.Tensor]:
    return [batch(number), batch(number + 10)]


def test_a_batch_that_found_no_memory_ahead_is_copied_in_its_turn() -> None:
    """Nothing is raised if there is memory once those before it are gone; nothing is pulled past it."""
    fake, loader = Full(3), Loader(5, pair)
    iterator = iter(on(fake, loader))
    kept = [next(iterator)]
    assert loader.num_pulled == 2
    kept += list(iterator)
    fake.drain()
    assert [int(b[1][0, 0]) for b in kept] == [10, 11, 12, 13, 14]
    fake.check()


def test_a_copy_that_fails_is_raised_in_its_turn() -> None:
    """When the copy of a batch's second tensor fails, the first one's source lives until its copy ran."""

    class Broken(FakeBackend):
        def copy_one(self, pinned: torch.Tensor, target: torch.Tensor, stream: Any) -> None:
            if self.num_copies == 3:
                self.num_copies += 1
                raise RuntimeError("device-side assert")
            super().copy_one(pinned, target, stream)

    fake = Broken()
    iterator = iter(on(fake, Loader(4, pair)))
    kept = [next(iterator)]
    with pytest.raises(RuntimeError, match="device-side assert"):
        next(iterator)
    kept += list(iterator)
    fake.drain()
    assert [int(b[1][0, 0]) for b in kept] == [10, 12, 13]
    fake.check()


def test_special_leaves_move_on_the_callers_stream() -> None:
    """What is no plain CPU tensor moves by its own ``to``, once, at hand-over; the side stream waits."""

    class Notes(FakeBackend):
        def move(self, value: Any) -> Any:
            super().move(value if value is not leaves["elsewhere"] else torch.zeros(2))
            return f"{type(value).__name__} moved"

    leaves = {
        "gradient": torch.zeros(2, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.zeros(2)),
        "sparse": torch.eye(2).to_sparse(),
        "subclass": torch.zeros(2).as_subclass(type("Mine", (torch.Tensor,), {})),
        "elsewhere": torch.zeros(2, device="meta"),
        "packed": torch.nn.utils.rnn.pack_sequence([torch.zeros(3)]),
    }
    fake = Notes()
    iterator = iter(on(fake, [batch(0), {**leaves, "plain": batch(1)}]))
    next(iterator)
    assert "move on main" not in fake.log
    result = next(iterator)
    assert [result[name] for name in leaves] == [f"{type(leaf).__name__} moved" for leaf in leaves.values()]
    assert fake.num_copies == 2
    assert fake.log.count("move on main") == 6
    assert fake.log[-3:] == ["move on main", "record on main", "side 1 waits for main"]
    fake.check()


class HasRoom(FakeBackend):
    """A device with memory for a few tensors at a time."""

    room = 3

    def allocate_one(self, like: torch.Tensor, stream: Any) -> torch.Tensor:
        if len(self._blocks) >= self.room:
            raise torch.OutOfMemoryError("full")
        return super().allocate_one(like, stream)


@pytest.mark.parametrize("transform", [None, lambda batch: [part + 1 for part in batch]])
def test_what_failed_holds_no_memory(transform: Any) -> None:
    """An attempt that ended half-way frees what it had allocated before the batch is tried again."""
    fake = HasRoom()
    model = fake.allocate_one(torch.zeros(4), fake.current)
    then = None if transform is None else lambda: transform
    copies = StreamPrefetcher(iter([pair(n) for n in range(3)]), fake, fake.make_stream(), 2, then)
    gc.disable()
    try:
        for number in range(3):
            found = next(copies)
            fake.drain()
            assert int(found[0][0, 0]) == number + (transform is not None)
            del found
    finally:
        gc.enable()
    del copies, model
    fake.check()


class Rows(collections.abc.Sequence[torch.Tensor]):
    """A sequence that makes its tensors at each access."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: Any) -> Any:
        return self.table[range(len(self.table))[index]]


def test_tensors_that_are_made_at_each_access_arrive(fake: FakeBackend) -> None:
    """They have another identity in each walk."""
    (found,) = on(fake, [Rows(torch.arange(6.0).reshape(2, 3))])
    fake.drain()
    assert all(row.untyped_storage().data_ptr() in fake._blocks for row in found)
    assert [row.tolist() for row in found] == [[0, 1, 2], [3, 4, 5]]


def test_a_late_leaf_that_finds_no_memory_costs_no_batch() -> None:
    """The batch is not counted, and comes at the next call."""

    class FailsOnce:
        def __init__(self, number: int) -> None:
            self.number, self.fails = number, number == 1

        def to(self, device: torch.device) -> int:
            if self.fails:
                self.fails = False
                raise torch.OutOfMemoryError("late")
            return self.number

    fake, taken = FakeBackend(), []
    source = iter([[batch(number), FailsOnce(number)] for number in range(4)])
    copies = StreamPrefetcher(source, fake, fake.make_stream(), 2, None, lambda: taken.append(1))
    found = [next(copies)]
    with pytest.raises(torch.OutOfMemoryError, match="late"):
        next(copies)
    assert len(taken) == 1
    found += list(copies)
    fake.drain()
    assert [(int(tensor[0, 0]), number) for tensor, number in found] == [(n, n) for n in range(4)]
    assert len(taken) == 4
    del found, copies
    fake.check()


# --- any consumer, any order of the device's work --------------------------------------------------------


def content(number: int) -> list[torch.Tensor]:
    return [batch(number + 1), torch.arange(number, number + 4, dtype=torch.float32)]


def consume(fake: FakeBackend, depth: int, choose: Any) -> None:
    """Two epochs of batches, of which some are pinned."""

    def make(number: int) -> list[torch.Tensor]:
        x, y = content(number)
        return [fake.pinned(x) if choose(2) else x, y]

    consumer, prefetcher = Consumer(fake, choose), on(fake, Loader(12, make), depth)
    for _ in range(2):
        consumer.run(prefetcher, content)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_no_consumer_and_no_order_of_work_finds_unordered_use(choices: random.Random, depth: int) -> None:
    """Whoever holds, drops, aliases or delays batches reads what was sent, however the streams get on."""
    fake = FakeBackend()
    consume(fake, depth, choices.randrange)
    fake.check()


@pytest.mark.parametrize(
    ("names", "replacement", "found"),
    [
        (["wait_event"], lambda stream, event: None, "did not read what the batch held"),
        (["is_done", "synchronize"], lambda event: True, "pinned memory died"),
        (["pin"], lambda tensor: tensor, "not pinned"),
    ],
)
def test_each_rule_taken_away_is_noticed(names: list[str], replacement: Any, found: str) -> None:
    """The fake finds what it is there to find: without any one step, consumers find unordered use."""
    noticed = 0
    for seed in range(40):
        fake: Any = FakeBackend()
        for name in names:
            setattr(fake, name, replacement)
        consume(fake, 2, random.Random(seed).randrange)
        fake.drain()
        noticed += any(found in violation for violation in fake.violations)
    assert noticed > 10


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_caller_who_changes_streams_keeps_the_batch(is_recorded: bool) -> None:
    """What was fetched under one stream and is used on another is recorded for it; else it is noticed."""
    fake: Any = FakeBackend()
    iterator = iter(on(fake, Loader(4)))
    next(iterator)
    fake.use_stream("another")
    if not is_recorded:
        fake.record_stream = lambda tensor, stream: None
    for number in range(1, 4):
        fake.read(next(iterator), batch(number))
    fake.drain()
    assert any("a tensor died that another has to read" in line for line in fake.violations) != is_recorded


# --- what only a real device shows ------------------------------------------------------------------------

on_cuda = pytest.mark.parametrize("place", [CUDA], indirect=True)
LONG_CYCLES = 500_000_000  # a quarter of a second or so of a busy device


@contextlib.contextmanager
def no_synchronization() -> Iterator[None]:
    """Within it any operation of torch that makes the host wait for the device raises."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_cuda
def test_copies_run_while_the_consumer_computes(place: Place) -> None:
    """The copy of the last batch that was pulled ends while the consumer's stream is busy with this one."""
    prefetcher = DevicePrefetcher([numbered(number).pin_memory() for number in range(8)])
    list(prefetcher)  # allocations, which may wait for the device, are made here
    torch.cuda.synchronize()
    iterator = iter(prefetcher)
    next(iterator)
    torch.cuda._sleep(SHORT_CYCLES)
    next(iterator)
    torch.cuda._sleep(LONG_CYCLES)
    busy = torch.cuda.Event()
    busy.record()
    prefetcher._stream.synchronize()
    assert not busy.query()


@on_cuda
def test_the_consumer_waits_for_a_late_copy(place: Place) -> None:
    """A kernel launched right after next() reads the whole batch, even if the side stream is held up."""
    prefetcher = DevicePrefetcher(Loader(3, lambda number: numbered(number).pin_memory()), depth=1)
    iterator = iter(prefetcher)
    next(iterator)
    with torch.cuda.stream(prefetcher._stream):
        torch.cuda._sleep(LONG_CYCLES)
    results = [batch.clone() for batch in iterator]
    assert [torch.equal(r.cpu(), numbered(n)) for n, r in enumerate(results, start=1)] == [True, True]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@on_cuda
def test_the_other_devices_get_no_context(place: Place) -> None:
    """A process that loads to device 1, as rank 1 does, takes no memory on device 0."""
    code = """
import torch, fastload
pixels = torch.arange(4000, dtype=torch.uint8).reshape(40, 100)
with fastload.DataLoader(pixels, 4, num_workers=1, device="cuda:1") as loader:
    arrived = torch.cat([batch.cpu() for batch in loader])
print(torch.equal(arrived, pixels), [torch._C._cuda_hasPrimaryContext(index) for index in (0, 1)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split(maxsplit=1) == ["True", "[False, True]\n"]


@on_cuda
def test_registered_shared_memory_is_pinned_until_it_is_unregistered(place: Place) -> None:
    """Torch takes it for pinned, a copy from its inside is right, and failures leave no error behind."""
    backend = choose_backend("cuda", "this test")
    assert backend is not None
    stream = backend.make_stream()
    segment = Segment.create(1 << 20, name="fastload-slot")
    memory = Memory(segment.map(writable=True), shared=True)
    segment.close()
    populate(memory._mapping)
    tensor = torch.frombuffer(memory.lease(), dtype=torch.uint8)
    tensor.copy_(torch.arange(1 << 20) % 251)
    assert not tensor.is_pinned()
    assert backend.register(memory.address, memory.nbytes) == ""
    assert tensor[4097:].is_pinned()
    # Leaves are not views of a whole: their storages begin inside the registered memory.
    assert torch.frombuffer(memory.lease(), dtype=torch.uint8, offset=4160, count=999).is_pinned()
    assert backend.pin(tensor[4097:]).data_ptr() == tensor[4097:].data_ptr()
    assert "cudaHostRegister gave error" in backend.register(memory.address, memory.nbytes)
    (copied,) = backend.allocate([tensor[4097:]], stream)
    backend.copy([tensor[4097:]], [copied], stream)
    backend.synchronize(backend.record_event(stream))
    assert torch.equal(copied.cpu(), tensor[4097:])
    assert backend.unregister(memory.address) == ""
    assert "cudaHostUnregister gave error" in backend.unregister(memory.address)
    assert not tensor.is_pinned()
    assert int(torch.ones(3, device="cuda").sum()) == 3  # no error is pending


def augmented(**options: Any) -> DataLoader:
    """A loader of cropped, flipped and normalised images."""
    transforms = [RandomResizedCrop(9), RandomHorizontalFlip(), Normalize([0.5] * 3, [0.25] * 3)]
    return DataLoader(IMAGES, 4, seeding="sample", device_transform=transforms, **options)


@on_cuda
def test_a_loader_with_crops_and_flips_never_synchronises(place: Place) -> None:
    """In the first epoch, where slots are registered, and the later ones; on the copy stream and by hand."""
    by_hand = torch.stack([torch.as_tensor(IMAGES[number][0]) for number in range(4)]).cuda()
    with augmented(num_workers=2, persistent_workers=True, device="cuda") as loader, no_synchronization():
        num_batches = sum(1 for _ in range(2) for _ in loader)
        flipped = RandomHorizontalFlip(1.0)(by_hand)
    assert num_batches == 20
    assert torch.equal(flipped.cpu(), by_hand.cpu().flip(2))
