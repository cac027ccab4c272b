"""A program that replaces itself by os.execv() in the middle of an epoch leaves no worker, descriptor or memory to the new one.

$ exec python restarts_itself.py fork
$ exec python restarts_itself.py spawn
"""

import os
import sys

import psutil

import fastload

if __name__ == "__main__":
    restarts = int(os.environ.setdefault("RESTARTS", "0"))
    for child in psutil.Process().children(recursive=True):
        if child.status() != psutil.STATUS_ZOMBIE:  # nobody waits for those of the program before
            child.wait(timeout=20)
    num_open = len(os.listdir("/proc/self/fd"))
    assert num_open == int(os.environ.setdefault("NUM_OPEN", str(num_open)))
    dataset = fastload.CachedDataset(fastload.ImageFolder("photos"))
    loader = fastload.DataLoader(
        dataset, batch_size=4, num_workers=2, persistent_workers=True, multiprocessing_context=sys.argv[1]
    )
    for step, (images, labels) in enumerate(loader):
        assert images[:, 0, 0, 0].tolist() == list(range(24 * step, 24 * step + 24, 6))
        if step == 5 and restarts == 0:
            os.environ["RESTARTS"] = "1"
            os.execv(sys.executable, [sys.executable, *sys.argv])
    assert (step, restarts) == (9, 1)
    loader.close()
