"""Collate samples like torch's default_collate, but write large leaves directly into the memory of the batch.

Runs in the process that fetches samples: a worker, or the parent without workers. Rules:

1. The result equals that of torch.utils.data.default_collate for the same samples in the same kind of
   process: values, types, dtypes, strides, and errors. It is torch's own function that collates.
2. While samples are read, a large leaf is written to its row of the batch, and the `_Rows` of its place takes
   its place in the sample: torch collates these by a rule of ours, which returns the rows. So a sample's
   memory is warm when it is copied, and free for the next sample.
3. Where copies run on one thread, as in workers, arrays and tensors of at least ROW_BYTES are large. Where
   torch copies with several threads, arrays from ROW_BYTES to THREADS_PAY_BYTES are. All other leaves are
   stacked at the end, in one call.
4. Rows are for exact dicts, lists, tuples and namedtuples of exact arrays, plain tensors, and torchvision's
   tv_tensors, which torch stacks to plain tensors.
5. If a sample does not fit the rows of the first one, the leaves of all samples before it are read back from
   their rows, and torch collates whole samples.
6. In worker processes, where torch stacks into shared memory, default_collate stacks into the slot, wherever
   code calls it whose result is the batch. No sample lies there, because the memory can be reused while the
   sample is in use: while the dataset reads samples, torch's own memory is used.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import default_collate

from fastload.batch.access import THREADS_PAY_BYTES
from fastload.batch.collate_errors import explain
from fastload.batch.packing import is_plain
from fastload.images.geometry import image_layout
from fastload.memory.lease import current_allocator
from fastload.nested.deferred import DeferredImage
from fastload.nested.tensors import as_stacked, tensor_array, tensor_over
from fastload.nested.tree import is_no_container, map_leaves
from fastload.system.torch_private import torch_collate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastload.images.geometry import ImageLayout
    from fastload.memory.lease import BumpAllocator

# benchmarks/NOTES.md has the measurements behind the next sizes ("Collating").
# With one thread, writing a warm leaf of at least this size to its row takes no longer than stacking it at
# the end. Writing the row of a smaller one takes up to ten times as long.
ROW_BYTES = 32 * 1024
# A batch of at least this size is stacked in reused memory: malloc can map fresh pages for it, and the first
# write to a fresh page takes several times as long as a write to a warm page.
WARM_BYTES = 8 * 1024 * 1024

_SCALARS = frozenset({int, float, bool, str, bytes})

_TENSOR_RULE = torch_collate.default_collate_fn_map[torch.Tensor]
_ARRAY_RULE = torch_collate.default_collate_fn_map[np.ndarray]
# torch documents that users can change its map in place; default_collate then follows the user's rules.
_default_rules = dict(torch_collate.default_collate_fn_map)


class _MismatchError(Exception):
    """A sample does not fit the rows of its batch; raised and caught in this file only."""


class _Rows:
    """The rows of a leaf that is the same kind of array or tensor in every sample; stands for it in each."""

    def __init__(self, collator: Collator, first: Any, count: int) -> None:
        is_deferred = type(first) is DeferredImage
        self._kind = first.kind if is_deferred else type(first)
        self._is_tensor = issubclass(self._kind, torch.Tensor)
        self._shape = shape = tuple(first.shape)
        self._dtype = row_dtype = first.dtype
        if self._is_tensor:
            row_dtype = first.row_dtype if is_deferred else tensor_array(as_stacked(first)).dtype
        # Without workers torch.stack follows the samples' strides, so only contiguous samples go to rows.
        layout = collator.layout(first)
        self._any_strides = collator.in_worker or layout is not None
        if layout == "CHW":
            shape = shape[1:] + shape[:1]
        self._rows = collator.allocator.array((count, *shape), row_dtype)
        if layout == "CHW":
            self._rows = self._rows.transpose(0, 3, 1, 2)

    def write(self, value: Any, row: int) -> _Rows:
        """Write a sample's leaf."""
        is_deferred = type(value) is DeferredImage
        kind = value.kind if is_deferred else type(value)
        if kind is not self._kind or value.shape != self._shape or value.dtype != self._dtype:
            raise _MismatchError
        if is_deferred:
            value.write(self._rows[row])
            return self
        if self._is_tensor:
            value = as_stacked(value)
            if not (is_plain(value) and (self._any_strides or value.is_contiguous())):
                raise _MismatchError
            value = tensor_array(value)
        elif not value.flags.c_contiguous and (not self._any_strides or min(value.strides) < 0):
            raise _MismatchError  # torch does not allow negative strides
        self._rows[row] = value
        return self

    def read(self, row: int) -> Any:
        """A copy of a sample's leaf."""
        array = np.array(self._rows[row], order="C")
        return tensor_over(array, self._dtype).as_subclass(self._kind) if self._is_tensor else array

    @staticmethod
    def collate(values: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        """The rows as a tensor: the rule by which torch collates what stands for a leaf in each sample."""
        self: _Rows = values[0]
        rows = self._rows[: len(values)]
        return tensor_over(rows, self._dtype) if self._is_tensor else torch.from_numpy(rows)


class Collator:
    """Takes the samples of one batch after another, and collates them.

    Args:
        allocator: Where rows are laid out.
        in_worker: Whether torch would stack into shared memory here (its strides and promotion differ then).
        channels_last: Lay `(C, H, W)` samples out to give batches channels-last strides.

    Attributes:
        allocator, in_worker: As given.
        takes_deferred: Whether a sample can have a `DeferredImage`: else strides would differ.
    """

    def __init__(self, allocator: BumpAllocator, *, in_worker: bool, channels_last: bool) -> None:
        self.allocator = allocator
        self.in_worker = in_worker
        self._channels_last = channels_last
        self._has_threads = torch.get_num_threads() > 1
        self.takes_deferred = in_worker and not self._has_threads
        self._rules: dict[Any, Any] = {**_default_rules, _Rows: _Rows.collate}
        if not in_worker:  # else torch's own table contains rules of fastload's
            self._rules |= {torch.Tensor: self._stack, np.ndarray: self._stack_arrays}

    def take(
        self,
        items: Iterator[Any],
        num_rows: int,
        dataset: Any = None,
        get: Callable[[Any], Any] | None = None,
        own: Callable[[Any], Any] | None = None,
    ) -> list[Any]:
        """Samples for `collate`; each can be dropped before the next one is made.

        Args:
            items: The samples; with a ``dataset``, their indices.
            num_rows: How many there can be; 0: no leaves are written to rows, for another collate_fn.
            dataset: Has the samples.
            get: Called with each index; None: ``dataset[index]``.
            own: Called with each sample that ``get`` returned, after its large leaves were written, because
                the memory of the rest can change or must not reach torch; None: the rest is kept itself.
        """
        taken: list[Any] = []
        write = None
        for item in items:
            if dataset is None:
                sample = item
            else:
                sample = dataset[item] if get is None else get(item)
            if not taken and num_rows and type(sample) not in _SCALARS:
                write = self._writer(sample, num_rows)
            if write is not None:
                try:
                    sample = write(sample, len(taken))
                except _MismatchError:
                    taken, write = _read_back(taken), None
            taken.append(sample if own is None else own(sample))
            if write is None:
                break
        else:
            return taken  # a stream that has ended may count how often it is asked
        # The rest: a call, or a choice, for each sample would take a tenth of an epoch of ints.
        if get is not None:
            taken += [get(item) if own is None else own(get(item)) for item in items]
        else:
            taken += items if dataset is None else [dataset[item] for item in items]
        return taken

    def collate(self, samples: Any) -> Any:
        """The batch of samples that `take` returned, or of whole ones."""
        try:
            if not is_torch_default(default_collate):  # a module that the dataset has imported adds a rule
                return default_collate(_read_back(samples))
            return torch_collate.collate(samples, collate_fn_map=self._rules)
        except Exception as error:
            explain(_read_back(samples), error)
            raise

    def layout(self, leaf: torch.Tensor | np.ndarray[Any, Any]) -> ImageLayout | None:
        """The layout of a leaf of a sample whose batch gets channels-last strides; None for other leaves."""
        return _layout(tuple(leaf.shape), leaf.dtype) if self._channels_last else None

    def _writer(self, sample: Any, count: int) -> Callable[[Any, int], Any] | None:
        """What writes the large leaves of samples like this one; None if it has none.

        It returns the sample with the `_Rows` in place of these leaves.
        """
        kind = type(sample)
        if self._is_large(sample):
            return _Rows(self, sample, count).write
        parts: Any
        if kind is dict:
            parts = sample.items()
        elif kind is list or kind is tuple or (isinstance(sample, tuple) and hasattr(kind, "_make")):
            parts = enumerate(sample)
        else:
            return None  # what is inside, if anything, is not known
        writers = [
            (key, write)
            for key, part in parts
            if type(part) not in _SCALARS and (write := self._writer(part, count)) is not None
        ]
        return functools.partial(_write_parts, kind, writers) if writers else None

    def _is_large(self, leaf: Any) -> bool:
        """Whether a part of a sample is a leaf that is written to rows."""
        if isinstance(leaf, torch.Tensor):
            tensor = as_stacked(leaf)
            if self._has_threads or tensor.numel() * tensor.itemsize < ROW_BYTES:
                return False
            is_laid_out = self.in_worker or tensor.is_contiguous() or self.layout(tensor) is not None
            return is_plain(tensor) and is_laid_out
        if type(leaf) is not np.ndarray:
            return type(leaf) is DeferredImage
        if not 0 < leaf.nbytes < (THREADS_PAY_BYTES if self._has_threads else sys.maxsize):
            return False
        if leaf.nbytes < ROW_BYTES and self.layout(leaf) is None:
            return False
        if leaf.dtype.hasobject or leaf.dtype.names is not None:
            return False
        if not leaf.flags.c_contiguous and (
            min(leaf.strides) < 0 or not (self.in_worker or self.layout(leaf))
        ):
            return False
        return _torch_takes(leaf.dtype)

    def _stack(self, tensors: Any, *, collate_fn_map: Any) -> Any:
        """Torch's rule for tensors, except that large batches are stacked in warm memory."""
        first = tensors[0]
        is_large = first.numel() * first.itemsize * len(tensors) >= WARM_BYTES
        # With out=, torch.stack would silently cast tensors of a different dtype.
        are_alike = is_large and len({(type(tensor), tensor.dtype) for tensor in tensors}) == 1
        if are_alike and is_plain(first) and first.is_contiguous():
            rows = _rows_for(self.allocator, tensors)
            with contextlib.suppress(RuntimeError):  # torch's own rule below raises the error
                return torch.stack(tuple(tensors), 0, out=rows)
        return torch_collate.collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)

    def _stack_arrays(self, arrays: Any, *, collate_fn_map: Any) -> Any:
        """Torch's rule for arrays, except that NumPy stacks arrays that are alike where no threads pay."""
        threads_pay = self._has_threads and arrays[0].nbytes >= THREADS_PAY_BYTES
        stacked = None if threads_pay else _stacked_arrays(self.allocator, arrays)
        return _ARRAY_RULE(arrays, collate_fn_map=collate_fn_map) if stacked is None else stacked


