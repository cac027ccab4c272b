"""Datasets and functions that keep generators of their own; importable, so that spawned workers find them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

KINDS: dict[str, Any] = {
    "Generator": lambda: np.random.default_rng(1),
    "PCG64DXSM": lambda: np.random.Generator(np.random.PCG64DXSM(1)),
    "MT19937": lambda: np.random.Generator(np.random.MT19937(1)),
    "Philox": lambda: np.random.Generator(np.random.Philox(1)),
    "SFC64": lambda: np.random.Generator(np.random.SFC64(1)),
    "RandomState": lambda: np.random.RandomState(1),
    "Random": lambda: random.Random(1),
    "torch": lambda: torch.Generator().manual_seed(1),
}
NUM_SAMPLES = 12


def draw(generator: Any) -> int:
    """A number of 31 bits; the normal draw first leaves numbers behind in generators that keep some."""
    if isinstance(generator, torch.Generator):
        torch.randn(1, generator=generator)
        return int(torch.randint(1 << 31, (), generator=generator))
    if isinstance(generator, random.Random):
        generator.gauss()
        return generator.getrandbits(31)
    generator.normal()
    return int(generator.bytes(4).hex(), 16) >> 1


class Holder:
    """Holds a value in an attribute."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Drawn(Holder):
    """A dataset whose samples are their index and two draws from each of its generators."""

    def __init__(self, *generators: Any) -> None:
        super().__init__(list(generators))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index, [(draw(generator), draw(generator)) for generator in self.value]


class Noise(Holder):
    """A transform that adds a draw to the sample."""

    def __call__(self, sample: Any) -> Any:
        return (*sample, draw(self.value))


class Compose:
    """As torchvision's."""

    def __init__(self, *transforms: Any) -> None:
        self.transforms = transforms

    def __call__(self, sample: Any) -> Any:
        for transform in self.transforms:
            sample = transform(sample)
        return sample


class Plain:
    """A dataset that applies a transform to the index."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.transform((index,))


class Arrays:
    """A dataset without anything random."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return np.full(2, index)


class WithNumber:
    """A transform of cached arrays that adds a draw."""

    def __init__(self) -> None:
        self.options = {"rng": np.random.default_rng(1)}

    def __call__(self, array: Any) -> Any:
        return array, draw(self.options["rng"])


class Mixing(Holder):
    """A collate_fn that draws once for each batch."""

    def __call__(self, samples: Any) -> Any:
        return default_collate(samples), draw(self.value)


class OwnBits(np.random.PCG64):
    """A bit generator that fastload does not know."""


module_generator = np.random.default_rng(1)


class DrawsFromModule(Arrays):
    """Draws from a generator that its method finds in the module."""

    def __getitem__(self, index: int) -> Any:
        return index, draw(module_generator)
