"""Several views of one sample, as a function or an object of the user's makes them."""

from __future__ import annotations

from typing import Any

import albumentations as A  # the name its own documentation uses
import numpy as np
import pytest
import torch

import fastload

PIXELS = np.arange(64 * 64, dtype=np.float32).reshape(64, 64, 1)
NUM_SAMPLES = 12
crop = A.Compose([A.RandomCrop(4, 4), A.HorizontalFlip(p=0.5)])


class Samples:
    """The same image, and the index."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return PIXELS, index


def three_views(sample: Any) -> Any:
    image, label = sample
    return [crop(image=image)["image"] for _ in range(3)], label


class Crops:
    """The same pipeline, three times."""

    def __init__(self) -> None:
        self.pipelines = [A.Compose([A.RandomCrop(4, 4), A.HorizontalFlip(p=0.5)])] * 3

    def __call__(self, sample: Any) -> Any:
        image, label = sample
        return [pipeline(image=image)["image"] for pipeline in self.pipelines], label


def load(
    transform: Any, num_workers: int, rng: str, **options: Any
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The views, `(12, 4, 4, 1)` each, and the labels of one epoch."""
    dataset = fastload.CachedDataset(Samples(), transform=transform)
    generator = torch.Generator().manual_seed(3)
    with fastload.DataLoader(
        dataset, batch_size=4, num_workers=num_workers, rng=rng, generator=generator, **options
    ) as loader:
        batches = list(loader)
    assert all(type(views) is list and len(views) == 3 for views, _ in batches)
    return (
        [torch.cat([views[i] for views, _ in batches]) for i in range(3)],
        torch.cat([labels for _, labels in batches]),
    )


@pytest.mark.parametrize("rng", ["worker", "sample"])
@pytest.mark.parametrize("transform", [three_views, Crops()], ids=["function", "object"])
def test_views_of_one_pipeline_differ(transform: Any, rng: str) -> None:
    """A batch has a list of n tensors; the views of an epoch are different crops, in two workers."""
    views, labels = load(transform, 2, rng)
    corners = torch.cat([view[:, 0, :, 0].sort().values for view in views])

    assert labels.tolist() == list(range(NUM_SAMPLES))
    assert [tuple(view.shape) for view in views] == [(NUM_SAMPLES, 4, 4, 1)] * 3
    # Of 36 crops at 61 * 61 places, chance makes a few equal; a stream that repeats makes at most 24.
    assert len({tuple(corner) for corner in corners.tolist()}) > 2.5 * NUM_SAMPLES


@pytest.mark.parametrize(
    ("transform", "num_workers", "options"),
    [
        (three_views, 2, {}),
        pytest.param(three_views, 2, {"multiprocessing_context": "spawn"}, marks=pytest.mark.slow),
        pytest.param(Crops(), 1, {"multiprocessing_context": "spawn"}, marks=pytest.mark.slow),
        (Crops(), 2, {"worker_method": "thread"}),
    ],
)
def test_views_are_the_same_for_any_number_of_workers(
    transform: Any, num_workers: int, options: dict[str, Any]
) -> None:
    """With rng="sample" the n views follow from the sample, in workers of any kind."""
    expected, _ = load(transform, 0, "sample")
    views, _ = load(transform, num_workers, "sample", **options)

    assert all(map(torch.equal, views, expected))
