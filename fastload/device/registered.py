"""Slots that the device reads in place: their memory is page-locked where it is mapped, once.

Runs in the consumer's process, for the pool whose workers write the slots. Rules:

1. A slot is registered when nobody looks at it, and is lent only to who keeps each batch until the device
   has read it (device/copies.py). Any other caller gets memory that is not registered.
2. Memory is registered once, and unregistered before it is unmapped: what is registered is held here. Nothing
   is unregistered while a copy from it is under way.
3. One registration has at most `MAX_BYTES`. A copy cannot cross from one into another, so a larger slot is
   not registered.
4. The first failure ends the attempts and is said once; copies of other slots go through torch's pinned
   memory. A forked child has no device, and touches nothing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from fastload.device.cuda import say_once

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastload.device.cuda import Backend
    from fastload.memory.lease import Memory

MAX_BYTES = 64 * 2**30


class RegisteredSlots:
    """The registered memory of one pool.

    Args:
        backend: The device.
        stream: On which it copies from the slots.

    Attributes:
        stream: As given.
    """

    def __init__(self, backend: Backend, stream: Any) -> None:
        self.stream = stream
        self._backend = backend
        self._pid = os.getpid()
        self._addresses: dict[Memory, int] = {}
        self._is_refused = False

    def add(self, memory: Memory, in_use: Iterable[Memory | None]) -> None:
        """Register ``memory``, unless it is or cannot be; let go of what no slot has any more.

        Args:
            memory: What is about to be lent.
            in_use: The memory of all slots.
        """
        if memory in self._addresses or os.getpid() != self._pid:
            return
        wanted = set(in_use)
        for other in [known for known in self._addresses if known not in wanted and not known.is_leased]:
            self._remove(other)
        if self._is_refused:
            return
        reason = self._why_too_large(memory.nbytes) or self._backend.register(memory.address, memory.nbytes)
        if reason:
            self._is_refused = True
            say_once(f"slots cannot be read in place, and are copied to pinned memory first: {reason}")
        else:
            self._addresses[memory] = memory.address

    def close(self) -> None:
        """Wait for the copies under way, then unregister everything. Idempotent; never raises."""
        if os.getpid() != self._pid or not self._addresses:
            return
        try:
            self._backend.synchronize(self._backend.record_event(self.stream))
            for memory in list(self._addresses):
                self._remove(memory)
        except RuntimeError as error:
            # The device has failed, which the caller hears from what they asked of it.
            say_once(f"slots could not be unregistered: {error}")
        self._addresses.clear()

    def _remove(self, memory: Memory) -> None:
        reason = self._backend.unregister(self._addresses.pop(memory))
        if reason:
            say_once(f"a slot could not be unregistered: {reason}")

    @staticmethod
    def _why_too_large(nbytes: int) -> str:
        return f"a slot of {nbytes:,} bytes, of at most {MAX_BYTES:,}" if nbytes > MAX_BYTES else ""
