"""A folder that is a link to today's data, which is set to other data between two epochs, gives no sample of before.

The dataset reads by name, in worker processes, with a cache of files: in RAM, and on disk.
"""

import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import fastload
from fastload.readers import identity

identity.SETTLED_S = 0.0  # files that were made a moment ago are remembered


class Photos(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return np.asarray(Image.open(f"today/cat/{index:02}.png"))


for name, gray in ("monday", 6), ("tuesday", 7):
    Path(name, "cat").mkdir(parents=True)
    for number in range(20):
        Image.fromarray(np.full((48, 64, 3), gray * number, np.uint8)).save(f"{name}/cat/{number:02}.png")
for cache in "ram", "lmdb:cache.lmdb":
    loader = fastload.DataLoader(Photos(), batch_size=4, num_workers=2, cache=cache)
    for name, gray in 2 * [("monday", 6), ("tuesday", 7)]:
        Path("new").symlink_to(name)
        os.replace("new", "today")
        values = [value for images in loader for value in images[:, 0, 0, 0].tolist()]
        assert values == [gray * number for number in range(20)]
    assert loader.stats().cache_hits >= 40  # of the last two epochs; on disk, some files of both are equal
