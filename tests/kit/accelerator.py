"""An accelerator that is not there: pin_memory=True gets its thread, and pinning is a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.utils.data as tud

from fastload.epochs import with_workers

if TYPE_CHECKING:
    from collections.abc import Callable


def pretend_accelerator(set_attribute: Callable[[Any, str, Any], None]) -> None:
    """Let every loader pin, with `setattr` for good or with a monkeypatch's for one test."""
    base = tud.dataloader._BaseDataLoaderIter
    base_init = base.__init__

    def init(self: Any, loader: Any) -> None:
        base_init(self, loader)
        self._pin_memory = True

    def pin(batch: Any, device: str | None = None) -> Any:
        return [part.clone() for part in batch]

    set_attribute(base, "__init__", init)
    set_attribute(with_workers, "pin_batch", pin)
