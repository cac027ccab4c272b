"""Tells a dataset which samples will be read next, so it can begin to read their files.

A dataset that wants to know has a method ``read_ahead(indices)``, as ImageFolder and CachedDataset have; if
it also has an attribute ``_reads_ahead`` that is False, the method is not called. The method must be one of
the dataset's class: an attribute that a wrapper forwards from the wrapped dataset is ignored, because the
wrapper can number its samples differently. The samples of such a dataset are then read one by one.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from torch.utils.data import ConcatDataset, get_worker_info

from fastload.batch.source import inside_subsets

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

_SAMPLES_AHEAD = 64  # of tasks: as many files as a remote folder reads concurrently


def reads_ahead(dataset: Any) -> bool:
    """Whether a dataset, or a dataset inside torch's Subset or ConcatDataset, has `read_ahead`."""
    return any(_has_method(part) for part, _ in _parts(dataset, ()))


def _has_method(dataset: Any) -> bool:
    has_method = callable(getattr(type(dataset), "read_ahead", None))
    return has_method and bool(getattr(dataset, "_reads_ahead", True))


def read_ahead(dataset: Any, indices: Sequence[Any]) -> None:
    """Announce the next samples to read, in order; does nothing if the dataset has no `read_ahead`."""
    for part, numbers in _parts(dataset, indices):
        if len(numbers) and _has_method(part):
            part.read_ahead(numbers)


def _parts(dataset: Any, indices: Sequence[Any]) -> list[tuple[Any, Sequence[Any]]]:
    """The datasets inside torch's Subset and ConcatDataset, and the indices of these samples in each."""
    dataset, indices = inside_subsets(dataset, indices)
    if type(dataset) is not ConcatDataset:
        return [(dataset, indices)]
    of_part: list[list[int]] = [[] for _ in dataset.datasets]
    for index in indices:
        number = index + len(dataset) if index < 0 else index
        part = bisect_right(dataset.cumulative_sizes, number)
        of_part[part].append(number - (dataset.cumulative_sizes[part - 1] if part else 0))
    return [part for pair in zip(dataset.datasets, of_part, strict=True) for part in _parts(*pair)]


def read_tasks_ahead(
    dataset: Any, tasks: Sequence[Sequence[int]], number: int, skipped: Container[int] = ()
) -> None:
    """Announce the samples of a worker's task, and of its next tasks, until 64 samples are announced.

    A task is often one or two large images, so the next task alone would not hide the latency of a store.

    Args:
        dataset: Samples are read from it in the order of the tasks.
        tasks: The samples of all tasks; torch's loader gives task i to worker i modulo the number of workers.
        number: Of the task that begins now.
        skipped: Samples that are not read.
    """
    if not reads_ahead(dataset):
        return
    worker = get_worker_info()
    num_announced = 0
    for coming in range(number, len(tasks), 1 if worker is None else worker.num_workers):
        samples = [index for index in tasks[coming] if index not in skipped]
        read_ahead(dataset, samples)
        num_announced += len(samples)
        if num_announced >= _SAMPLES_AHEAD:
            return
