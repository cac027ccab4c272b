"""Memory is written again only when nothing made from it is alive."""

from __future__ import annotations

import contextlib
import functools
import gc
import mmap
import os
import sys
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload import CachedDataset, DataLoader
from fastload.epochs.runtime import runtime_of
from fastload.errors import SharedMemoryError
from fastload.memory import segment as segment_module
from fastload.memory.lease import (
    MAX_BUFFERS,
    SLACK_BYTES,
    BufferPool,
    BumpAllocator,
    Memory,
    private_memory,
)
from tests.kit import datasets

if TYPE_CHECKING:
    from collections.abc import Sequence


ALIASES: dict[str, Any] = {
    "tensor": lambda t: t,
    "slice": lambda t: t[1:3],
    "numpy": lambda t: t.numpy(),
    "memoryview": lambda t: memoryview(t.numpy()),
    "storage": lambda t: t.untyped_storage(),
    "dlpack": torch.utils.dlpack.to_dlpack,
    "detached": lambda t: t.detach().view(2, -1),
}


@pytest.mark.parametrize("name", ALIASES)
def test_every_kind_of_alias_keeps_the_lease(name: str) -> None:
    """The lease ends with the last of them, at once."""
    memory = private_memory(64)
    tensor = torch.frombuffer(memory.lease(), dtype=torch.uint8, count=64)
    alias = ALIASES[name](tensor)
    del tensor
    held = memory.is_leased
    del alias

    assert (held, memory.is_leased) == (True, False)


def test_shared_memory_leased_at_a_fork_is_shared_with_the_child() -> None:
    """The child writes to the same memory, the parent never again; private memory is each one's own."""
    shared, idle = (Memory(mmap.mmap(-1, 4096), shared=True) for _ in range(2))
    private = private_memory(64)
    views = [np.frombuffer(memory.lease(), np.uint8) for memory in (shared, private)]
    child = os.fork()
    if child == 0:
        for view in views:
            view[:] = 1
        os._exit(0)
    os.waitpid(child, 0)
    seen = [int(view.sum()) for view in views]
    del views
    idle.lease()  # which that child has not seen

    assert seen == [4096, 0]
    assert [memory.is_fork_shared for memory in (shared, private, idle)] == [True, False, False]
    assert not shared.is_leased


