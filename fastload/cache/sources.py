"""The datasets that samples of a cache are read from, or that a CachedDataset without a cache reads."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch.utils.data import ConcatDataset, Dataset, Subset

from fastload.augmentation.encoded import EncodedImage
from fastload.batch.access import expect, expects
from fastload.images.folder import ImageFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class MappedDataset(Dataset[Any]):
    """A dataset whose samples a function reads from another dataset.

    Args:
        dataset: Map-style.
        read: Called as `read(dataset, index)`; picklable.
        is_pre_transformed: Whether it calls the user's `pre_transform`.

    Attributes:
        dataset: The other dataset.
        is_pre_transformed: As given.
        classes: Its classes, for a file built from this dataset; None if it has none.
    """

    def __init__(
        self, dataset: Any, read: Callable[[Any, int], Any], *, is_pre_transformed: bool = False
    ) -> None:
        self.dataset = dataset
        self.is_pre_transformed = is_pre_transformed
        self.classes = getattr(dataset, "classes", None)
        self._read = read

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self._read(self.dataset, index)

    @property
    def _expect(self) -> Callable[[Sequence[Any]], None] | None:
        return functools.partial(expect, self.dataset) if expects(self.dataset) else None


def encoded_source(dataset: Any) -> Any:
    """The dataset with undecoded images, as far as it reads them from an ImageFolder; else as given."""
    if isinstance(dataset, ImageFolder):
        is_own = type(dataset).__getitem__ is not ImageFolder.__getitem__  # it can change labels, for example
        return dataset if is_own or not dataset._has_encoded else MappedDataset(dataset, _encoded)
    if type(dataset) is Subset:
        source = encoded_source(dataset.dataset)
        return dataset if source is dataset.dataset else Subset(source, dataset.indices)
    if type(dataset) is ConcatDataset:
        sources = [encoded_source(part) for part in dataset.datasets]
        pairs = zip(sources, dataset.datasets, strict=True)
        return dataset if all(one is other for one, other in pairs) else ConcatDataset(sources)
    return dataset


def _encoded(dataset: ImageFolder, index: int) -> Any:
    if not dataset._has_encoded:  # a transform can be set later
        return dataset[index]
    path, content, label = dataset._file(index)
    return EncodedImage(path, content), label
