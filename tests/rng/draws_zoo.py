"""Datasets whose samples are what they drew; importable, so that spawned workers find them."""

from __future__ import annotations

import os
import random
from typing import Any

os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"  # its import would ask the network for a newer version

import albumentations as A  # the name its own documentation uses
import numpy as np
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

import fastload

SIDE = 64
POSITIONS = np.arange(SIDE * SIDE, dtype=np.int32).reshape(SIDE, SIDE, 1).astype(np.float32)


def plain(batch: Any) -> Any:
    """A nest with lists and numbers in place of tensors and arrays."""
    return tree_map(lambda leaf: leaf.tolist() if hasattr(leaf, "tolist") else leaf, batch)


class Randomizable:
    """What MONAI's class of this name is for seeding; the real one is not needed here."""

    R: np.random.RandomState = np.random.RandomState()

    def set_random_state(self, seed: int | None = None, state: Any = None) -> Randomizable:
        self.R = np.random.RandomState(seed) if state is None else state
        return self


class Composed(Randomizable):
    """As MONAI's Compose: its parts get seeds that it draws."""

    def __init__(self, *parts: Randomizable) -> None:
        self.parts = list(parts)

    def set_random_state(self, seed: int | None = None, state: Any = None) -> Composed:
        super().set_random_state(seed, state)
        for part in self.parts:
            part.set_random_state(self.R.randint(1 << 32))
        return self


class Dice:
    """Each sample: its index, and a draw of every kind of generator."""

    def __init__(self, length: int = 24, seed: int | None = None) -> None:
        self.length = length
        self.crop = A.Compose([A.OneOf([A.RandomCrop(8, 8)], p=1), A.HorizontalFlip(p=0.5)], seed=seed)
        self.second = A.RandomCrop(4, 4)
        self.part = Randomizable()
        self.composed = Composed(self.part)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        first, second = (pipeline(image=POSITIONS)["image"][0, 0, 0] for pipeline in (self.crop, self.second))
        return torch.tensor(
            [
                int(index),
                random.getrandbits(40),
                int(np.random.randint(1 << 40)),
                int(torch.randint(1 << 40, ())),
                int(fastload.sample_rng().integers(1 << 40)),
                int(fastload.sample_rng().integers(1 << 40)),
                int(first),
                int(second),
                int(self.part.R.randint(1 << 30)),
                int(self.composed.R.randint(1 << 30)),
            ]
        )


class Pictures:
    """Pictures whose pixels are their positions, and that draw on the way, as a reader that resizes does."""

    def __init__(self, length: int = 24) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        random.random(), np.random.rand(), torch.rand(())
        return POSITIONS + index, index


def resize() -> A.Compose:
    """A deterministic pipeline that draws all the same: albumentations tosses a coin for p=1, too."""
    return A.Compose([A.Resize(SIDE, SIDE, p=1)])


class Jitter:
    """A transform that draws and then writes to its input."""

    def __call__(self, sample: Any) -> Any:
        image, label = sample
        number = random.getrandbits(40) + np.random.randint(1 << 40) + int(torch.randint(1 << 40, ()))
        image[0, 0, 0] = 1.0
        return number, fastload.sample_rng().integers(1 << 40), label


class Wrapped:
    """Draws before and after it asks a cached dataset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        before = random.getrandbits(40), int(fastload.sample_rng().integers(1 << 40))
        sample = self.dataset[index]
        return before, sample, random.getrandbits(40), int(fastload.sample_rng().integers(1 << 40))


class Keyed:
    """Indexed by names, tuples and numbers."""

    def __getitem__(self, key: Any) -> Any:
        return str(key), random.getrandbits(40)


class Kept(Dice):
    """Seeds its own pipeline in the parent, and says where that stands."""

    def stand(self) -> Any:
        parts = [self.crop, *self.crop.transforms, *self.crop.transforms[0].transforms, self.second]
        return [(id(part.random_generator), id(part.py_random), part.py_random.getstate()) for part in parts]


class AtOnce(Dice):
    """Fetches many samples with one call."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Alone(Dice):
    """Draws only from what a thread has for itself."""

    def __getitem__(self, index: Any) -> Any:
        image, generator = self.crop(image=POSITIONS)["image"], fastload.sample_rng()
        numbers = [generator.integers(1 << 40), image[0, 0, 0], self.part.R.randint(1 << 30)]
        return torch.tensor([int(number) for number in (index, *numbers)])


class Drawing:
    """A collate_fn that draws from every kind of generator, and returns the batch and the draws.

    Args:
        shared: Whether it draws from the generators that threads share, and from a pipeline.
    """

    def __init__(self, *, shared: bool = True) -> None:
        self.shared = shared
        self.crop = A.Compose([A.RandomCrop(8, 8)])

    def __call__(self, samples: Any) -> Any:
        numbers = [int(fastload.sample_rng().integers(1 << 40))]
        if self.shared:
            numbers += [
                random.getrandbits(40),
                int(np.random.randint(1 << 40)),
                int(torch.randint(1 << 40, ())),
            ]
            numbers += [int(self.crop(image=POSITIONS)["image"][0, 0, 0]) for _ in range(4)]
        return (default_collate(samples) if type(samples) is list else samples), numbers


class Unreadable(Dice):
    """Draws, and then fails to read the last sample of every batch of four."""

    def __getitem__(self, index: Any) -> Any:
        row = super().__getitem__(index)
        if index % 4 == 3:
            raise OSError(f"sample {index} cannot be read")
        return row
