"""Datasets and functions with a planted bottleneck, for the tests of profiling."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import albumentations as A
import numpy as np
from torch.utils.data import Dataset, IterableDataset, default_collate

NUM_SAMPLES, BATCH = 48, 4
PLANTED_S = 0.02  # per sample


class Quick(Dataset[Any]):
    """Small images that cost next to nothing, with an optional transform."""

    def __init__(self, transform: Any = None) -> None:
        self.images = np.zeros((8, 32, 32, 3), np.uint8)
        self.transform = transform

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        image = self.images[index % 8].copy()
        return image if self.transform is None else self.transform(image=image)["image"], index


class SlowRead(Quick):
    """Waits in a method that reads."""

    def read(self, index: int) -> Any:
        time.sleep(PLANTED_S)
        return self.images[index % 8].copy()

    def __getitem__(self, index: int) -> Any:
        return self.read(index), index


class SlowBlur(A.ImageOnlyTransform):
    """A transform that waits."""

    def __init__(self) -> None:
        super().__init__(p=1.0)

    def apply(self, img: Any, **_params: Any) -> Any:
        time.sleep(PLANTED_S)
        return img


def slow_transform() -> Quick:
    """An albumentations pipeline, one of whose transforms is slow."""
    return Quick(A.Compose([A.HorizontalFlip(), SlowBlur(), A.VerticalFlip()]))


class Locked(Quick):
    """All workers wait for one lock."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = multiprocessing.get_context("fork").Lock()

    def __getitem__(self, index: int) -> Any:
        with self.lock:
            time.sleep(PLANTED_S)
        return super().__getitem__(index)


def slow_collate(samples: Any) -> Any:
    """A collate_fn that waits."""
    time.sleep(BATCH * PLANTED_S)
    return default_collate(samples)


class Stream(IterableDataset[Any]):
    """A stream that waits for each sample."""

    def __iter__(self) -> Any:
        for index in range(NUM_SAMPLES):
            time.sleep(PLANTED_S)
            yield index
