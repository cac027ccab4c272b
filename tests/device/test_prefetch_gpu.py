"""What only a real CUDA device shows: overlap, waits, contexts; skipped where there is none.

With the fixture `place`, tests of other files run on it too.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from fastload import DataLoader
from fastload.device.cuda import choose_backend
from fastload.device.prefetch import DevicePrefetcher
from fastload.memory.lease import Memory
from fastload.memory.segment import Segment, populate
from fastload.transforms import Normalize, RandomHorizontalFlip, RandomResizedCrop
from tests.device.loaders import SHORT_CYCLES, Loader
from tests.device.test_prefetch import numbered
from tests.kit import datasets

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LONG_CYCLES = 500_000_000  # a quarter of a second or so of a busy device


def pinned(number: int) -> torch.Tensor:
    return numbered(number).pin_memory()


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


@pytest.fixture(autouse=True)
def finish() -> Iterator[None]:
    """Each test ends with an idle device."""
    yield
    torch.cuda.synchronize()


def test_copies_run_while_the_consumer_computes() -> None:
    """The copy of the last batch that was pulled ends while the consumer's stream is busy with this one."""
    batches = [pinned(number) for number in range(8)]
    prefetcher = DevicePrefetcher(batches, depth=2)
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


def test_the_consumer_waits_for_a_late_copy() -> None:
    """A kernel launched right after next() reads the whole batch, even if the side stream is held up."""
    prefetcher = DevicePrefetcher(Loader(3, pinned), depth=1)
    iterator = iter(prefetcher)
    next(iterator)
    with torch.cuda.stream(prefetcher._stream):
        torch.cuda._sleep(LONG_CYCLES)
    results = [batch.clone() for batch in iterator]

    assert [torch.equal(r.cpu(), numbered(n)) for n, r in enumerate(results, start=1)] == [True, True]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_other_devices_get_no_context() -> None:
    """A process that loads to device 1, as rank 1 does, takes no memory on device 0."""
    code = """
import torch
from fastload import DataLoader

if __name__ == "__main__":
    pixels = torch.arange(4000, dtype=torch.uint8).reshape(40, 100)
    with DataLoader(pixels, 4, num_workers=1, device="cuda:1") as loader:
        arrived = torch.cat([batch.cpu() for batch in loader])
    print(torch.equal(arrived, pixels), [torch._C._cuda_hasPrimaryContext(index) for index in (0, 1)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split(maxsplit=1) == ["True", "[False, True]\n"]


# --- slots ------------------------------------------------------------------------------------------------


def test_registered_shared_memory_is_pinned_until_it_is_unregistered() -> None:
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
    assert backend.pin(tensor[4097:]).data_ptr() == tensor[4097:].data_ptr()
    assert "cudaHostRegister gave error" in backend.register(memory.address, memory.nbytes)
    copied = backend.copy(tensor[4097:], stream)
    backend.synchronize(backend.record_event(stream))
    assert torch.equal(copied.cpu(), tensor[4097:])
    assert backend.unregister(memory.address) == ""
    assert "cudaHostUnregister gave error" in backend.unregister(memory.address)
    assert not tensor.is_pinned()
    assert int(torch.ones(3, device="cuda").sum()) == 3  # no error is pending


# --- crops and flips --------------------------------------------------------------------------------------


def augmented(**options: Any) -> DataLoader:
    """A loader of cropped, flipped and normalised images."""
    transforms = [RandomResizedCrop(9), RandomHorizontalFlip(), Normalize([0.5] * 3, [0.25] * 3)]
    dataset = datasets.Made(datasets.image, 40)
    return DataLoader(dataset, 4, rng="sample", device_transform=transforms, **options)


def test_a_loader_with_crops_and_flips_never_synchronises() -> None:
    """In the first epoch, where slots are registered, and the later ones; on the copy stream and by hand."""
    images = datasets.Made(datasets.image, 4)
    by_hand = torch.stack([torch.as_tensor(images[number][0]) for number in range(4)]).cuda()
    with augmented(num_workers=2, persistent_workers=True, device="cuda") as loader, no_synchronization():
        num_batches = sum(1 for _ in range(2) for _ in loader)
        flipped = RandomHorizontalFlip(1.0)(by_hand)

    assert num_batches == 20
    assert torch.equal(flipped.cpu(), by_hand.cpu().flip(2))


def test_crops_and_flips_are_those_of_the_cpu() -> None:
    """The same draws on both devices, and values within one grey level, while the loop keeps the GPU busy."""
    step = 1 / 255 / 0.25
    with augmented(num_workers=2, device="cuda") as there, augmented(device="cpu") as here:
        there.set_epoch(3), here.set_epoch(3)
        for (images, labels), (expected, expected_labels) in zip(there, here, strict=True):
            torch.cuda._sleep(SHORT_CYCLES)
            assert torch.equal(labels.cpu(), expected_labels)
            assert (images.cpu() - expected).abs().max() < 1.01 * step
