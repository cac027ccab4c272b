"""A loader made in a function and dropped in the middle of its epoch leaves no process and no descriptor."""

import gc
import os

import psutil

import fastload


def first_batch():
    photos = fastload.CachedDataset(fastload.ImageFolder("photos"))
    loader = fastload.DataLoader(photos, batch_size=4, num_workers=2, persistent_workers=True)
    return next(iter(loader))[0]


kept = first_batch()  # what is opened once and kept is open from here on
gc.collect()
before = len(os.listdir("/proc/self/fd"))
images = [first_batch() for _ in range(5)]
del images
gc.collect()
assert len(os.listdir("/proc/self/fd")) <= before
running = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
assert not psutil.wait_procs(running, timeout=10)[1]
assert kept[3, 0, 0].tolist() == [18, 18, 18]
