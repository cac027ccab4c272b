"""Memory is written again only when nothing made from it is alive."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from fastload.transport.memory import MAX_BUFFERS, Arena, Buffers, Memory, private_memory
from fastload.transport.segment import Segment


def _shared(nbytes: int = 4096) -> Memory:
    segment = Segment.create(nbytes)
    mapping = segment.map(writable=True)
    segment.close()
    return Memory(mapping, shared=True)


ALIASES: dict[str, Any] = {
    "tensor": lambda t: t,
    "slice": lambda t: t[1:3],
    "numpy": lambda t: t.numpy(),
    "memoryview": lambda t: memoryview(t.numpy()),
    "storage": lambda t: t.untyped_storage(),
    "dlpack": torch.utils.dlpack.to_dlpack,
    "detached": lambda t: t.detach().view(2, -1),
}


@pytest.mark.parametrize("name", ALIASES)
def test_every_kind_of_alias_keeps_the_lease(name: str) -> None:
    """The lease ends with the last of them, at once."""
    memory = private_memory(64)
    tensor = torch.frombuffer(memory.lease(), dtype=torch.uint8, count=64)
    alias = ALIASES[name](tensor)
    del tensor
    held = memory.is_leased
    del alias

    assert (held, memory.is_leased) == (True, False)


def test_shared_memory_leased_at_a_fork_is_spent() -> None:
    """The child may hold the same batch: the parent never writes there again."""
    leased, idle = _shared(), _shared()
    lease = leased.lease()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    del lease

    assert (leased.is_leased, leased.is_spent) == (False, True)
    assert not idle.is_spent


def test_private_memory_is_not_spent_by_a_fork() -> None:
    """A forked child has its own copy of private pages."""
    memory = private_memory(64)
    memory.lease()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)

    assert not memory.is_spent


def test_stretches_are_aligned_and_do_not_overlap() -> None:
    """64 bytes, as torch's own allocator."""
    arena = Arena(private_memory)
    arena.begin(None)
    parts = [arena.allocate(size) for size in (1, 100, 64, 7)]
    for number, part in enumerate(parts):
        part[:] = number

    assert [part.ctypes.data % 64 for part in parts] == [0] * 4
    assert [set(part.tolist()) for part in parts] == [{0}, {1}, {2}, {3}]


def test_buffers_are_used_again_and_never_while_held() -> None:
    """As many warm buffers as are needed, up to MAX_BUFFERS; beyond that memory of its own."""
    buffers = Buffers(1 << 30)

    def batch() -> Any:
        buffers.begin()
        part = buffers.arena.allocate(100)
        buffers.arena.end()
        return part

    addresses = {batch().ctypes.data for _ in range(5)}
    held = [batch() for _ in range(2 * MAX_BUFFERS)]
    for number, part in enumerate(held):
        part[:] = number

    assert len(addresses) == 1
    assert [int(part[0]) for part in held] == list(range(2 * MAX_BUFFERS))
    assert len(buffers._memories) == MAX_BUFFERS
