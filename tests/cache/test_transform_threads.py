"""One cached dataset that several threads read at the same time."""

from __future__ import annotations

import functools
import threading
import warnings
from typing import Any

import albumentations as A
import numpy as np
import pytest
import torch

from fastload import DataLoader
from fastload.cache.dataset import CachedDataset
from tests.cache.zoo import BareImages, FloatImages
from tests.kit.batches import assert_same_samples


def run_threads(*functions: Any) -> None:
    """Run functions at the same time, the first in a thread called "first", and raise what one raised."""
    errors: list[BaseException] = []

    def run(function: Any) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001  # raised again below
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(function,), name="other" if number else "first")
        for number, function in enumerate(functions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]


def test_threads_leave_the_warning_filters_alone() -> None:
    """Two threads that leave the transform in the order in which they entered it change no filter."""
    entered, second_entered, left = threading.Event(), threading.Event(), threading.Event()
    filters = list(warnings.filters)

    def overlap(image: Any) -> Any:
        if threading.current_thread().name == "first":
            entered.set()
            assert second_entered.wait(30)
        else:
            second_entered.set()
            assert left.wait(30)
        return image

    ds = CachedDataset(BareImages(2), overlap)

    def first() -> None:
        ds[0]
        left.set()

    def second() -> None:
        assert entered.wait(30)
        ds[1]

    run_threads(first, second)

    assert warnings.filters == filters


def test_threads_share_a_cached_dataset() -> None:
    """Threads that are in the first call of a writing transform at once each get what they asked for."""
    barrier = threading.Barrier(8)

    def write(image: Any) -> Any:
        barrier.wait(30)
        torch.from_numpy(image).add_(1)
        barrier.wait(30)
        return image

    dataset = BareImages(8)
    ds = CachedDataset(dataset, write)
    found: dict[int, Any] = {}

    def get(index: int) -> None:
        found[index] = [ds[index] for _ in range(3)]

    run_threads(*(functools.partial(get, index) for index in range(8)))

    for index in range(8):
        for output in found[index]:
            assert_same_samples(output, dataset.sample(index) + 1)
        assert_same_samples(ds.view(index), dataset.sample(index))


def test_the_transform_may_be_replaced_while_threads_read() -> None:
    """A thread that replaces or removes the transform while another is in it makes no call fail."""
    inside, replaced = threading.Event(), threading.Event()

    def wait(image: Any) -> Any:
        inside.set()
        assert replaced.wait(30)
        return "old"

    ds = CachedDataset(BareImages(2), wait)
    found: list[Any] = []

    def replace() -> None:
        assert inside.wait(30)
        ds.transform = lambda image: "new"
        found.append(ds[0])
        ds.transform = None
        replaced.set()

    run_threads(lambda: found.append(ds[1]), replace)

    assert found == ["new", "old"]
    assert_same_samples(ds[1], BareImages(2).sample(1))


@pytest.mark.parametrize("normalization", ["min_max_per_channel", "standard"])
def test_worker_threads_transform_as_plain_code(normalization: Any) -> None:
    """worker_method="thread" gives what a pipeline gives on plain arrays, also if it refuses at first."""
    dataset = FloatImages(24)
    pipeline = A.Compose([A.Normalize(normalization=normalization), A.HorizontalFlip(p=1)])
    loader = DataLoader(
        CachedDataset(dataset, pipeline), batch_size=None, num_workers=3, worker_method="thread"
    )
    for _ in range(2):
        for index, image in enumerate(loader):
            assert_same_samples(np.asarray(image), pipeline(image=dataset.sample(index))["image"])
