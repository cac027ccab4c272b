"""AlbumentationsX, by duck typing: its own seeding is respected; in an environment of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.clients import contract
from tests.clients.harness import run

if TYPE_CHECKING:
    from pathlib import Path

PHOTOS = """
import importlib.metadata

import albumentations as A
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from tests.clients.in_rank import NUM_WORKERS, digest, record

assert importlib.metadata.version("albumentationsx")
PIXELS = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)  # crops show what was drawn
record("transforms", A.RandomCrop.__module__)


class Photos(Dataset):
    def __init__(self):
        self.augment = A.Compose([A.RandomCrop(8, 8), A.RandomBrightnessContrast(p=0.5)], SEED)

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return np.ascontiguousarray(self.augment(image=PIXELS)["image"]), index
"""
TRAIN = """
torch.manual_seed(1)
loader = DataLoader(Photos(), batch_size=2, shuffle=True, num_workers=NUM_WORKERS)
record("number of batches", len(loader))
for epoch in range(2):
    for images, labels in loader:
        record("labels", labels)
        if NUM_WORKERS or IS_SEEDED:  # without workers and without a seed, it draws from the system's entropy
            record("train", images)
"""


class TestWithoutSeed(contract.Batches):
    script = PHOTOS.replace("SEED", "seed=None") + TRAIN.replace("IS_SEEDED", "False")
    environment = "albumentationsx"


class TestWithSeed(contract.Batches):
    script = PHOTOS.replace("SEED", "seed=7") + TRAIN.replace("IS_SEEDED", "True")
    environment = "albumentationsx"


def test_workers_and_epochs_differ(tmp_path: Path) -> None:
    """Each worker draws crops of its own, and each epoch draws others."""
    script = (
        PHOTOS.replace("SEED", "seed=None")
        + """
import fastload

torch.manual_seed(1)
loader = fastload.DataLoader(Photos(), batch_size=12, num_workers=2)  # one batch for each worker
digests = [digest(images) for epoch in range(2) for images, labels in loader]
record("distinct batches", len(set(digests)))
"""
    )
    ended = run(script, tmp_path, "torch", environment="albumentationsx").check_end()

    assert ended.ranks[0].got("distinct batches") == [4]


def test_pixels_of_a_sample_do_not_depend_on_workers(tmp_path: Path) -> None:
    """With `rng="sample"`: for 0, 1 and 2 workers and for threads, with a cache and without one."""
    script = (
        PHOTOS.replace("SEED", "seed=None")
        + """
import fastload


class Plain(Photos):
    def __getitem__(self, index):
        return PIXELS, index


def augment(sample):
    return np.ascontiguousarray(photos.augment(image=sample[0])["image"]), sample[1]


photos = Photos()
found = []
ways = [{}, {"num_workers": 1}, {"num_workers": 2}, {"num_workers": 2, "worker_method": "thread"}]
for dataset in (Photos(), fastload.CachedDataset(Plain(), transform=augment, cache="ram")):
    for way in ways:
        generator = torch.Generator().manual_seed(3)
        loader = fastload.DataLoader(dataset, 4, shuffle=True, rng="sample", generator=generator, **way)
        found.append(tuple(digest(batch) for epoch in range(2) for batch in loader))
record("plain", len(set(found[:4])))
record("cached", len(set(found[4:])))
"""
    )
    ended = run(script, tmp_path, "torch", environment="albumentationsx").check_end()

    assert ended.ranks[0].got("plain", "cached") == [1, 1]
