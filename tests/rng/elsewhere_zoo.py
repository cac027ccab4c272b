"""Pipelines in places that no search through a dataset reaches; started workers import them."""

from __future__ import annotations

import functools
import importlib
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


@functools.lru_cache
def made_once() -> Any:
    return crop()


def of_module(index: int) -> int:
    return corner(TRAIN)


def of_other_module(index: int) -> int:
    return corner(importlib.import_module(__name__).TRAIN)


def of_config(index: int) -> int:
    return corner(Config.train)


def of_registry(index: int) -> int:
    return corner(REGISTRY["train"]["crop"])


def of_cached_function(index: int) -> int:
    return corner(made_once())


def of_new_pipeline(index: int) -> int:
    return corner(crop())


def of_two(index: int) -> list[int]:
    return [corner(pipeline) for pipeline in (TRAIN, Config.train)]


def of_either(index: int) -> int:
    return corner(TRAIN if index % 3 else Config.train)


def of_lambda() -> Any:
    pipeline = crop()
    return lambda index: corner(pipeline)


def of_sets() -> Any:
    held = {A.RandomCrop(8, 8)}
    return functools.partial(lambda held, index: corner(next(iter(held))), held)


def of_shared() -> Any:
    """Two datasets with one pipeline."""
    first, second = Corners(6), Corners(6)
    second.transform = first.transform
    return ConcatDataset([first, second])


PLACES: dict[str, Any] = {
    "module": lambda: Made(of_module, 12),
    "other module": lambda: Made(of_other_module, 12),
    "config": lambda: Made(of_config, 12),
    "registry": lambda: Made(of_registry, 12),
    "cached function": lambda: (made_once(), Made(of_cached_function, 12))[1],  # made before threads call it
    "new for each sample": lambda: Made(of_new_pipeline, 12),
    "two": lambda: Made(of_two, 12),
    "either": lambda: Made(of_either, 12),
    "lambda": lambda: Made(of_lambda(), 12),
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
