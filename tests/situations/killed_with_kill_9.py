"""kill -9 of a training leaves no worker, no cache and nothing in /dev/shm."""

import os
import signal

import psutil

import fastload

before = {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}
ready, say_ready = os.pipe()
child = os.fork()
if child == 0:
    dataset = fastload.CachedDataset(fastload.ImageFolder("photos"), cache="ram")
    loader = fastload.DataLoader(dataset, batch_size=8, num_workers=2, persistent_workers=True)
    for epoch in range(10_000):
        for images, labels in loader:
            pass
        if epoch == 1:
            os.write(say_ready, b"!")
os.read(ready, 1)
workers = psutil.Process(child).children()
assert len(workers) == 2
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
assert not psutil.wait_procs(workers, timeout=20)[1]
assert {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")} <= before
again = fastload.CachedDataset(fastload.ImageFolder("photos"), cache="ram")  # a new one: the old one has gone
assert again.cache_info().num_cached < 40
assert again[39][0].max() == 234
