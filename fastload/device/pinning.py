"""`pin_memory=True` without `device=`: copy batches into torch's pinned memory.

The memory comes from torch's own pinned allocator, which knows the pending copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fastload.system.remote_error import RemoteError
from fastload.system.torch_private import pin_memory

if TYPE_CHECKING:
    from collections.abc import Callable


def pinning(device: str | None) -> Callable[[Any], Any]:
    """A function that pins batches by torch's rules, in any thread, for the current accelerator."""
    index = accelerator_index()

    def pin(batch: Any) -> Any:
        if index is not None:
            torch.accelerator.set_device_index(index)
        return pin_memory(batch, device)

    return pin


def accelerator_index() -> int | None:
    """The number of the current accelerator; None: there is none."""
    return torch.accelerator.current_device_index() if torch.accelerator.is_available() else None


def pin_error() -> RemoteError:
    """The current exception as torch's pin thread reports it."""
    return RemoteError.current(f"in pin memory thread for device {accelerator_index()}")