def _write_parts(kind: Any, writers: list[tuple[Any, Any]], value: Any, row: int) -> Any:
    """Write the large leaves in a dict, list, tuple or namedtuple; see `Collator._writer`."""
    if type(value) is not kind:
        raise _MismatchError
    parts: Any = dict(value) if kind is dict else list(value)
    try:
        for key, write in writers:
            parts[key] = write(parts[key], row)
    except LookupError:
        raise _MismatchError from None
    if kind is tuple:
        return tuple(parts)
    return kind._make(parts) if hasattr(kind, "_make") else parts


def _read_back(samples: Any) -> Any:
    """Whole samples, if these are samples."""
    if not isinstance(samples, list):
        return samples

    def read(leaf: Any, row: int) -> Any:
        return leaf.read(row) if type(leaf) is _Rows else leaf

    return [
        map_leaves(sample, functools.partial(read, row=row), is_no_container)
        for row, sample in enumerate(samples)
    ]


# --- torch's table of rules, with our memory ---


def is_torch_default(collate_fn: Callable[..., Any]) -> bool:
    """Whether ``collate_fn`` is default_collate with torch's own rules, so rows can be written.

    Call this for each batch: a module that a dataset imports with its first sample can add a rule.
    """
    return collate_fn is default_collate and torch_collate.default_collate_fn_map == _default_rules


