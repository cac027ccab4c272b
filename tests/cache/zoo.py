"""Datasets and comparisons that the cache tests share; importable, so that spawned workers find them."""

from __future__ import annotations

import array
import copy
import random
from typing import Any, NamedTuple

import numpy as np
import torch


class Pair(NamedTuple):
    image: Any
    label: Any


class Images:
    """`(uint8 array, int)`, a function of the index; counts its reads, in a log those of all processes."""

    def __init__(self, num_samples: int = 20, *, shape: Any = (32, 24, 3), log: Any = None) -> None:
        self.num_samples, self.shape, self.log = num_samples, shape, log
        self._own_reads = array.array("q", bytes(8 * num_samples))  # which copies share, and nobody puts back

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        self._own_reads[index] += 1
        if self.log is not None:
            with open(self.log, "ab", buffering=0) as file:
                file.write(index.to_bytes(4, "little"))
        return self.sample(index)

    @property
    def reads(self) -> list[int]:
        """How often each sample was read."""
        if self.log is None:
            return self._own_reads.tolist()
        return np.bincount(np.fromfile(self.log, "<u4"), minlength=self.num_samples).tolist()

    def sample(self, index: int) -> Any:
        return np.random.RandomState(index).randint(0, 256, self.shape, np.uint8), index

    def __deepcopy__(self, memo: Any) -> Images:
        return copy.copy(self)  # which counts in the same list


class KnownImages(Images):
    """Images that say what they are: their version."""

    def __init__(self, num_samples: int = 20, *, version: Any = "1", **options: Any) -> None:
        super().__init__(num_samples, **options)
        self.version = version

    def fingerprint(self) -> Any:
        return self.version


class BareImages(Images):
    """The array alone."""

    def sample(self, index: int) -> Any:
        return super().sample(index)[0]


class RaggedImages(Images):
    """Every image of another size."""

    def sample(self, index: int) -> Any:
        shape = (8 + index % 7, 8 + index % 5, 3)
        return np.random.RandomState(index).randint(0, 256, shape, np.uint8), index


class MixedImages(Images):
    """One size at both ends and in the middle, others in between."""

    def sample(self, index: int) -> Any:
        odd = index % 3 == 1 and index not in (0, self.num_samples // 2, self.num_samples - 1)
        shape = (9, 9, 3) if odd else self.shape
        return np.random.RandomState(index).randint(0, 256, shape, np.uint8), index


class Everything(Images):
    """A nest with every kind of leaf."""

    def sample(self, index: int) -> Any:
        rng = np.random.RandomState(index)
        return {
            "image": rng.randint(0, 256, (4, 5, 3), np.uint8),
            "pair": (torch.arange(3) + index, rng.rand()),
            "more": [index % 2 == 0, f"name-{index}", b"\x00" * (index % 9), np.float32(index)],
            "half": (torch.full((2,), index, dtype=torch.bfloat16), np.int16(index)),
            "zero": np.zeros((0, 3), np.float32),
            "number": np.array(index),
        }


class RandomImages(Images):
    """Random in a way that its name says."""

    def __init__(self, way: str) -> None:
        super().__init__(20)
        self.way = way

    def sample(self, index: int) -> Any:
        image, label = super().sample(index)
        draw = {"random": random.random, "numpy": np.random.rand, "torch": lambda: float(torch.rand(1))}
        return {"image": image, "meta": [label, draw[self.way]() < 0.5]}


class Made(Images):
    """Samples made by a function of the index."""

    def __init__(self, make: Any, num_samples: int = 20) -> None:
        super().__init__(num_samples)
        self.make = make

    def sample(self, index: int) -> Any:
        return self.make(index)
