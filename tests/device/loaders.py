"""Loaders for the prefetcher's tests, and a prefetcher on the fake device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fastload.device.prefetch import DevicePrefetcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from fastload.device.cuda import Backend


def batch(number: int) -> torch.Tensor:
    return torch.full((2, 3), number, dtype=torch.int32)


def on(fake: Backend, loader: Iterable[Any], depth: int = 2) -> DevicePrefetcher[Any]:
    prefetcher = DevicePrefetcher(loader, device="cpu", depth=depth)
    prefetcher._backend = fake
    return prefetcher


class Loader:
    """Batches 0, 1, 2, ...; counts what was asked of it."""

    def __init__(self, length: int, make: Callable[[int], Any] = batch) -> None:
        self.length = length
        self.make = make
        self.num_pulled = 0
        self.epoch = -1
        self.dataset = ["the dataset"]

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.length):
            self.num_pulled += 1
            yield self.make(number)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Stumbles:
    """Raises in the place of some batches and can go on."""

    def __init__(self, length: int, errors: dict[int, BaseException]) -> None:
        self.numbers = iter(range(length))
        self.errors = errors

    def __iter__(self) -> Stumbles:
        return self

    def __next__(self) -> torch.Tensor:
        number = next(self.numbers)
        if number in self.errors:
            raise self.errors[number]
        return batch(number)
