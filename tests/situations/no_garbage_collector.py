"""Loops that are left early give back workers and descriptors in a program that has switched the garbage collector off."""

import gc
import os

import psutil

import fastload

if __name__ == "__main__":
    gc.disable()
    dataset = fastload.CachedDataset(fastload.ImageFolder("photos"))
    num_open, num_children = [], []
    for turn in range(12):
        loader = fastload.DataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=turn % 2 == 1)
        for images, labels in loader:
            break
        iterator = iter(loader)
        images, labels = next(iterator)
        num_open.append(len(os.listdir("/proc/self/fd")))
        num_children.append(len(psutil.Process().children(recursive=True)))
    for counts in num_open, num_children:
        assert max(counts[6:]) <= max(counts[:6]), counts
    loader.close()
