"""SIGTERM in the middle of an epoch, as a scheduler sends it, ends a training and its workers."""

import os
import signal

import psutil

import fastload

ready, say_ready = os.pipe()
child = os.fork()
if child == 0:
    loader = fastload.DataLoader(fastload.ImageFolder("photos"), num_workers=2, persistent_workers=True)
    for epoch in range(100_000):
        for images, labels in loader:
            pass
        if epoch == 0:
            os.write(say_ready, b"!")
os.read(ready, 1)
workers = psutil.Process(child).children()
assert len(workers) == 2
os.kill(child, signal.SIGTERM)
assert os.waitpid(child, 0)[1] == signal.SIGTERM
assert not psutil.wait_procs(workers, timeout=20)[1]
