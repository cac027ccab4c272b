"""What a dataset can offer beside ``dataset[index]``: whole batches (`BatchAccess`); and what it is told.

torch's TensorDataset and a CachedDataset offer whole batches.

A dataset that fetches the files of a batch together is told which samples are read next, by its property
``_expect``: a function of their indices, or None. ImageFolder has it for URLs; CachedDataset and others that
hold a dataset forward it.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from fastload.batch.packing import is_plain
from fastload.nested.tensors import tensor_array, tensor_over
from fastload.system.torch_private import has_own_methods

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    # allocate(shape, dtype): a C-contiguous array in the memory of the batch.
    Allocate = Callable[[tuple[int, ...], np.dtype[Any]], np.ndarray[Any, Any]]

# Several threads stack rows of at least this size faster than one thread gathers them (benchmarks/NOTES.md).
THREADS_PAY_BYTES = 128 * 1024


# --- whole batches ----------------------------------------------------------------------------------------


class BatchAccess(Protocol):
    """What a map-style dataset can offer to the loader beside ``dataset[index]``.

    The loader asks a dataset whose class has a method ``_batch_access(self)``, which returns one or None. A
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


class _TensorAccess:
    """torch's own TensorDataset: a batch is one gather for each tensor, instead of a view of each row."""

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
    """Indices as an array; None if they are not all signed and from 0 below the length, or there are none."""
    try:
        positions = np.asarray(indices)
    except ValueError:  # nested lists of different lengths
        return None
    if positions.dtype.kind != "i" or positions.ndim != 1 or not len(positions):
        return None  # for torch, a tensor of uint8 is a mask
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


def batch_access_of(dataset: Any) -> BatchAccess | None:
    """What makes whole batches of a dataset, also inside torch's Subset; None: read by ``dataset[index]``."""
    dataset, _ = inside_subsets(dataset)
    if type(dataset) is TensorDataset and has_own_methods(dataset, TensorDataset):
        return _TensorAccess(dataset)
    for cls in type(dataset).__mro__:
        if "_batch_access" in vars(cls) and has_own_methods(dataset, cls):
            access: BatchAccess | None = dataset._batch_access()
            return access
        if "__getitem__" in vars(cls) or "__getitems__" in vars(cls):
            return None
    return None


# --- samples that are read next ---------------------------------------------------------------------------


def expects(dataset: Any) -> bool:
    """Whether a dataset, or one inside torch's Subset or ConcatDataset, wants to know what is read next."""
    return any(_hook_of(part) is not None for part, _ in _parts(dataset, ()))


def expect(dataset: Any, indices: Sequence[Any]) -> None:
    """Say which samples are read next, in order, if the dataset wants to know."""
    told: dict[int, tuple[Any, list[Any]]] = {}  # by dataset: a ConcatDataset can have parts of one
    for part, numbers in _parts(dataset, indices):
        told.setdefault(id(part), (_hook_of(part), []))[1].extend(numbers)
    for hook, numbers in told.values():
        if hook is not None and numbers:
            hook(numbers)


def _hook_of(dataset: Any) -> Callable[[Sequence[Any]], None] | None:
    # Of the class: a wrapper that forwards attributes can number its samples differently.
    cls = type(dataset)
    return dataset._expect if hasattr(cls, "_expect") and has_own_methods(dataset, cls) else None


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
