"""Datasets of the zoo that spawned workers unpickle without importing albumentations."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import numpy as np
from torch.utils.data import Dataset

NUM_SAMPLES, BATCH = 96, 4
PLANTED_S = 0.003  # per sample


class Quick(Dataset[Any]):
    """Small images that cost next to nothing."""

    def __init__(self) -> None:
        self.images = np.zeros((8, 32, 32, 3), np.uint8)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.images[index % 8].copy(), index


class Locked(Quick):
    """All workers wait for one lock."""

    def __init__(self, start_method: str) -> None:
        super().__init__()
        self.lock = multiprocessing.get_context(start_method).Lock()

    def __getitem__(self, index: int) -> Any:
        with self.lock:
            time.sleep(PLANTED_S)
        return super().__getitem__(index)
