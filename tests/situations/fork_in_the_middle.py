"""os.fork() in the middle of an epoch: the child reads a whole epoch of its own, the parent goes on.

$ python fork_in_the_middle.py
"""

import os

import fastload

dataset = fastload.CachedDataset(fastload.ImageFolder("photos"))
for persistent in (False, True):
    loader = fastload.DataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=persistent)
    seen = []
    for step, (images, labels) in enumerate(loader):
        seen += images[:, 0, 0, 0].tolist()
        if step == 4:
            child = os.fork()
            if child == 0:
                whole = [value for images, labels in loader for value in images[:, 0, 0, 0].tolist()]
                os._exit(whole != list(range(0, 240, 6)))
            assert os.waitpid(child, 0)[1] == 0
    assert seen == list(range(0, 240, 6))
