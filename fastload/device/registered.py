"""Register slots with the device: page-lock their mapped memory once, so the device reads them in place.

Runs in the consumer's process, for the pool whose workers write the slots. A registered slot is lent only to
a caller that keeps each batch until the device has read it (`stream_prefetcher`). After the first failure no
further slot is registered, and one log line gives the reason; copies of other slots go through torch's pinned
memory.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastload.nested.tree import is_namedtuple
from fastload.system.logs import say_once

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastload.device.devices import Backend
    from fastload.memory.lease import Memory


class RegisteredSlots:
    """The registered memory of one pool.

    Args:
        backend: The device.
        stream: The stream on which it copies from the slots.
    """

    def __init__(self, backend: Backend, stream: Any) -> None:
        self.stream = stream
        self._backend = backend
        self._pid = os.getpid()
        # Holds the memory, so that it is unregistered before it is unmapped.
        self._addresses: dict[Memory, int] = {}
        self._has_failed = False

    def add(self, memory: Memory, in_use: Iterable[Memory | None]) -> None:
        """Register ``memory`` if possible; unregister memory that no slot uses anymore.

        Args:
            memory: The memory about to be lent.
            in_use: The memory of all slots.
        """
        if os.getpid() != self._pid:
            return  # a forked child has no device
        used = set(in_use)
        if not self._addresses.keys() <= used:  # seldom: the driver would wait for the device
            # A copy may still read memory that a prefetcher holds: its views keep the lease alive.
            for dropped in [old for old in self._addresses if old not in used and not old.is_leased]:
                self._remove(dropped)
        if self._has_failed or memory in self._addresses:
            return
        reason = self._backend.register(memory.address, memory.nbytes)
        if reason:
            self._has_failed = True
            say_once(
                f"the device cannot read slots in place; they are copied to pinned memory first: {reason}"
            )
        else:
            self._addresses[memory] = memory.address

    def close(self) -> None:
        """Wait for the copies in flight, then unregister all memory. Idempotent; never raises."""
        if os.getpid() != self._pid or not self._addresses:
            return
        try:
            # Before any memory is unregistered: an event after all copies from the slots. Leaves that move
            # on the caller's stream are covered, because the side stream waits for them.
            self._backend.synchronize(self._backend.record_event(self.stream))
            for memory in list(self._addresses):
                self._remove(memory)
        except RuntimeError as error:
            # The device has failed; the caller's own calls to the device report that.
            say_once(f"slots could not be unregistered: {error}")
        self._addresses.clear()

    def _remove(self, memory: Memory) -> None:
        reason = self._backend.unregister(self._addresses.pop(memory))
        if reason:
            say_once(f"a slot could not be unregistered: {reason}")


# A part of a batch of another type can hold tensors where a prefetcher does not look.
_KNOWN = frozenset({torch.Tensor, np.ndarray, str, bytes, int, float, bool, type(None)})


def hides_tensors(batch: Any) -> bool:
    """Whether tensors of the unpacked batch can be in objects that a prefetcher does not look into.

    They stay on the host when it copies the batch to the device, and the caller keeps them: they must not lie
    in a slot that the device reads.
    """
    kind = type(batch)
    if kind in (dict, list, tuple) or is_namedtuple(batch):
        return any(map(hides_tensors, batch.values() if kind is dict else batch))
    return not isinstance(batch, np.generic) and (
        kind not in _KNOWN or (kind is np.ndarray and batch.dtype.hasobject)
    )
