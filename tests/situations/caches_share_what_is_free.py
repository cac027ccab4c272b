"""Two caches that could each take most of the memory stop in time together, and the rest is read from files."""

import resource
import warnings

import numpy as np
import psutil

import fastload


class Volumes:
    def __init__(self, first):
        self.first = first

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return np.full((2 << 20,), self.first + index % 50, np.uint8)


limit = psutil.Process().memory_info().vms + (350 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))  # what is free is 350 MB; both need 420 MB
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    train, val = (fastload.CachedDataset(Volumes(first), cache="ram") for first in (0, 100))
    for epoch in range(2):
        for index in range(100):
            assert train[index][-1] == index % 50
            assert val[index][-1] == 100 + index % 50
held = [one.cache_info().num_cached for one in (train, val)]
assert min(held) > 0, held
assert sum(held) < 170, held
model = np.ones(8 << 20, np.uint8)  # fits beside them
