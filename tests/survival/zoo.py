"""Datasets, samplers and collate functions that are hard on the transport, importable by started workers."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from tests.kit.processes import Gate

SIDES = (0, 1, 33, 2, 90)


def nest(index: int) -> Any:
    """Of batches of 4 each has shapes of its own; leaves without elements, strings, nests."""
    side = SIDES[(index // 4) % len(SIDES)]
    return {
        "image": np.full((side, 3, 2), index % 251, np.uint8),
        "empty": torch.empty(0, side),
        "name": f"bild-\N{LATIN SMALL LETTER A WITH DIAERESIS}-{index}" * (index % 3),
        "pair": (torch.tensor(float(index)), [index, np.full((2, side), index, np.int64)]),
        "nothing": {},
    }


def large(index: int) -> Any:
    """300 KB a sample."""
    return np.full((300, 1000), index % 251, np.uint8), index


def numbered(index: int) -> Any:
    return np.full((16, 16, 3), index % 251, np.uint8), index


def bad_seventh(index: int) -> Any:
    if index == 7:
        raise ValueError("seven")
    return numbered(index)


def signals_and_hangs(pid: int, number: int, index: int) -> Any:
    """Of two workers, the second sends a signal."""
    if index:
        os.kill(pid, number)
    signal.pause()


class Held:
    """One sample waits for the gate, and may then interrupt the parent; under fork only."""

    def __init__(self, gate: Gate, index: int, *, interrupts: bool = False) -> None:
        self.gate = gate
        self.index = index
        self.interrupts = interrupts

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        if index == self.index:
            self.gate.wait()
            if self.interrupts:
                os.kill(os.getppid(), signal.SIGINT)
                self.gate.wait()
        return numbered(index)


class RaisingSampler:
    """Raises once at a given batch, and goes on afterwards if it is asked again."""

    def __init__(self, position: int) -> None:
        self.position = position

    def __iter__(self) -> RaisingSampler:
        self.number = -1
        return self

    def __next__(self) -> list[int]:
        self.number += 1
        if self.number == self.position:
            raise ConnectionError(f"no indices at {self.number}")
        if self.number >= 6:
            raise StopIteration
        return [2 * self.number, 2 * self.number + 1]


def assert_numbered(batch: Any, start: int, stop: int) -> None:
    """The batch holds exactly the samples `numbered` from `start` to `stop`."""
    images, labels = batch
    assert labels.tolist() == list(range(start, stop))
    assert (images == (labels % 251).to(torch.uint8)[:, None, None, None]).all()


def assert_rest(iterator: Any, start: int, *, stop: int = 24, step: int = 4) -> None:
    """Exactly the batches from `start` on come, in order."""
    starts = []
    for first, batch in zip(range(start, stop + step, step), iterator, strict=False):
        assert_numbered(batch, first, first + step)
        starts.append(first)
    assert starts == list(range(start, stop, step))