@given(sizes=st.lists(st.integers(0, 3000), max_size=8), pages=st.integers(1, 2))
@settings(deadline=None)
def test_a_batch_lies_in_one_memory_or_in_regions_of_its_own(sizes: list[int], pages: int) -> None:
    """Each region has its size and no other writes to it, whether it fits behind those before it or not."""
    made: list[Memory] = []

    def make(nbytes: int) -> Memory:
        made.append(private_memory(nbytes))
        return made[-1]

    allocator = BumpAllocator(make)
    memory = private_memory(pages * 4096)
    allocator.begin(memory)
    parts = [allocator.allocate(size) for size in sizes]
    for number, part in enumerate(parts):
        part[:] = number
    end = memory.address + memory.nbytes

    assert [part.tolist() for part in parts] == [[number] * size for number, size in enumerate(sizes)]
    assert made == []  # each of these fits into an empty memory
    assert allocator.memory is memory
    offset = 0
    for part in parts:
        does_fit = offset + part.nbytes <= memory.nbytes
        assert (memory.address <= part.ctypes.data <= end - part.nbytes) == does_fit or not part.nbytes
        if does_fit:
            assert part.ctypes.data % 64 == 0  # as torch's own allocator
            offset = -(-(offset + part.nbytes) // 64) * 64


def batch_of(buffers: BufferPool, nbytes: int) -> Any:
    buffers.begin()
    part = buffers.allocate(nbytes)
    buffers.end()
    return part


@pytest.mark.usefixtures("lends_small")
def test_buffers_are_used_again_and_never_while_held() -> None:
    """As many warm buffers as are needed, up to MAX_BUFFERS; beyond that memory of its own."""
    buffers = BufferPool(1 << 30)
    addresses = {batch_of(buffers, 100).ctypes.data for _ in range(5)}
    held = [batch_of(buffers, 100) for _ in range(2 * MAX_BUFFERS)]
    for number, part in enumerate(held):
        part[:] = number

    assert len(addresses) == 1
    assert [int(part[0]) for part in held] == list(range(2 * MAX_BUFFERS))
    assert len(buffers._buffers) == MAX_BUFFERS


@pytest.mark.parametrize("clears", [False, True])
def test_a_batch_may_begin_anew_in_larger_memory(clears: bool) -> None:
    """More than once, and also after all memory was forgotten while the batch was made."""
    buffers = BufferPool(1 << 30)
    batch_of(buffers, 1000)
    buffers.begin()
    for nbytes in (100_000, 300_000):
        if clears:
            buffers.clear()
        else:
            buffers.begin()
        part = buffers.allocate(nbytes)
        part[:] = 5

    assert part.sum() == 5 * 300_000


@pytest.mark.usefixtures("lends_small")
@pytest.mark.parametrize(("spare_bytes", "expected"), [(-1, 1), (0, 2)])
def test_buffers_keep_no_more_than_their_limit(spare_bytes: int, expected: int) -> None:
    """A batch beyond it has memory that goes with the batch."""
    each_bytes = SLACK_BYTES + 4096
    buffers = BufferPool(2 * each_bytes + spare_bytes)
    held = [batch_of(buffers, 4096) for _ in range(3)]

    assert [memory.nbytes for memory in buffers._buffers] == [each_bytes] * expected
    del held


def parts_of_batch(buffers: BufferPool, sizes: Sequence[int]) -> list[Any]:
    buffers.begin()
    parts = [buffers.allocate(nbytes) for nbytes in sizes]
    buffers.end()
    return parts


def num_cold(buffers: BufferPool, parts: list[Any]) -> int:
    """How many parts of a batch lie outside of all buffers."""
    spans = [(memory.address, memory.address + memory.nbytes) for memory in buffers._buffers]
    return sum(not any(start <= part.ctypes.data < end for start, end in spans) for part in parts)


@pytest.mark.usefixtures("lends_small")
@pytest.mark.parametrize("num_held", [0, 1, 3])
@pytest.mark.parametrize(
    "batches",
    [
        *([(100, 300_000)], [(300_000, 100)], [(300_000, 300_000)], [(50, 80_000, 300_000, 300_000)]),
        *([(100, 100_000), (100, 300_000)], [(100, 300_000), (300_000, 100)]),
    ],
)
def test_all_leaves_lie_in_buffers_in_every_order(batches: list[tuple[int, ...]], num_held: int) -> None:
    """After the first batches, whatever the caller holds, and if batches are not all alike."""
    buffers = BufferPool(1 << 30)
    held: list[Any] = []
    counts = []
    for number in range(40):
        held.append(parts_of_batch(buffers, batches[number % len(batches)]))
        counts.append(num_cold(buffers, held[-1]))
        del held[: len(held) - num_held]

    assert counts[10:] == [0] * 30
    assert len(buffers._buffers) <= num_held + 1


def test_a_batch_beyond_the_limit_keeps_the_buffer_of_its_first_leaf() -> None:
    """A larger buffer would not be kept, so the one that is too small stays warm."""
    buffers = BufferPool(3 * SLACK_BYTES)
    first = {parts_of_batch(buffers, (SLACK_BYTES, 3 * SLACK_BYTES))[0].ctypes.data for _ in range(5)}

    assert len(first) == 1


@pytest.mark.parametrize("sizes", [(100, 1), (1, 100)])
def test_buffers_of_a_huge_batch_are_given_up_once_batches_are_small_again(sizes: tuple[int, int]) -> None:
    """After 64 batches, in every order of leaves; a batch that is kept takes what it needs."""
    megabyte = 1 << 20
    buffers = BufferPool(1 << 30)
    for _ in range(2):
        parts_of_batch(buffers, (megabyte, 100))
    parts_of_batch(buffers, (sizes[0] * megabyte, sizes[1] * megabyte))
    kept = [parts_of_batch(buffers, (megabyte, 100)) for _ in range(8)]
    with_huge_bytes = sum(memory.nbytes for memory in buffers._buffers)
    kept_bytes = len(kept[-1][0].base)
    del kept
    for _ in range(64):
        parts_of_batch(buffers, (megabyte, 100))

    assert with_huge_bytes > 100 * megabyte
    assert kept_bytes < 2 * megabyte
    assert sum(memory.nbytes for memory in buffers._buffers) < MAX_BUFFERS * 2 * megabyte


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 0},
        {"num_workers": 2, "worker_type": "thread", "persistent_workers": True},
        {"num_workers": 0, "batch_transform": lambda batch: batch},
    ],
    ids=["no workers", "threads", "batch_transform"],
)
@pytest.mark.parametrize("form", ["label first", "mask last", "nested"])
@pytest.mark.parametrize("is_cached", [False, True])
def test_no_leaf_of_the_second_epoch_is_cold(
    form: str, is_cached: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without workers and with threads; a batch transform gets its input in warm memory, too."""
    dataset: Any = datasets.Made(functools.partial(_leaves, form), 80)
    if is_cached:
        dataset = CachedDataset(dataset, max_memory=50 << 20)
        dataset.fill(num_workers=0, progress=False)
    missing: list[int] = []
    reserve = BumpAllocator.reserve

    def counted(self: BumpAllocator, nbytes: int) -> int | None:
        offset = reserve(self, nbytes)
        missing.extend([nbytes] if offset is None else [])
        return offset

    monkeypatch.setattr(BumpAllocator, "reserve", counted)
    with contextlib.closing(DataLoader(dataset, 8, **options)) as loader:
        for _ in range(2):
            missing.clear()
            for number, batch in enumerate(loader):
                assert batch[form == "label first"].flatten()[0] == 8 * number

    assert missing == []


def _leaves(form: str, index: int) -> Any:
    image = np.full((64, 64, 3), index, np.uint8)
    if form == "label first":
        return np.full(40, index), image
    return (image, image.copy()) if form == "mask last" else (image, {"more": [image.copy(), image[:, :7]]})


def _slot_bytes(pid: int | str) -> int:
    """Slot memory that a process has mapped."""
    total_bytes = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:fastload-slot" in line:
            start, end = line.split(" ", 1)[0].split("-")
            total_bytes += int(end, 16) - int(start, 16)
    return total_bytes


@pytest.mark.usefixtures("lends_small")
def test_close_gives_the_slots_back_while_the_caller_keeps_the_iterator() -> None:
    """What is lent stays mapped until its last view is gone; nothing else does."""
    loader = DataLoader(datasets.Made(datasets.image, 400), 4, num_workers=2)
    iterator = iter(loader)
    held = next(iterator)
    next(iterator)
    loader.close()
    with_batch = _slot_bytes("self")
    images = held[0].clone()

    del held

    assert torch.equal(images[1], torch.as_tensor(datasets.image(1)[0]))
    assert with_batch > 0
    assert _slot_bytes("self") == 0


@pytest.mark.usefixtures("lends_small")
def test_batches_that_grow_take_the_ring_beyond_its_limit_for_a_moment_only() -> None:
    """Slots that were made for small batches are given up by the parent and by the worker."""
    dataset = datasets.Made(lambda index: np.full(1024 if index < 20 else 512 * 1024, index, np.uint8), 80)
    options: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 6, "max_prefetch_memory": "2MB"}
    iterator = iter(DataLoader(dataset, 1, **options))
    pid = iterator._workers[0].pid
    for number, batch in enumerate(iterator):
        assert batch.flatten()[0] == number
        if number == 19:
            num_slots = len(iterator._pool.ring.slots)
        if number == 70:
            mapped = _slot_bytes("self"), _slot_bytes(pid)

    assert num_slots > 4
    assert max(mapped) <= 2_000_000 + 512 * 1024  # the batch in hand may be of a slot that was given up


def _with_huge(index: int) -> Any:
    return np.full(8 << 20 if index in (20, 21, 40, 41) else 256 << 10, index, np.uint8)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_slots_of_huge_batches_are_given_up_by_the_parent_and_by_the_workers(num_workers: int) -> None:
    """After a hundred small batches, no more is mapped than before the huge ones."""
    with contextlib.closing(DataLoader(datasets.Made(_with_huge, 180), 1, num_workers=num_workers)) as loader:
        iterator = iter(loader)
        pids = ["self", *(worker.pid for worker in iterator._workers)]
        mapped = {}
        for number, batch in enumerate(iterator):
            assert batch.flatten()[-1] == number
            if number in (18, 60, 170):
                mapped[number] = sum(map(_slot_bytes, pids))

    assert mapped[60] > mapped[18] + (16 << 20)
    assert mapped[170] < 1.2 * mapped[18]


def _outgrowing_or_count(index: int) -> Any:
    """Two arrays that outgrow the memory of the first, or how many segments are open and not mapped."""
    if index % 2 == 0:
        return np.zeros(10, np.uint8), np.full(100_000, index, np.uint8)
    files = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    is_slot = "memfd:fastload-slot"
    opened = {file.stat().st_ino for file in files if file.is_symlink() and is_slot in os.readlink(file)}
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len(opened - {int(line.split()[4]) for line in lines if is_slot in line})


def test_a_worker_keeps_no_segment_that_a_batch_has_outgrown() -> None:
    """What it has open is what it has mapped, for later batches."""
    batches = list(DataLoader(datasets.Made(_outgrowing_or_count, 8), None, num_workers=1))

    assert batches[1::2] == [0] * 4
    assert [int(large[0]) for _, large in batches[::2]] == [0, 2, 4, 6]


def image_and_more(index: int) -> Any:
    """An image, and what an evaluation keeps of each batch: 64 samples are 196 kB and 7 kB."""
    more = {"ids": np.array([index, -index]), "boxes": torch.full((5, 4), index), "label": index}
    return {"label": index, "image": np.full((32, 32, 3), index % 256, np.uint8), "more": more}


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "worker_type": "thread"}])
@pytest.mark.parametrize("cache", [None, "ram"])
def test_labels_that_are_kept_do_not_keep_the_images(
    options: Any, cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No slot and no buffer is held by small leaves, of whatever kind, nested or not."""
    memories: list[Memory] = []
    make = Memory.__init__

    def noted(self: Memory, *args: Any, **named: Any) -> None:
        make(self, *args, **named)
        memories.append(self)

    monkeypatch.setattr(Memory, "__init__", noted)
    dataset: Any = datasets.Made(image_and_more, 640)
    if cache is not None:
        dataset = CachedDataset(dataset, cache=cache, max_memory="20MB")
        dataset.fill(0, progress=False)
    with DataLoader(dataset, 64, **options) as loader:
        kept = [(batch["label"], batch["more"]) for batch in loader]

        assert memories
        assert not any(memory.is_leased for memory in memories)
        for number, (labels, more) in enumerate(kept):
            wanted = torch.arange(64 * number, 64 * number + 64)
            assert torch.equal(labels, wanted)
            assert torch.equal(more["label"], wanted)
            assert torch.equal(more["ids"], torch.stack([wanted, -wanted], 1))
            assert torch.equal(more["boxes"], wanted[:, None, None].expand(64, 5, 4))


def image_and_mask(index: int) -> Any:
    return np.full(50_000, index, np.uint8), np.full((2, 25_000), index, np.uint8)


def test_a_leaf_of_a_batch_that_is_copied_out_keeps_no_other_leaf() -> None:
    """Where no slot is left to lend, each leaf gets memory of its own."""
    with DataLoader(datasets.Made(image_and_mask, 80), 4, num_workers=1, max_prefetch_memory="1B") as loader:
        tracemalloc.start()
        masks = [mask for _, mask in loader]
        held_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        num_copies = loader.stats().num_copies

    assert num_copies > 10
    assert held_bytes < 1.2 * sum(mask.nbytes for mask in masks)
    assert [mask[:, 0, 0].tolist() for mask in masks] == torch.arange(80).view(20, 4).tolist()


def _no_memory(mapping: Any) -> None:
    raise SharedMemoryError("cannot take so much memory")


def test_memory_that_cannot_be_taken_is_an_error_and_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch that wants some fails on its own; the worker keeps none of the segments."""
    monkeypatch.setattr(segment_module, "populate", _no_memory)
    iterator = iter(DataLoader(datasets.Made(_outgrowing_or_count, 8), None, num_workers=1))

    for _ in range(4):
        with pytest.raises(SharedMemoryError, match="cannot take so much memory"):
            next(iterator)
        assert next(iterator) == 0


@pytest.mark.usefixtures("lends_small")
def test_a_loader_without_workers_keeps_its_buffers_between_epochs_until_it_is_closed() -> None:
    """The second epoch's batches lie where the first one's lay; a batch that is held stays as it is."""
    loader = DataLoader(datasets.Made(datasets.image, 40), 4)
    first, second = ({images.data_ptr() for images, _ in loader} for _ in range(2))
    held, _ = next(iter(loader))
    before = held.clone()
    for images, _ in loader:
        assert images.data_ptr() != held.data_ptr()

    assert second <= first
    assert torch.equal(held, before)
    assert runtime_of(loader).buffers
    loader.close()
    assert not runtime_of(loader).buffers


KNOWN = [[number] for number in range(100)]


def _walked(index: int) -> int:
    """How many of the objects that were there before the worker its garbage collector walks."""
    known = {id(one) for one in KNOWN}
    return sum(id(one) in known for one in gc.get_objects())


@pytest.mark.skipif("t" in sys.abiflags, reason="gc.freeze() is not safe in free-threaded builds")
def test_the_collector_of_a_worker_leaves_inherited_objects_alone() -> None:
    """A full collection would copy all pages that the worker shares with its parent."""
    KNOWN[:] = [[number] for number in range(100)]  # the imports of the tests are frozen here, too
    loader = DataLoader(datasets.Made(_walked, 2), None, num_workers=1, multiprocessing_context="fork")

    assert _walked(0) == 100
    assert list(loader) == [0, 0]
