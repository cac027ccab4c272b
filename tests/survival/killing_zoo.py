"""Datasets and functions that kill their worker, or block it for ever, at a chosen moment."""

from __future__ import annotations

import collections
import os
import signal
import sys
from typing import Any

import numpy as np
from torch.utils.data import default_collate

FATAL = 13  # the index whose sample kills; with batches of 4 it is the second row of batch 3


class Pair(collections.namedtuple("Pair", ["image", "label"])):
    """Kills the process between its two fields: the image is in its row by then, the label is not."""

    __slots__ = ()

    def __iter__(self) -> Any:
        yield self[0]
        if type(self[1]) is int and self[1] == FATAL:  # of a sample, not of a batch
            os.kill(os.getpid(), signal.SIGKILL)
        yield self[1]


def plain(index: int) -> Any:
    return np.full((16, 16, 3), index, np.uint8)


def fatal_to_write(index: int) -> Any:
    return Pair(plain(index), index)


def collate_and_die(samples: list[Any]) -> Any:
    batch = default_collate(
        [(plain, int(plain[0, 0, 0])) for plain in samples]
    )  # the rows are written into the slot
    if FATAL in batch[1].tolist():
        os.kill(os.getpid(), signal.SIGKILL)
    return batch


def left(index: int) -> Any:
    if index == FATAL:
        sys.exit(3)
    return plain(index), index


def hangs(index: int) -> Any:
    signal.pause()


def killed_while_others_hang(victim: int, index: int) -> Any:
    """The worker of one index dies; every other sample never comes."""
    if index == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