def install_slot_rules() -> None:
    """Let default_collate stack tensors and arrays into a slot within an `allocating_in` block.

    Call this only in worker processes: it changes torch's table of rules, unless the user has changed it.
    """
    rules = torch_collate.default_collate_fn_map
    replacements = {torch.Tensor: (_TENSOR_RULE, _slot_rule), np.ndarray: (_ARRAY_RULE, _array_slot_rule)}
    for kind, (torch_rule, slot_rule) in replacements.items():
        if rules[kind] is torch_rule:
            rules[kind] = _default_rules[kind] = slot_rule


def _rows_for(allocator: BumpAllocator, tensors: Any) -> torch.Tensor:
    """Memory for a stack of tensors like the first, `(len(tensors), *shape)`.

    Raises:
        SharedMemoryError: The memory could not be allocated; torch's own rule would need the same amount.
    """
    first = tensors[0]
    memory = torch.from_numpy(allocator.allocate(first.numel() * first.itemsize * len(tensors)))
    return memory.view(first.dtype).view(len(tensors), *first.shape)


def _slot_rule(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """Torch's rule for tensors in a worker, with the slot instead of new shared memory."""
    allocator = current_allocator()
    if allocator is not None and batch[0].numel() and is_plain(as_stacked(batch[0])):
        rows = _rows_for(allocator, batch)
        with contextlib.suppress(Exception):  # torch's own rule below raises the error
            return torch.stack(tuple(batch), 0, out=rows)
    return _TENSOR_RULE(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]


def _stacked_arrays(allocator: BumpAllocator, arrays: Any) -> torch.Tensor | None:
    """Small arrays, `(len(arrays), *shape)`, in the allocator's memory; None if torch's rule must stack them.

    NumPy copies all of them in one call, in a third of the time of a loop over rows or of torch's rule.
    """
    shape, dtype = arrays[0].shape, arrays[0].dtype
    if not shape or not arrays[0].nbytes or not _torch_takes(dtype):
        return None
    for array in arrays:
        if type(array) is not np.ndarray or array.shape != shape or not array.flags.c_contiguous:
            return None
        if array.dtype is not dtype and array.dtype != dtype:
            return None
    rows = allocator.array((len(arrays) * shape[0], *shape[1:]), dtype)
    np.concatenate(arrays, out=rows)
    return torch.from_numpy(rows).view(len(arrays), *shape)


def _array_slot_rule(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """Torch's rule for arrays in a worker, with the slot instead of new shared memory."""
    allocator = current_allocator()
    stacked = None if allocator is None else _stacked_arrays(allocator, batch)
    if stacked is None:
        return _ARRAY_RULE(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]
    return stacked


@functools.lru_cache(maxsize=64)
def _torch_takes(dtype: np.dtype[Any]) -> bool:
    """Whether torch has tensors of this dtype and byte order; otherwise its own error says so."""
    try:
        torch.from_numpy(np.empty(0, dtype))
    except (TypeError, ValueError):
        return False
    return True


# --- channels last ---


def to_channels_last(batch: Any) -> Any:
    """Convert every batch of images in a nested batch to `(B, C, H, W)` with channels-last strides.

    `image_layout` decides what an image is. `(B, H, W, C)` tensors are permuted and share memory with the
    input. `(B, C, H, W)` tensors are copied only if their strides are not channels-last. Everything else
    stays unchanged.
    """
    return map_leaves(batch, _images_to_channels_last)


def _images_to_channels_last(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.is_nested or leaf.dim() != 4:
        return leaf
    layout = _layout(tuple(leaf.shape[1:]), leaf.dtype)
    if layout == "HWC":
        return leaf.permute(0, 3, 1, 2)
    return leaf.contiguous(memory_format=torch.channels_last) if layout == "CHW" else leaf


def _layout(shape: tuple[int, ...], dtype: torch.dtype | np.dtype[Any]) -> ImageLayout | None:
    if isinstance(dtype, torch.dtype):
        return image_layout(shape, is_pixels=dtype is torch.uint8 or dtype.is_floating_point)
    return image_layout(shape, is_pixels=dtype == np.uint8 or dtype.kind == "f")
