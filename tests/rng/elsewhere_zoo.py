"""Pipelines in places that no search through a dataset reaches; started workers import them."""

from __future__ import annotations

import functools
from typing import Any

import albumentations as A  # the name its own documentation uses
from torch.utils.data import ConcatDataset

from tests.kit.datasets import Made
from tests.rng.draws_zoo import corner
from tests.rng.pipelines_zoo import Corners, crop

TRAIN = crop()
REGISTRY = {"train": {"crop": crop()}}


class Config:
    """As in many projects."""

    train = crop()


def of_config(index: int) -> int:
    return corner(Config.train)


def of_registry(index: int) -> int:
    return corner(REGISTRY["train"]["crop"])


def of_new_pipeline(index: int) -> int:
    return corner(crop())


def of_two(index: int) -> list[int]:
    return [corner(pipeline) for pipeline in (TRAIN, Config.train)]


def of_either(index: int) -> int:
    return corner(TRAIN if index % 3 else Config.train)


def of_sets() -> Any:
    held = {A.RandomCrop(8, 8)}
    return functools.partial(lambda held, index: corner(next(iter(held))), held)


def of_shared() -> Any:
    """Two datasets with one pipeline."""
    first, second = Corners(6), Corners(6)
    second.transform = first.transform
    return ConcatDataset([first, second])


PLACES: dict[str, Any] = {
    "config": lambda: Made(of_config, 12),
    "new for each sample": lambda: Made(of_new_pipeline, 12),
    "two": lambda: Made(of_two, 12),
    "either": lambda: Made(of_either, 12),
    "set": lambda: Made(of_sets(), 12),
    "shared": of_shared,
}


class Calls(A.ImageOnlyTransform):  # type: ignore[misc]  # albumentations has no types
    """Counts the threads that are within its call."""

    def __init__(self) -> None:
        super().__init__(p=1.0)
        self.inside: list[int] = []
        self.most = 0

    def apply(self, img: Any, **params: Any) -> Any:
        self.inside.append(1)
        self.most = max(self.most, len(self.inside))
        A.GaussianBlur(p=1)(image=img)  # releases the GIL
        self.inside.pop()
        return img


class OwnCall(A.Compose):  # type: ignore[misc]
    """A user's composition that does not call albumentations' own `__call__`."""

    def __call__(self, **data: Any) -> Any:
        for transform in self.transforms:
            data = transform(**data)
        return data
