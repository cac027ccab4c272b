"""Datasets and functions with a planted bottleneck, for the tests of profiling."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import albumentations as A
import cv2
import numpy as np
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

NUM_SAMPLES, BATCH = 96, 4
PLANTED_S = 0.003  # per sample


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


class SlowPath:
    """A path that takes its time while it is opened."""

    def __fspath__(self) -> str:
        time.sleep(PLANTED_S)
        return "/dev/zero"


class SlowFile(Quick):
    """Opens files slowly, by way of `open`."""

    def __getitem__(self, index: int) -> Any:
        with open(SlowPath(), "rb") as file:
            return np.frombuffer(file.read(32 * 32), np.uint8).copy(), index


class ColdOnce(Quick):
    """Waits when a sample is read for the first time in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __getitem__(self, index: int) -> Any:
        if index not in self.seen:
            self.seen.add(index)
            time.sleep(PLANTED_S)
        return super().__getitem__(index)


class SlowBlur(A.ImageOnlyTransform):
    """A transform that waits; a busy loop would keep torch from sending the batch before, at times."""

    def __init__(self) -> None:
        super().__init__(p=1.0)

    def apply(self, img: Any, **_params: Any) -> Any:
        time.sleep(PLANTED_S)
        return img


def plain_transform(image: Any) -> Any:
    """A function that waits, as `SlowBlur` does."""
    time.sleep(PLANTED_S)
    return {"image": image}


def slow_transform() -> Quick:
    """An albumentations pipeline, one of whose transforms is slow."""
    return Quick(A.Compose([A.HorizontalFlip(), SlowBlur(), A.VerticalFlip()]))


class DecodedAndCropped(Quick):
    """JPEGs that are decoded in full, and of which a crop is used."""

    def __init__(self) -> None:
        super().__init__(A.Compose([A.RandomResizedCrop((32, 32)), A.HorizontalFlip()]))
        noise = np.random.default_rng(0).integers(0, 255, (600, 800, 3), np.uint8)
        self.file = cv2.imencode(".jpg", noise)[1]

    def __getitem__(self, index: int) -> Any:
        image = cv2.imdecode(self.file, cv2.IMREAD_COLOR_RGB)
        return self.transform(image=image)["image"], index


class SlowWorker(Quick):
    """Waits in worker 1 alone."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        time.sleep(5 * PLANTED_S if info is not None and info.id == 1 else PLANTED_S / 10)
        return super().__getitem__(index)


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
