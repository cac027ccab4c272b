"""A random dataset of PIL images under cache="ram" decodes each file once, and gives the batches of torch's loader."""

import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import fastload
from fastload.readers import identity

identity.SETTLED_S = 0  # the photos were just copied
PATHS = sorted(Path("photos").rglob("*.png"))


class Photos(list):
    def __getitem__(self, index):
        image = Image.open(PATHS[index]).convert("RGB").crop((0, 0, random.randrange(8, 16), 8))
        return torch.from_numpy(np.array(image.resize((8, 8)))), random.random()


def epochs(loader):
    torch.manual_seed(3)
    return [(images.tolist(), draws.tolist()) for _ in range(3) for images, draws in loader]


options = {"batch_size": 4, "shuffle": True, "num_workers": 2}
loader = fastload.DataLoader(Photos(PATHS), cache="ram", **options)
assert epochs(loader) == epochs(torch.utils.data.DataLoader(Photos(PATHS), **options))
assert loader.stats().cache_misses == len(PATHS)
