"""Datasets and worker functions for the seeding tests, in a module that spawned workers can import."""

from __future__ import annotations

import os
import random
from typing import Any

os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # its import would ask the network for a newer version

import albumentations as A  # the name its own documentation uses
import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

# A crop of a picture whose pixels are their own positions tells where it was taken.
SIDE = 256
POSITIONS = np.arange(SIDE * SIDE, dtype=np.int32).reshape(SIDE, SIDE, 1).astype(np.float32)


def crop(seed: int | None = None) -> A.Compose:
    return A.Compose([A.RandomCrop(8, 8)], seed=seed)


def nested() -> tuple[A.Compose, list[Any]]:
    """A pipeline with every kind of composition in it, and all transforms below it."""
    flip = A.VerticalFlip()
    sequential = A.Sequential([flip])
    one_of = A.OneOf([A.HorizontalFlip(), sequential])
    replay = A.ReplayCompose([A.RandomCrop(2, 2)])
    some_of = A.SomeOf([A.Compose([A.Transpose()])], n=1)
    outer = A.Compose(
        [one_of, replay, some_of],
        bbox_params=A.BboxParams("coco", label_fields=[]),
        keypoint_params=A.KeypointParams("xy"),
    )
    parts = [one_of, *one_of, flip, replay, *replay, some_of, *some_of, some_of[0][0]]
    return outer, parts


def corner(pipeline: Any) -> int:
    """Where one random crop starts."""
    return int(pipeline(image=POSITIONS)["image"][0, 0, 0])


class Crops(Dataset[Any]):
    """Each sample: (worker, position of a random crop)."""

    def __init__(self, num_samples: int = 16) -> None:
        self.num_samples = num_samples
        self.transform = crop()

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[int, int]:
        info = get_worker_info()
        return (-1 if info is None else info.id), corner(self.transform)


class Draws(Dataset[Any]):
    """Each sample: one draw of random, numpy and torch."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))


class Raises:
    """Runs no code when it is only looked at; raises at every other touch."""

    __slots__ = ("__dict__", "inner", "never_set")

    def __init__(self, inner: Any) -> None:
        object.__setattr__(self, "inner", inner)

    def _refuse(self, *_: Any) -> Any:
        raise ZeroDivisionError("user code was run")

    __getattribute__ = __getattr__ = __iter__ = __len__ = __eq__ = __hash__ = __bool__ = _refuse
    __class__ = property(_refuse)
    anything = property(_refuse)


def append_zero(worker_id: int) -> None:
    _calls(worker_id).append(("zero", random.random()))


def append_one(worker_id: int) -> None:
    _calls(worker_id).append(("one", random.random()))


def _calls(worker_id: int) -> list[tuple[str, float]]:
    info = get_worker_info()
    if info is None or info.id != worker_id:
        raise ValueError("called with another worker's id")
    return info.dataset.calls  # type: ignore[attr-defined,no-any-return]


class Calls(Dataset[Any]):
    """Its one sample is what the worker's functions noted, and the next draw."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float]] = []

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> list[tuple[str, float]]:
        return self.calls
