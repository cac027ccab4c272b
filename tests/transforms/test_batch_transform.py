"""`batch_transform` of the loader: what it gets, what it draws, and what the caller gets."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from fastload import CachedDataset, DataLoader, transforms
from tests.kit import datasets, torchs_own
from tests.kit.batches import read_epoch

IMAGES = datasets.Made(datasets.image, 22)
AUGMENT = [transforms.RandomCrop(8, 2), transforms.RandomHorizontalFlip()]


def noisy(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    """Draws from the three global generators."""
    images, labels = batch
    noise = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    return [images.float() + sum(noise), labels]


def same(batch: Any) -> Any:
    return batch


def fails_for_some(batch: Any) -> Any:
    if 8 in batch[1]:
        raise ValueError("no eight")
    return batch


def read(index: int) -> Any:
    if index == 6:
        raise ValueError("six")
    return datasets.image(index)


def epoch_of(num_epochs: int = 1, **arguments: Any) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    arguments = {"dataset": IMAGES, "batch_size": 4, "generator": generator, **arguments}
    with DataLoader(**arguments) as loader:
        return [batch for _ in range(num_epochs) for batch in loader]


def equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) > 0 and all(
        torch.equal(left, right)
        for a, b in zip(one, other, strict=True)
        for left, right in zip(a, b, strict=True)
    )


@pytest.fixture(params=["processes", "forkserver", "threads", "torch"])
def workers(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Arguments for each kind of workers."""
    return {
        "processes": {"num_workers": 2},
        "forkserver": {"num_workers": 1, "multiprocessing_context": "forkserver"},
        "threads": {"num_workers": 2, "worker_type": "thread"},
        "torch": {"num_workers": 1, **torchs_own.FORK},
        "as they come": {"num_workers": 1, "in_order": False},
    }[request.param]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seeding", "workers"),
    [
        *(("worker", kind) for kind in ("processes", "threads", "torch")),
        *(("sample", kind) for kind in ("processes", "forkserver", "threads")),
    ],
    indirect=["workers"],
)
def test_it_draws_what_a_device_transform_draws(seeding: str, workers: dict[str, Any]) -> None:
    """A list of fastload's own transforms gives the same pixels in any kind of workers and on the device."""
    expected = epoch_of(2, seeding=seeding, shuffle=True, device="cpu", device_transform=AUGMENT)
    assert equal(epoch_of(2, seeding=seeding, shuffle=True, batch_transform=AUGMENT), expected)
    assert equal(epoch_of(2, seeding=seeding, shuffle=True, batch_transform=AUGMENT, **workers), expected)
    assert not equal(epoch_of(2, seeding=seeding, shuffle=True), expected)


@pytest.mark.parametrize("cache", [None, "ram"])
def test_samples_of_a_cache_and_of_its_source_are_transformed_alike(cache: str | None) -> None:
    """Whether a batch is gathered from a cache makes no difference."""
    dataset = CachedDataset(IMAGES, cache=cache)
    for _ in range(2):
        assert equal(epoch_of(dataset=dataset, batch_transform=AUGMENT), epoch_of(batch_transform=AUGMENT))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_of_a_stream_are_transformed(num_workers: int) -> None:
    """Each batch of an iterable dataset, also the short one at its end."""
    batches = epoch_of(dataset=datasets.Stream(6), num_workers=num_workers, batch_transform=list)
    assert [len(batch[0]) for batch in batches] == [4] * max(1, num_workers) + [2] * max(1, num_workers)
    assert all(type(batch) is list for batch in batches)


def test_it_gets_what_the_caller_would() -> None:
    """`(B, C, H, W)` images, or the dataset's batch with batch_size=None; what is no transform is refused."""
    shape = lambda batch: [torch.tensor(batch[0].shape)]  # noqa: E731
    shapes = epoch_of(memory_format=torch.channels_last, batch_transform=shape)
    assert shapes[0][0].tolist() == [4, 3, 8, 8]
    batches = epoch_of(batch_size=None, batch_transform=lambda sample: sample[1] * 2)
    assert batches == [2 * index for index in range(22)]
    with pytest.raises(ValueError, match="batch_transform should be a callable, or a list of callables"):
        DataLoader(IMAGES, batch_transform=[3])  # type: ignore[list-item]


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["processes", "threads"], indirect=True)
def test_other_draws_depend_on_the_samples_alone(workers: dict[str, Any]) -> None:
    """With seeding="sample", a function that draws from global generators gives the same in any worker."""
    is_thread = "worker_type" in workers
    expected = epoch_of(seeding="sample", batch_transform=noisy, num_workers=0)
    assert len({float(images.sum()) for images, _ in expected}) == len(expected)
    if not is_thread:  # they share the global generators
        assert equal(epoch_of(seeding="sample", batch_transform=noisy, **workers), expected)
        assert equal(epoch_of(seeding="sample", batch_transform=noisy, num_workers=1), expected)


@pytest.mark.slow
@pytest.mark.parametrize("seeding", ["worker", "sample"])
def test_a_resumed_epoch_draws_the_same(seeding: str) -> None:
    """The rest of an epoch has the pixels that it would have had."""
    options: dict[str, Any] = {
        "shuffle": True,
        "seeding": seeding,
        "batch_transform": AUGMENT,
        "num_workers": 2,
    }
    loader = DataLoader(IMAGES, 4, **options, generator=torch.Generator().manual_seed(0))
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    state, expected = loader.state_dict(), list(batches)
    other = DataLoader(IMAGES, 4, **options, generator=torch.Generator().manual_seed(1))
    other.load_state_dict(state)
    assert equal(list(other), expected)


def test_both_transforms_draw_numbers_of_their_own() -> None:
    """A flip in the worker says nothing about a flip on the device."""
    flip = transforms.RandomHorizontalFlip()
    both = epoch_of(device="cpu", batch_transform=flip, device_transform=flip)
    twice = [
        torch.equal(after, before)
        for (images, _), (plain, _) in zip(both, epoch_of(), strict=True)
        for after, before in zip(images, plain, strict=True)
    ]
    assert 0 < sum(twice) < len(twice)


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["processes", "threads", "torch"], indirect=True)
@pytest.mark.parametrize("transform", [same, transforms.RandomHorizontalFlip(0), []])
def test_batches_that_the_caller_keeps_never_change(transform: Any, workers: dict[str, Any]) -> None:
    """Also if the transform returns its input: no memory is reused while a batch is alive."""
    expected = epoch_of(3)
    assert equal(epoch_of(3, batch_transform=transform, **workers), expected)
    assert equal(epoch_of(3, batch_transform=transform), expected)


@pytest.mark.parametrize("workers", ["processes", "threads", "torch"], indirect=True)
def test_an_error_names_the_transform_and_costs_one_batch(workers: dict[str, Any]) -> None:
    """It has a note, a sample's error has none; the other batches are those of an epoch without errors."""
    for arguments in ({}, workers):
        options = {"batch_transform": [fails_for_some, *AUGMENT], **arguments}
        options["generator"] = torch.Generator().manual_seed(3)
        with DataLoader(datasets.Made(read, 22), 4, **options) as loader:
            first, of_sample, of_transform, *rest = read_epoch(loader)
        with pytest.raises(ValueError, match="six"):
            raise of_sample
        assert "batch_transform" not in "".join(getattr(of_sample, "__notes__", []))
        with pytest.raises(ValueError, match="no eight"):
            raise of_transform
        assert "batch_transform" in "".join(of_transform.__notes__)
        expected = epoch_of(batch_transform=AUGMENT, **arguments)
        assert equal([first, *rest], [expected[0], *expected[3:]])
