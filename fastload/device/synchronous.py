"""Devices without prefetching: mps and xpu. Experimental, and never tested on a real device.

A batch is moved when the caller asks for it, by `tensor.to(device)`, which waits for its copy. So the device
reads no slot after that call, and streams need no ordering.
"""

from __future__ import annotations

from typing import Any

import torch

from fastload.nested.device_tree import map_device_leaves

STREAMLESS_TYPES = ("mps", "xpu")


class SynchronousDevice:
    """Moves whole batches to one device.

    Args:
        device: A device whose type is in `STREAMLESS_TYPES`.

    Attributes:
        device: As given.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def move(self, batch: Any) -> Any:
        """The batch on the device; objects that are not tensors and have no `to` stay the same."""
        return map_device_leaves(batch, lambda leaf: leaf.to(self.device))


def why_no_streamless_device(device: torch.device) -> str | None:
    """Why torch has no such device here; None if it has one."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type != device.type:
        return f"torch {torch.__version__} finds {'no accelerator' if found is None else found.type} here"
    return None
