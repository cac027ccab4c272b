"""Devices without prefetching: mps and xpu. Experimental, and never tested on a real device.

A batch is moved when the caller asks for it, by `tensor.to(device)`, which waits for its copy. So the device
reads no slot after that call, and streams need no ordering.
"""

from __future__ import annotations

from typing import Any

import torch

from fastload.nested.tree import map_device_leaves

SYNCHRONOUS_TYPES = ("mps", "xpu")


class SynchronousDevice:
    """Moves whole batches to one device, whose type is in `SYNCHRONOUS_TYPES`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def move(self, batch: Any) -> Any:
        """The batch on the device; objects that are not tensors and have no `to` stay the same."""
        return map_device_leaves(batch, lambda leaf: leaf.to(self.device))


def why_no_synchronous_device(device: torch.device) -> str | None:
    """Why torch has no such device here; None if it has one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type != device.type:
        name = "no accelerator" if accelerator is None else accelerator.type
        return f"torch {torch.__version__} finds {name} here"
    return None
