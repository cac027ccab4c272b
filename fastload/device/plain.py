"""Devices to which nothing is copied ahead: mps and xpu. Experimental, and never run on a real one.

A batch is moved when the caller asks for it, by `tensor.to(device)`, which waits for its copy. So a slot is
read no later than that, and no stream has to be ordered.
"""

from __future__ import annotations

from typing import Any

import torch

from fastload.nested.device_tree import map_leaves

PLAIN_TYPES = ("mps", "xpu")


class PlainDevice:
    """Moves whole batches to one device.

    Args:
        device: Of one of `PLAIN_TYPES`.

    Attributes:
        device: As given.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def move(self, batch: Any) -> Any:
        """The batch on the device; what is no tensor, and has no `to`, is the same object."""
        return map_leaves(batch, lambda leaf: leaf.to(self.device))


def why_no_plain_device(device: torch.device) -> str | None:
    """Why torch has no such device here; None if it has."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type != device.type:
        return f"torch {torch.__version__} finds {'no accelerator' if found is None else found.type} here"
    return None
