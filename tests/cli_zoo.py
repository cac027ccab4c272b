"""Datasets that the command line is given by name; importable, so that subprocesses find them."""

from __future__ import annotations

import os
import select
import signal
import sys
from typing import Any

import numpy as np

NUM_SAMPLES = 100
SIGNAL_AT = 30  # neither the first, the middle nor the last sample, which are looked at before the build


def pixels(index: int) -> Any:
    """What every dataset here has at an index."""
    return np.full((6, 8, 3), index, np.uint8)


class Plain:
    """Images and labels."""

    def __init__(self) -> None:
        self.maker_pid = os.getpid()

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return pixels(index), index


class Photos(Plain):
    """Images with the look of photographs."""

    def __getitem__(self, index: int) -> Any:
        return np.random.RandomState(index).randint(0, 256, (6, 8, 3), np.uint8), index


class Signalled(Plain):
    """Sends the signal CLI_ZOO_SIGNAL to its maker, when CLI_ZOO_AFTER exists: a worker may be far ahead."""

    def __getitem__(self, index: int) -> Any:
        if index == SIGNAL_AT and "CLI_ZOO_SIGNAL" in os.environ:
            while not os.path.exists(os.environ["CLI_ZOO_AFTER"]):
                select.select([], [], [], 0.01)
            os.kill(self.maker_pid, getattr(signal, os.environ["CLI_ZOO_SIGNAL"]))
        return super().__getitem__(index)


class Chatty(Plain):
    """Prints, in Python and below it."""

    def __getitem__(self, index: int) -> Any:
        sys.stdout.write(f"reading {index}\n")
        os.write(1, b"from below\n")
        return super().__getitem__(index)


class Random(Plain):
    """Another sample at each access."""

    def __getitem__(self, index: int) -> Any:
        return np.random.randint(256, size=(6, 8, 3), dtype=np.uint8)


class Opened(Plain):
    """Images of Pillow."""

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        return Image.fromarray(pixels(index))


class Files(Plain):
    """Files as they are."""

    def __getitem__(self, index: int) -> Any:
        return bytes(1000), index


class Broken(Plain):
    """A sample in it cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == SIGNAL_AT:
            raise ValueError("sample thirty\nis broken")
        return super().__getitem__(index)


class Empty(Plain):
    """Has no samples."""

    def __len__(self) -> int:
        return 0


ready = Plain()


def factory() -> Plain:
    return Plain()


def fails() -> None:
    raise RuntimeError("the factory failed")
