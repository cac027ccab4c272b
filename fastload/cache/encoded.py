"""Samples with undecoded images: where they come from, and how they are decoded.

A dataset hands out undecoded images if its samples hold `EncodedImage` values, or if it has a method
``encoded(index)`` that returns such samples (`ImageFolder` has one).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from torch.utils.data import ConcatDataset, Dataset, Subset

from fastload.batch.read_ahead import read_ahead, reads_ahead
from fastload.images.encoded import EncodedImage
from fastload.images.folder import ImageFolder
from fastload.nested.spec import is_namedtuple
from fastload.nested.tree import leaves, map_leaves

if TYPE_CHECKING:
    from collections.abc import Sequence


class DerivedSamples(Dataset[Any]):
    """A dataset with the samples of a different dataset, converted.

    Attributes:
        dataset: The other dataset.
        classes: Its classes, for a file built from this dataset; None if it has none.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.classes = getattr(dataset, "classes", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Tell the other dataset which samples are read next."""
        read_ahead(self.dataset, indices)

    @property
    def _reads_ahead(self) -> bool:
        """Whether the other dataset wants to know."""
        return reads_ahead(self.dataset)


class EncodedSamples(DerivedSamples):
    """The samples of a dataset that has ``encoded(index)``, with undecoded images."""

    def __getitem__(self, index: int) -> Any:
        return self.dataset.encoded(index)


class DecodedSamples(DerivedSamples):
    """The samples of a dataset that can return undecoded images, decoded."""

    def __getitem__(self, index: int) -> Any:
        return decode_images(self.dataset[index])


def encoded_source(dataset: Any, *, is_needed: bool = True) -> Any:
    """The dataset whose samples hold undecoded images, as far as this dataset has them.

    Args:
        dataset: Map-style.
        is_needed: Whether samples with decoded images are of no use. An ImageFolder with `size=` or a
            transform has only decoded ones: its samples then raise ValueError, with advice.
    """
    if _has_encoded(type(dataset)):
        decodes = isinstance(dataset, ImageFolder) and not dataset.has_encoded
        return dataset if decodes and not is_needed else EncodedSamples(dataset)
    if type(dataset) is Subset:
        return Subset(encoded_source(dataset.dataset, is_needed=is_needed), dataset.indices)
    if type(dataset) is ConcatDataset:
        return ConcatDataset([encoded_source(part, is_needed=is_needed) for part in dataset.datasets])
    return dataset


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


def holds_images(sample: Any) -> bool:
    """Whether a sample holds an undecoded image."""
    return any(type(leaf) is EncodedImage for leaf in leaves(sample))


def check_headers(sample: Any) -> None:
    """Read the header of each undecoded image.

    Raises:
        ImageReadError: A file cannot be read, or is no image.
    """
    for leaf in leaves(sample):
        if type(leaf) is EncodedImage:
            _ = leaf.shape


def decoded_nbytes(sample: Any) -> int:
    """About how many bytes a sample takes with decoded images; only headers are read."""
    return sum(
        prod(leaf.shape) if type(leaf) is EncodedImage else getattr(leaf, "nbytes", 8)
        for leaf in leaves(sample)
    )


def decode_images(sample: Any) -> Any:
    """The sample with decoded images, `(H, W, 3) uint8` RGB each.

    Raises:
        ImageReadError: An image cannot be decoded.
    """
    return map_leaves(sample, lambda leaf: leaf.decode() if type(leaf) is EncodedImage else leaf)


def decode_others(sample: Any) -> Any:
    """The sample with decoded images, except for the image of an albumentations pipeline.

    This is the value of `"image"` in a dict, the first one in a tuple or list, or the sample itself.

    Raises:
        ImageReadError: An image cannot be decoded.
    """
    if isinstance(sample, EncodedImage):
        return sample
    others = {**sample, "image": None} if isinstance(sample, dict) else [None, *sample[1:]]
    decoded = decode_images(others)
    if isinstance(sample, dict):
        return {**decoded, "image": sample["image"]}
    values = [sample[0], *decoded[1:]]
    if is_namedtuple(sample):
        return type(sample)._make(values)
    return tuple(values) if isinstance(sample, tuple) else values
