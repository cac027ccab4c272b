"""The datasets that samples of a cache are read from: a user's dataset, with its images decoded or undecoded.

A dataset hands out undecoded images if its samples hold `EncodedImage` values, or if it has a method
``encoded(index)`` that returns such samples (`ImageFolder` has one).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import ConcatDataset, Dataset, Subset

from fastload.batch.source import inside_subsets, read_ahead, reads_ahead
from fastload.cache.format.undecoded import decode_images
from fastload.cache.lmdb.lmdb_dataset import LMDBDataset
from fastload.images.folder import ImageFolder
from fastload.readers.decode_cache import inactive

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

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Tell the other dataset which samples are read next."""
        read_ahead(self.dataset, indices)

    @property
    def _reads_ahead(self) -> bool:
        return reads_ahead(self.dataset)


def decoded_source(dataset: Any) -> Any:
    """The dataset with decoded images."""
    inner, _ = inside_subsets(dataset)
    # These never return undecoded images, or are meant to. All others can, and so can a subclass.
    return dataset if type(inner) in (ImageFolder, LMDBDataset) else MappedDataset(dataset, _decoded)


def encoded_source(dataset: Any, *, is_needed: bool = True) -> Any:
    """The dataset whose samples hold undecoded images, as far as this dataset has them.

    Args:
        dataset: Map-style.
        is_needed: Whether samples with decoded images are of no use. An ImageFolder with `size=` or a
            transform has only decoded ones: its samples then raise ValueError, with advice.
    """
    if _has_encoded(type(dataset)):
        decodes = isinstance(dataset, ImageFolder) and not dataset.has_encoded
        return dataset if decodes and not is_needed else MappedDataset(dataset, _encoded)
    if type(dataset) is Subset:
        return Subset(encoded_source(dataset.dataset, is_needed=is_needed), dataset.indices)
    if type(dataset) is ConcatDataset:
        return ConcatDataset([encoded_source(part, is_needed=is_needed) for part in dataset.datasets])
    return dataset


def _decoded(dataset: Any, index: int) -> Any:
    sample = dataset[index]
    with inactive():  # the sample is cached, so its files need not be remembered
        return decode_images(sample)


def _encoded(dataset: Any, index: int) -> Any:
    return dataset.encoded(index)


def _has_encoded(cls: type) -> bool:
    """Whether a class has a method `encoded` that returns the samples of its `__getitem__`.

    A subclass that overrides only `__getitem__`, for example to change labels, has not.
    """
    for part in cls.__mro__:
        if callable(part.__dict__.get("encoded")):
            return True
        if "__getitem__" in part.__dict__:
            return False
    return False
