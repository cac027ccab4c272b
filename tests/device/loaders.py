"""Loaders for the prefetcher's tests, a prefetcher on the fake device, and one interface to both devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fastload.device.device_prefetcher import DevicePrefetcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tests.device.fake import FakeBackend

SHORT_CYCLES = 200_000


def batch(number: int) -> torch.Tensor:
    return torch.full((2, 3), number, dtype=torch.int32)


def on(fake: Any, loader: Iterable[Any], depth: int = 2) -> DevicePrefetcher[Any]:
    prefetcher = DevicePrefetcher(loader, device="cpu", depth=depth)
    prefetcher._backend = fake
    return prefetcher


@dataclass
class Place:
    """The fake device, or a real one."""

    fake: FakeBackend | None

    def prefetch(self, loader: Iterable[Any], depth: int = 2) -> DevicePrefetcher[Any]:
        return DevicePrefetcher(loader, depth=depth) if self.fake is None else on(self.fake, loader, depth)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A pinned copy."""
        return tensor.pin_memory() if self.fake is None else self.fake.pinned(tensor)

    def work(self) -> None:
        """Keep a real device busy for a moment; the fake one does nothing until it is asked."""
        if self.fake is None:
            torch.cuda._sleep(SHORT_CYCLES)

    def content(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a tensor holds when all work has run."""
        assert tensor.is_cuda == (self.fake is None)
        if self.fake is not None:
            self.fake.drain()
        return tensor.to("cpu", copy=True)

    def memory(self) -> int:
        """How much memory the allocator has taken from the device so far."""
        if self.fake is not None:
            return self.fake.num_reserved
        torch.cuda.synchronize()
        return torch.cuda.memory_reserved()


class Loader:
    """Batches 0, 1, 2, ...; counts what was asked of it."""

    def __init__(self, length: int, make: Callable[[int], Any] = batch) -> None:
        self.length = length
        self.make = make
        self.num_pulled = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.length):
            self.num_pulled += 1
            yield self.make(number)


class Consumer:
    """Takes batches, and holds, drops, aliases and reads them; the device gets on as ``choose`` says."""

    def __init__(self, fake: FakeBackend, choose: Callable[[int], int]) -> None:
        self.fake = fake
        self.choose = choose
        self.held: list[tuple[torch.Tensor, torch.Tensor]] = []  # on the device, and what it should hold

    def run(self, batches: Iterable[Any], expected: Callable[[int], list[torch.Tensor]]) -> None:
        """An epoch of lists of tensors, which may be abandoned."""
        for number, got in enumerate(batches):
            pairs = list(zip(got, expected(number), strict=True))
            for tensor, content in pairs:
                self.fake.read(tensor, content)
            how, (tensor, content) = self.choose(4), pairs[self.choose(len(pairs))]
            if how == 1:
                self.held.append((tensor, content))
            elif how == 2:
                self.held.append((tensor[1:3], content[1:3]))  # an alias: the batch itself goes
            elif how == 3 and self.held:
                for late, late_content in self.held:  # on the stream that first had it
                    self.fake.read(late, late_content)
                del self.held[self.choose(len(self.held)) :]
            del got, pairs, tensor, content
            for _ in range(self.choose(3)):
                stream = self.fake.streams[self.choose(len(self.fake.streams))]
                for _ in range(self.choose(10)):  # in bursts: one stream can be far behind the other
                    self.fake.advance(stream)
            if self.choose(12) == 11:
                break
