"""A dataset that draws (a caption of five, an offset, a flip) is refused by a cache of samples, with the generator named."""

import random

import numpy as np
import torch

import fastload


class Random:
    def __init__(self, draw):
        self.folder, self.draw = fastload.ImageFolder("photos"), draw

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return self.folder[index][0], self.draw(index)


draws = {
    "random": lambda index: random.choice(["a", "b", "c", "d", "e"]),
    "numpy": lambda index: np.random.randint(9),
    "torch": lambda index: torch.randint(3, (1,)).item(),
    "default_rng": lambda index: np.random.default_rng().integers(1 << 30),
    "one in four": lambda index: random.randrange(2) if index % 4 == 3 else 0,
}
for name, draw in draws.items():
    dataset = Random(draw)
    try:
        cached = fastload.CachedDataset(dataset)
    except fastload.errors.NondeterministicDatasetError as error:
        assert "transform" in str(error)
    else:  # no sample that was looked at draws; those that do are never kept
        assert name == "one in four"
        assert len({cached[3][1] for _ in range(40)}) == 2
