"""An accelerator that is not there: pin_memory=True gets its thread, and pinning is a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.utils.data as tud

if TYPE_CHECKING:
    from collections.abc import Callable


def pretend_accelerator(set_attribute: Callable[[Any, str, Any], None], *, always: bool = True) -> None:
    """Let all loaders pin, or those with pin_memory=True; with `setattr` for good, or a monkeypatch's."""
    base = tud.dataloader._BaseDataLoaderIter
    base_init = base.__init__

    def init(self: Any, loader: Any) -> None:
        base_init(self, loader)
        self._pin_memory = always or loader.pin_memory

    set_attribute(base, "__init__", init)
    set_attribute(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor.clone())
