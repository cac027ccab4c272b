"""Tells a dataset which samples will be read next, so that it can begin to read their files.

A dataset that wants to know has a method ``read_ahead(indices)``, as ImageFolder and CachedDataset have; if
it also has an attribute ``reads_ahead`` that is False, the method is not called. The method must be one of
the dataset's class: an attribute that a wrapper takes over from the dataset inside is ignored, because the
wrapper may number its samples in another way. The samples of such a dataset are then read one by one.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from torch.utils.data import ConcatDataset, Subset

if TYPE_CHECKING:
    from collections.abc import Sequence


def reads_ahead(dataset: Any) -> bool:
    """Whether a dataset, or a dataset inside torch's Subset or ConcatDataset, has `read_ahead`."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if type(dataset) is ConcatDataset:
        return any(map(reads_ahead, dataset.datasets))
    return _has_method(dataset)


def _has_method(dataset: Any) -> bool:
    is_there = callable(getattr(type(dataset), "read_ahead", None))
    return is_there and bool(getattr(dataset, "reads_ahead", True))


def read_ahead(dataset: Any, indices: Sequence[Any]) -> None:
    """Announce the samples that are read next, in order; does nothing if the dataset has no `read_ahead`."""
    while type(dataset) is Subset:
        indices = [dataset.indices[index] for index in indices]
        dataset = dataset.dataset
    if type(dataset) is ConcatDataset:
        _read_parts_ahead(dataset, indices)
    elif _has_method(dataset):
        dataset.read_ahead(indices)


def _read_parts_ahead(dataset: ConcatDataset[Any], indices: Sequence[Any]) -> None:
    of_part: dict[int, list[int]] = {}
    for index in indices:
        number = index + len(dataset) if index < 0 else index
        part = bisect_right(dataset.cumulative_sizes, number)
        before = dataset.cumulative_sizes[part - 1] if part else 0
        of_part.setdefault(part, []).append(number - before)
    for part, numbers in of_part.items():
        read_ahead(dataset.datasets[part], numbers)
