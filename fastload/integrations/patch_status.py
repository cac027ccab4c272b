"""The settings of `patch_torch` in this process, and what it did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class PatchStatus:
    """What `patch_torch` has set in this process, and what it did.

    Attributes:
        is_patched: Whether `torch.utils.data.DataLoader` builds fastload's loader.
        defaults: Arguments of fastload's loader, for calls that do not set them.
        num_replaced: Loaders built instead of torch's.
        seeds_pipelines: Whether one of them seeds albumentations pipelines.
        at_first_loader: To be called before the next loader is made, of whatever class, and never again.
    """

    is_patched: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)
    num_replaced: int = 0
    seeds_pipelines: bool = False
    at_first_loader: Callable[[], None] | None = None


status = PatchStatus()
