"""Ctrl-C in the middle of an epoch raises KeyboardInterrupt once; the loader then reads a whole epoch."""

import os
import signal

import fastload

signal.signal(signal.SIGINT, signal.default_int_handler)
dataset = fastload.CachedDataset(fastload.ImageFolder("photos"))
for num_workers in (0, 2):
    loader = fastload.DataLoader(dataset, batch_size=4, num_workers=num_workers)
    for when in (0, 3, 9):
        try:
            for step, (images, labels) in enumerate(loader):
                if step == when:
                    os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("no KeyboardInterrupt")
        assert [images[0, 0, 0, 0].item() for images, labels in loader] == list(range(0, 240, 24))
