"""A search that makes fifteen loaders of different settings, and keeps the last three, grows in no way."""

import collections
import gc
import os
import threading

import psutil

import fastload

dataset = fastload.CachedDataset(fastload.ImageFolder("photos"))
kept, first = collections.deque(maxlen=3), None
for trial in range(15):
    options = {"num_workers": trial % 3, "worker_type": "thread" if trial % 4 == 1 else "process"}
    loader = fastload.DataLoader(dataset, batch_size=4 + trial % 5, shuffle=True, **options)
    assert sorted(value for images, labels in loader for value in images[:, 0, 0, 0].tolist()) == list(
        range(0, 240, 6)
    )
    kept.append((loader, iter(loader)))
    if trial % 5 == 4:
        kept.clear()
        gc.collect()
        psutil.wait_procs(psutil.Process().children(), timeout=10)
        held = len(os.listdir("/proc/self/fd")), threading.active_count(), len(psutil.Process().children())
        first = first or held
        assert held <= (first[0] + 1, first[1], first[2]), (held, first)
