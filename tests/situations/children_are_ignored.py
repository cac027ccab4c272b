"""A program that ignores SIGCHLD, as some launchers do, trains with workers, and hears of one that died.

$ python children_are_ignored.py fork
$ python children_are_ignored.py spawn
"""

import os
import signal
import sys

import fastload


def end(sample):
    if sample[1] and sample[0][0, 0, 0] == 6 * 30:
        os._exit(3)
    return sample


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    photos = fastload.ImageFolder("photos")
    for loader in (
        fastload.DataLoader(photos, 4, num_workers=2, multiprocessing_context=sys.argv[1]),
        fastload.DataLoader(
            fastload.CachedDataset(photos, end), 4, num_workers=2, multiprocessing_context=sys.argv[1]
        ),
    ):
        try:
            labels = [label for images, labels in loader for label in labels.tolist()]
        except RuntimeError as error:
            assert "exited unexpectedly" in str(error)
            break
        assert labels == [0] * 20 + [1] * 20
    else:
        raise AssertionError("no error")
