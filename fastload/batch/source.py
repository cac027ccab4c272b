"""What a dataset can offer beside ``dataset[index]``: whole batches (`BatchSource`), and reading ahead.

torch's TensorDataset and a CachedDataset offer whole batches.

A dataset that wants to know which samples will be read next, to begin to read their files, has a method
``read_ahead(indices)``, as ImageFolder and CachedDataset have; if it also has an attribute ``_reads_ahead``
that is False, the method is not called. The method must be one of the dataset's class: an attribute that a
wrapper forwards from the wrapped dataset is ignored, because the wrapper can number its samples differently.
The samples of such a dataset are then read one by one.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset, get_worker_info

from fastload.batch.packing import is_plain
from fastload.nested.tensors import tensor_array, tensor_over
from fastload.system.torch_private import has_own_methods

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    # allocate(shape, dtype): a C-contiguous array in the memory of the batch.
    Allocate = Callable[[tuple[int, ...], np.dtype[Any]], np.ndarray[Any, Any]]

# Several threads stack rows of at least this size faster than one thread gathers them (benchmarks/NOTES.md).
THREADS_PAY_BYTES = 128 * 1024
_SAMPLES_AHEAD = 64  # of tasks: as many files as a remote folder reads concurrently


# --- whole batches ----------------------------------------------------------------------------------------


class BatchSource(Protocol):
    """What a map-style dataset can offer to the loader beside ``dataset[index]``.

    The loader asks a dataset whose class has a method ``_batch_source(self)``, which returns one or None. A
    subclass that overrides ``__getitem__`` or ``__getitems__`` is read through these. The loader uses it with
    torch's own `default_collate` alone, also for a dataset inside torch's `Subset`.
    """

    def gather(self, indices: Sequence[Any], allocate: Allocate) -> Any | None:
        """The batch of these indices, equal to ``default_collate([dataset[i] for i in indices])``.

        It must draw no random numbers: with ``seeding="sample"``, no generator is set for it.

        Args:
            indices: The sampler's, in the order of the batch.
            allocate: ``allocate(shape, dtype)`` returns a writable C-contiguous array of arbitrary content
                in the memory of the batch: in a worker process, in the slot that the consumer reads. Call it
                for each tensor of the batch, and return ``torch.from_numpy(array)``. The loader owns this
                memory: write to it before `gather` returns, and keep no reference, because later batches
                reuse it as soon as the caller has dropped this one. A batch can also have tensors in other
                memory, which a worker copies.

        Returns:
            None if this batch cannot be gathered, for example because a sample is unreadable: the loader
            then reads sample by sample, and a bad index gets the error of ``dataset[index]``.
        """

    @property
    def lend(self) -> Callable[[Any], Any] | None:
        """``lend(index)`` is ``dataset[index]``, but arrays can be read-only views of memory of the dataset.

        The loader copies each sample, and drops it, before it asks for the next one; the memory must stay
        valid as long as a view of it exists. It must draw no random numbers. None: samples are not lent; the
        loader asks again for each batch that is not gathered.
        """

    @property
    def defer(self) -> Callable[[Any], Any] | None:
        """``defer(index)`` is ``dataset[index]``, but its image can be a `DeferredImage`.

        Its last step, such as Normalize and ToTensorV2, is computed when it is written into the batch, before
        the loader asks for the next sample. Until then it can read memory of the dataset. None: the loader
        calls ``dataset[index]``. The loader asks again for each batch.
        """


class _TensorSource:
    """Torch's own TensorDataset: a batch is one gather for each tensor, instead of a view of each row."""

    lend = defer = None

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset

    def gather(self, indices: Sequence[Any], allocate: Allocate) -> Any | None:
        """The batch; None if a tensor is not plain, or torch's threads stack its rows faster."""
        positions = positions_of(indices, len(self._dataset))
        if positions is None:
            return None
        has_threads = torch.get_num_threads() > 1
        for tensor in self._dataset.tensors:
            if not is_plain(tensor) or not tensor.is_contiguous() or not tensor.numel():
                return None
            if len(tensor) < len(self._dataset):  # it was changed in place: its own IndexError
                return None
            if has_threads and tensor[0].nbytes >= THREADS_PAY_BYTES:
                return None
        batch = []
        for tensor in self._dataset.tensors:
            rows = tensor_array(tensor)
            out = allocate((len(positions), *rows.shape[1:]), rows.dtype)
            rows.take(positions, axis=0, out=out, mode="clip")  # "raise" would use a temporary buffer
            batch.append(tensor_over(out, tensor.dtype))
        return batch


def positions_of(indices: Sequence[Any], length: int) -> np.ndarray[Any, Any] | None:
    """Indices as an array; None if they are not all ints from 0 below the length, or there are none."""
    try:
        positions = np.asarray(indices)
    except ValueError:  # nested lists of different lengths
        return None
    if positions.dtype.kind not in "iu" or positions.ndim != 1 or not len(positions):
        return None
    positions = positions.astype(np.int64, copy=False)
    if positions.view(np.uint64).max() >= length:  # a negative one is huge there
        return None  # the dataset itself raises the IndexError
    return positions


def inside_subsets(dataset: Any, indices: Sequence[Any] = ()) -> tuple[Any, Sequence[Any]]:
    """The dataset inside torch's Subset, also nested ones, and the indices of these samples there."""
    while type(dataset) is Subset and has_own_methods(dataset, Subset):
        indices = [dataset.indices[index] for index in indices]
        dataset = dataset.dataset
    return dataset, indices


def batch_source_of(dataset: Any) -> BatchSource | None:
    """The source of a dataset, also inside torch's Subset; None if it must be read by ``dataset[index]``."""
    dataset, _ = inside_subsets(dataset)
    if type(dataset) is TensorDataset and has_own_methods(dataset, TensorDataset):
        return _TensorSource(dataset)
    for cls in type(dataset).__mro__:
        if "_batch_source" in vars(cls) and has_own_methods(dataset, cls):
            source: BatchSource | None = dataset._batch_source()
            return source
        if "__getitem__" in vars(cls) or "__getitems__" in vars(cls):
            return None
    return None


# --- reading ahead ----------------------------------------------------------------------------------------


def reads_ahead(dataset: Any) -> bool:
    """Whether a dataset, or a dataset inside torch's Subset or ConcatDataset, has `read_ahead`."""
    return any(_has_method(part) for part, _ in _parts(dataset, ()))


def _has_method(dataset: Any) -> bool:
    cls = type(dataset)
    has_method = callable(getattr(cls, "read_ahead", None)) and has_own_methods(dataset, cls)
    return has_method and bool(getattr(dataset, "_reads_ahead", True))


def read_ahead(dataset: Any, indices: Sequence[Any]) -> None:
    """Announce the next samples to read, in order; does nothing if the dataset has no `read_ahead`."""
    for part, numbers in _parts(dataset, indices):
        if len(numbers) and _has_method(part):
            part.read_ahead(numbers)


def _parts(dataset: Any, indices: Sequence[Any]) -> list[tuple[Any, Sequence[Any]]]:
    """The datasets inside torch's Subset and ConcatDataset, and the indices of these samples in each."""
    dataset, indices = inside_subsets(dataset, indices)
    if type(dataset) is not ConcatDataset or not has_own_methods(dataset, ConcatDataset):
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
