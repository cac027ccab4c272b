"""The settings of a loader that workers and epochs read. The loader class itself is in `loader`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.utils.data

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastload.workers.auto_workers import AutoWorkers


class LoaderSettings(torch.utils.data.DataLoader):  # type: ignore[type-arg]  # as in `loader`
    """torch's settings and fastload's own; `fastload.DataLoader` documents them."""

    memory_format: torch.memory_format | None
    ring_bytes: int | float | str
    seed_pipelines: bool
    rng: str
    worker_method: str
    device: str | int | torch.device | None
    device_transform: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None
    on_error: str | Callable[..., Any]
    error_budget: int | float
    restart_workers: int
    _auto_workers: AutoWorkers | None
