"""Datasets that CachedDataset makes itself: one after its deterministic part, and a cache's content.

Made by `dataset` in the parent, read wherever a sample is missing in the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from fastload.cache.transform import apply

if TYPE_CHECKING:
    from collections.abc import Callable


class PreparedDataset(Dataset[Any]):
    """A dataset whose samples go through a deterministic function, once, before they are cached.

    Args:
        dataset: Map-style.
        prepare: An albumentations pipeline or any callable, as CachedDataset takes them.
    """

    def __init__(self, dataset: Any, prepare: Callable[..., Any]) -> None:
        self.dataset = dataset
        self.prepare = prepare

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return apply(self.prepare, self.dataset[index])
