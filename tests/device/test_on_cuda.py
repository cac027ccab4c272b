"""What only a real device shows of forks, captures, compiled transforms, kernels and default devices."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from fastload import DataLoader
from fastload.device.device_prefetcher import DevicePrefetcher
from fastload.transforms import (
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    resample,
)
from tests.device.conftest import CUDA
from tests.kit import datasets

pytestmark = pytest.mark.parametrize("place", [CUDA], indirect=True)

IMAGES = datasets.Made(datasets.image, 40)


def needs_a_driver() -> None:
    """Skip the test over the emulated runtime, which has no captures and compiles nothing."""
    if torch.cuda.get_device_name() == "Emulated CUDA":
        pytest.skip("needs a real device")


class Cycle:
    """Garbage that only a collection frees."""

    def __init__(self, batch: Any) -> None:
        self.batch, self.me = batch, self


@pytest.mark.parametrize("by_loader", [True, False])
def test_a_collection_in_a_forked_child_survives_delivered_batches(place: Any, by_loader: bool) -> None:
    """A child that has no device destroys none of the parent's tensors, with a transform and without."""
    gc.collect()
    gc.disable()
    try:
        if by_loader:
            batches: Any = DataLoader(
                IMAGES, 4, device="cuda", device_transform=lambda batch: batch[0].float()
            )
        else:
            batches = DevicePrefetcher([torch.ones(64, 64) for _ in range(4)])
        for batch in batches:
            Cycle(batch)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # CUDA has threads
            pid = os.fork()
        if not pid:
            gc.collect()
            os._exit(0)
    finally:
        gc.enable()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_next_within_a_capture_is_refused(place: Any) -> None:
    """With a clear error, which leaves the capture, the loader and the device as they were."""
    needs_a_driver()
    iterator = iter(DataLoader(IMAGES, 4, device="cuda"))
    next(iterator)
    total, graph = torch.zeros((), device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total.add_(1)
        with pytest.raises(RuntimeError, match="called while a CUDA graph was captured"):
            next(iterator)
    graph.replay()
    assert float(total) == 1
    assert [int(labels[0]) for _, labels in iterator] == list(range(4, 40, 4))


def test_compiled_transforms_may_use_cuda_graphs(place: Any) -> None:
    """Their outputs, which the next call overwrites, are cloned for each batch; in a process of its own."""
    needs_a_driver()
    if importlib.util.find_spec("triton") is None:
        pytest.skip("torch.compile needs triton")
    code = """
import torch
from fastload import DataLoader
compiled = torch.compile(lambda batch: batch.float() + 1, mode="reduce-overhead")
pixels = torch.arange(40 * 64, dtype=torch.uint8).reshape(40, 64)
held = torch.cat(list(DataLoader(pixels, 4, device="cuda", device_transform=compiled))).cpu()
print(torch.equal(held, pixels.float() + 1))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("is_planar", [False, True])
@pytest.mark.parametrize("shape", [(5, 61, 47, 3), (2, 1, 9, 1), (3, 8, 1, 4), (0, 8, 8, 3)])
def test_crops_on_the_device_are_those_of_the_cpu(
    place: Any, dtype: torch.dtype, is_planar: bool, shape: tuple[int, ...]
) -> None:
    """Whichever kernels make them: within a grey level, or the rounding of floats; any strides."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, shape, generator=generator).to(dtype)
    if is_planar:
        images = images.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    draws = np.random.default_rng(1)
    height, width = draws.integers(1, shape[1] + 1, shape[0]), draws.integers(1, shape[2] + 1, shape[0])
    top, left = draws.integers(0, shape[1] - height + 1), draws.integers(0, shape[2] - width + 1)
    boxes = np.stack([top, left, height, width]).astype(np.float64)
    for size in ((33, 29), (7, 80)):
        expected = resample.resample(images, boxes, size)
        found = resample.resample(images.cuda(), boxes, size)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.is_contiguous()
        tolerance = 1.0 if dtype == torch.uint8 else max(256 * torch.finfo(dtype).eps, 2e-2)
        assert not shape[0] or (found.cpu().double() - expected.double()).abs().max() <= tolerance


def test_one_kernel_crops_where_triton_is(place: Any) -> None:
    """The check of the kernel itself: it was compiled, and was not replaced by torch's operations."""
    needs_a_driver()
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    assert resample._triton() is not None


@pytest.mark.parametrize(
    "transform",
    [
        *(RandomResizedCrop(8), RandomHorizontalFlip(), RandomCrop(8, 2)),
        Normalize([0.5] * 3, [0.25] * 3),
    ],
    ids=lambda transform: type(transform).__name__,
)
def test_transforms_run_under_a_default_device(place: Any, transform: Any) -> None:
    """torch.set_default_device("cuda") changes nothing: what is made for the host is made there."""
    expected = list(DataLoader(IMAGES, 4, seeding="sample", device="cuda", device_transform=transform))
    with torch.device("cuda"):
        found = list(DataLoader(IMAGES, 4, seeding="sample", device="cuda", device_transform=transform))
    assert all(torch.equal(one[0], two[0]) for one, two in zip(found, expected, strict=True))


def test_gathered_batches_are_those_of_the_ordinary_way(place: Any) -> None:
    """A dataset whose columns lie on the device gives the same batches, bit for bit."""
    augment = [RandomCrop(8, 2), RandomHorizontalFlip(), Normalize([0.5] * 3, [0.25] * 3)]
    samples = [IMAGES[index] for index in range(len(IMAGES))]
    images, labels = (column.cuda() for column in torch.utils.data.default_collate(samples))
    ordinary = DataLoader(IMAGES, 4, seeding="sample", device="cuda", device_transform=augment)
    gather = [lambda rows: [images[rows], labels[rows]], *augment]
    gathering = DataLoader(range(len(IMAGES)), 4, seeding="sample", device="cuda", device_transform=gather)
    for one, two in zip(ordinary, gathering, strict=True):
        assert all(torch.equal(left, right) for left, right in zip(one, two, strict=True))


def test_many_leaves_arrive_in_one_copy(place: Any) -> None:
    """A detector's batch: their values, whatever the device does meanwhile."""
    batches = [
        [
            {
                "box": torch.full((4,), 100.0 * n + i),
                "id": torch.tensor(i),
                "on": torch.ones(i % 3, dtype=torch.bool),
            }
            for i in range(200)
        ]
        for n in range(6)
    ]
    for batch, expected in zip(DevicePrefetcher(batches), batches, strict=True):
        place.work()
        assert all(
            torch.equal(found[name].cpu(), leaf)
            for found, sample in zip(batch, expected, strict=True)
            for name, leaf in sample.items()
        )
