"""An evaluation that keeps all labels, and a mean of each image, holds little more than those."""

import re

import numpy as np
import torch

import fastload


class Images:
    def __len__(self):
        return 640

    def __getitem__(self, index):
        return np.full((224, 224, 3), index % 251, np.uint8), index


def held_mb():
    status = open("/proc/self/status").read()  # all but files
    return sum(int(amount) for amount in re.findall(r"Rss(?:Shmem|Anon):\s+(\d+)", status)) / 1e3


loader = fastload.DataLoader(Images(), batch_size=16, num_workers=1, persistent_workers=True)
for images, labels in loader:
    pass
del images
before = held_mb()
targets, means = [], []
for images, labels in loader:  # 96 MB of images in all
    targets.append(labels)
    means.append(images[:, ::56, ::56].float().mean((1, 2, 3)))
del images
assert held_mb() - before < 40, held_mb() - before
assert torch.equal(torch.cat(targets), torch.arange(640))
assert torch.allclose(torch.cat(means), torch.arange(640) % 251.0)
