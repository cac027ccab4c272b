"""Datasets and functions that kill their worker, or block it for ever, at a chosen moment."""

from __future__ import annotations

import collections
import os
import signal
from typing import Any

import numpy as np

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


def hangs(index: int) -> Any:
    signal.pause()


def killed_while_others_hang(victim: int, index: int) -> Any:
    """The worker of one index dies; every other sample never comes."""
    if index == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
