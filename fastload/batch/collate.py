"""Collate samples like torch's default_collate, but write each one directly into the memory of its batch.

Runs in the process that fetches samples: a worker, or the parent without workers. Each sample is written into
its row of the batch. Rules:

1. The result equals that of torch.utils.data.default_collate for the same samples in the same kind of
   process: values, types, dtypes, strides, and errors.
2. Where copies run on one thread, as in workers, arrays of at least ROW_ARRAY_BYTES and tensors of at least
   ROW_TENSOR_BYTES are written to rows. Where torch copies with several threads, arrays from ROW_ARRAY_BYTES
   to THREADS_PAY_BYTES are written to rows. Every other leaf is kept until the end and stacked in one call; a
   sample without a leaf for rows is kept whole.
3. A sample is released as soon as it is written, so its memory is warm for the next sample.
4. Rows are for exact dicts, lists, tuples and namedtuples of exact arrays, plain tensors, and torchvision's
   tv_tensors, which torch stacks to plain tensors.
5. If a sample does not fit the rows, the samples before it are read back from their rows, the rest is still
   fetched (random streams must advance), and torch's own collate gets all samples; its error is raised.
6. No sample lies in the memory of the rows: while the dataset reads samples, default_collate stacks into the
   memory that torch would use.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import default_collate

from fastload.batch.collate_errors import explain
from fastload.batch.packing import is_plain
from fastload.batch.source import THREADS_PAY_BYTES
from fastload.batch.stacking import ARRAY_RULE, rows_for, stacked_arrays, torch_takes
from fastload.images.geometry import image_layout
from fastload.nested.deferred import DeferredImage, computed
from fastload.nested.tensors import as_stacked, tensor_array, tensor_over
from fastload.nested.tree import map_leaves
from fastload.system.torch_private import torch_collate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastload.images.geometry import ImageLayout
    from fastload.memory.lease import BumpAllocator

# benchmarks/NOTES.md has the measurements behind the next sizes ("Collating").
# With one thread, writing a warm tensor of at least this size to its row takes no longer than stacking it at
# the end with torch.stack. Writing the row of a smaller tensor takes up to ten times as long.
ROW_TENSOR_BYTES = 32 * 1024
# As above for arrays, which NumPy stacks.
ROW_ARRAY_BYTES = 16 * 1024
# A batch of at least this size is stacked in reused memory: malloc can map fresh pages for it, and the first
# write to a fresh page takes several times as long as a write to a warm page.
WARM_BYTES = 8 * 1024 * 1024

# What collates samples best: torch's rules alone; these, with `_stack` and `_stack_arrays`; rows for a leaf.
_BY_TORCH, _STACKED, _IN_ROWS = range(3)
_SCALARS = frozenset({int, float, bool, str, bytes})

_NO_ROWS: np.ndarray[Any, Any] = np.empty(0, np.uint8)


class _MismatchError(Exception):
    """A sample does not fit the rows of its batch; raised and caught in this file only."""


class _Batch:
    """What all leaves of one batch share."""

    def __init__(self, allocator: BumpAllocator, *, in_worker: bool, channels_last: bool) -> None:
        self.allocator = allocator
        self.in_worker = in_worker
        self.has_threads = torch.get_num_threads() > 1
        self.count = 0
        self.own: Callable[[Any], Any] | None = None  # see `RowCollate.begin`
        self._channels_last = channels_last
        self._stack = functools.partial(_stack, allocator)
        self._stack_arrays = functools.partial(_stack_arrays, self)

    def collate(self, values: Any, way: int) -> Any:
        """Collate the values of all samples by torch's current rules; large tensors go to warm memory."""
        if way == _BY_TORCH:
            return default_collate(values)
        rules = torch_collate.default_collate_fn_map
        is_torchs = rules.get(torch.Tensor) is torch_collate.collate_tensor_fn
        if self.in_worker or not is_torchs or rules.get(np.ndarray) is not ARRAY_RULE:
            return default_collate(values)  # in a worker, torch's own table contains a rule of fastload's
        own: dict[Any, Any] = {torch.Tensor: self._stack, np.ndarray: self._stack_arrays}
        return torch_collate.collate(values, collate_fn_map={**rules, **own})

    def layout(self, leaf: torch.Tensor | np.ndarray[Any, Any]) -> ImageLayout | None:
        """The layout of a leaf of a sample whose batch gets channels-last strides; None for other leaves."""
        return _layout(tuple(leaf.shape), leaf.dtype) if self._channels_last else None


def _stack(allocator: BumpAllocator, tensors: Any, *, collate_fn_map: Any) -> Any:
    """Torch's rule for tensors, except that large batches are stacked in warm memory."""
    first = tensors[0]
    is_large = first.numel() * first.itemsize * len(tensors) >= WARM_BYTES
    # With out=, torch.stack would silently cast tensors of a different dtype.
    are_alike = is_large and len({(type(tensor), tensor.dtype) for tensor in tensors}) == 1
    if are_alike and is_plain(first) and first.is_contiguous():
        rows = rows_for(allocator, tensors)
        with contextlib.suppress(RuntimeError):  # torch's own rule below raises the error
            return torch.stack(tuple(tensors), 0, out=rows)
    return torch_collate.collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)


def _stack_arrays(batch: _Batch, arrays: Any, *, collate_fn_map: Any) -> Any:
    """Torch's rule for arrays, except that NumPy stacks arrays that are alike where threads would not pay."""
    threads_pay = batch.has_threads and arrays[0].nbytes >= THREADS_PAY_BYTES
    stacked = None if threads_pay else stacked_arrays(batch.allocator, arrays)
    return ARRAY_RULE(arrays, collate_fn_map=collate_fn_map) if stacked is None else stacked


def _layout(shape: tuple[int, ...], dtype: torch.dtype | np.dtype[Any]) -> ImageLayout | None:
    if isinstance(dtype, torch.dtype):
        return image_layout(shape, is_pixels=dtype is torch.uint8 or dtype.is_floating_point)
    return image_layout(shape, is_pixels=dtype == np.uint8 or dtype.kind == "f")


class _Rows:
    """A leaf that is the same kind of array or tensor in every sample; written to rows of the batch."""

    def __init__(self, batch: _Batch, first: Any) -> None:
        self._batch = batch
        is_deferred = type(first) is DeferredImage
        self._kind = first.kind if is_deferred else type(first)
        self._is_tensor = issubclass(self._kind, torch.Tensor)
        self.is_array = not is_deferred and not self._is_tensor
        self.shape = tuple(first.shape)
        self.dtype = first.dtype
        self._row_dtype = first.dtype
        if self._is_tensor:
            self._row_dtype = first.row_dtype if is_deferred else tensor_array(as_stacked(first)).dtype
        # Without workers torch.stack follows the samples' strides, so only contiguous samples go to rows.
        self._layout = batch.layout(first)
        self._any_strides = batch.in_worker or self._layout is not None
        self.rows = _NO_ROWS

    def begin(self) -> None:
        count, allocator, dtype = self._batch.count, self._batch.allocator, self._row_dtype
        if self._layout == "CHW":
            channels, height, width = self.shape
            self.rows = allocator.array((count, height, width, channels), dtype).transpose(0, 3, 1, 2)
        else:
            self.rows = allocator.array((count, *self.shape), dtype)

    def write(self, value: Any, row: int) -> None:
        if type(value) is DeferredImage:
            if (value.kind, value.shape, value.dtype) == (self._kind, self.shape, self.dtype):
                value.write(self.rows[row])
                return
            raise _MismatchError
        if type(value) is not self._kind or value.shape != self.shape or value.dtype != self.dtype:
            raise _MismatchError
        if self._is_tensor:
            value = as_stacked(value)
            if not (is_plain(value) and (self._any_strides or value.is_contiguous())):
                raise _MismatchError
            value = tensor_array(value)
        elif not value.flags.c_contiguous and (not self._any_strides or min(value.strides) < 0):
            raise _MismatchError  # torch does not allow negative strides
        self.rows[row] = value

    def restore(self, row: int) -> Any:
        array = np.array(self.rows[row], order="C")
        return tensor_over(array, self.dtype).as_subclass(self._kind) if self._is_tensor else array

    def result(self, count: int) -> Any:
        rows, self.rows = self.rows[:count], _NO_ROWS  # else this plan would keep the slot leased
        return tensor_over(rows, self.dtype) if self._is_tensor else torch.from_numpy(rows)


class _Kept:
    """A part of each sample that torch collates: small tensors, numbers, strings, and all other values."""

    def __init__(self, batch: _Batch, path: str, way: int, *, in_sequence: bool) -> None:
        self._batch = batch
        self._path = path
        self._way = way
        self.values: list[Any] = []
        # torch transposes sequences with zip, so it collates tuples there, and strings stay in a tuple.
        self._in_sequence = in_sequence

    def begin(self) -> None:
        self.values = []

    def write(self, value: Any, row: int) -> None:
        own = self._batch.own
        self.values.append(value if own is None or type(value) in _SCALARS else own(value))

    def restore(self, row: int) -> Any:
        return self.values[row]

    def result(self, count: int) -> Any:
        values, self.values = self.values, []
        return _collate(self._batch, tuple(values) if self._in_sequence else values, self._path, self._way)


class _Container:
    """A dict, list, tuple or namedtuple of other nodes."""

    def __init__(self, kind: type[Any], children: list[Any], keys: list[Any] | None) -> None:
        self._kind = kind
        self._children = children
        self._by_key = None if keys is None else dict(zip(keys, children, strict=True))
        kinds = [type(child) for child in children]
        self._pair = children if keys is None and kinds == [_Rows, _Kept] and children[0].is_array else None

    def begin(self) -> None:
        for child in self._children:
            child.begin()

    def write(self, value: Any, row: int) -> None:
        if type(value) is not self._kind:
            raise _MismatchError
        if self._by_key is not None:
            # torch's batch has the keys of its first sample, in that order; later samples can have more.
            if row == 0 and list(value) != list(self._by_key):
                raise _MismatchError
            for key, child in self._by_key.items():
                if key not in value:
                    raise _MismatchError
                child.write(value[key], row)
            return
        if len(value) != len(self._children):
            raise _MismatchError
        if self._pair is not None:  # most samples: without further calls
            (array, label), (rows, kept) = value, self._pair
            is_plain_pair = type(label) is int and type(array) is np.ndarray and array.flags.c_contiguous
            if is_plain_pair and array.shape == rows.shape and array.dtype == rows.dtype:
                rows.rows[row] = array
                kept.values.append(label)
                return
        for child, part in zip(self._children, value, strict=True):
            child.write(part, row)

    def restore(self, row: int) -> Any:
        return self._made([child.restore(row) for child in self._children], self._kind)

    def result(self, count: int) -> Any:
        # tuples become lists, as in torch
        return self._made([child.result(count) for child in self._children], list)

    def _made(self, parts: list[Any], sequence: type[Any]) -> Any:
        if self._by_key is not None:
            return dict(zip(self._by_key, parts, strict=True))
        return self._kind(*parts) if hasattr(self._kind, "_fields") else sequence(parts)


class RowCollate:
    """Collates batches: ``begin(count)``, ``read()`` or ``take_all()``, or ``add_all()`` alone; ``finish()``.

    ``len()`` of it is the number of samples that were added to the batch so far.

    Args:
        allocator: Where rows are laid out.
        in_worker: Whether torch would stack into shared memory here (its strides and promotion differ then).
        channels_last: Lay `(C, H, W)` samples out to give batches channels-last strides.
    """

    def __init__(self, allocator: BumpAllocator, *, in_worker: bool, channels_last: bool) -> None:
        self._batch = _Batch(allocator, in_worker=in_worker, channels_last=channels_last)
        self.takes_deferred = in_worker and not self._batch.has_threads  # else strides would differ
        self._root: Any = None
        self._num_rows = 0
        self._keeps = False  # whether the samples of this batch are kept; the first sample decides this
        self._kept: Any = []
        self._way = _STACKED  # of samples that are kept

    def begin(self, count: int, *, keeps: bool = False, own: Callable[[Any], Any] | None = None) -> None:
        """Start a batch of at most ``count`` samples.

        Args:
            count: The number of rows.
            keeps: Whether all samples are kept, for `take`.
            own: Called with each sample, or part of one, that is kept while the next sample is read, because
                the memory that it refers to can change or must not reach torch; None: it is kept itself.
        """
        self._batch.count = count
        self._batch.own = own
        self._num_rows = 0
        self._keeps = keeps
        self._kept = []
        self._way = _STACKED

    def __len__(self) -> int:
        return len(self._kept) if self._keeps else self._num_rows

    def leaves_to_torch(self, sample: Any, count: int) -> bool:
        """Whether torch collates ``count`` samples like this one best, so that `begin` would gain nothing."""
        self._batch.count = count
        return type(sample) in _SCALARS or _way_of(sample, self._batch) == _BY_TORCH

    def read(self, dataset: Any, indices: Iterator[Any], get: Callable[[Any], Any] | None = None) -> None:
        """Add ``dataset[index]``, or ``get(index)``, for each index; a sample can be dropped afterwards."""
        if not self._keeps:
            add = self._add
            for index in indices:
                add(dataset[index] if get is None else get(index))
                if self._keeps:
                    break
        own = self._batch.own
        if self._keeps and get is None and own is None:
            # As fast as torch's: calls and choices would take a tenth of an epoch of ints.
            self._kept += [dataset[index] for index in indices]
        elif self._keeps:
            for index in indices:
                sample = dataset[index] if get is None else get(index)
                self._kept.append(sample if own is None else own(sample))

    def take_all(self, samples: Iterator[Any]) -> None:
        """Add samples; each can be dropped before the next one is made."""
        if not self._keeps:
            for _ in map(self._add, samples):
                if self._keeps:
                    break
        if self._keeps:
            own = self._batch.own
            self._kept.extend(samples if own is None else map(own, samples))

    def add_all(self, samples: Any, *, keeps: bool) -> None:
        """Take the samples of a whole batch, which the dataset read together.

        Args:
            samples: A list, or any other object that the dataset returns for a batch.
            keeps: As for `begin`.
        """
        self.begin(0, keeps=True)
        self._kept = samples
        if not keeps and isinstance(samples, (list, tuple)) and len(samples) > 0:
            self._batch.count = len(samples)
            self._way = _way_of(samples[0], self._batch)
            if self._way == _IN_ROWS:
                self.begin(len(samples))
                self.take_all(iter(samples))

    def finish(self) -> Any:
        """The batch of the added samples."""
        if self._num_rows and not self._keeps:
            return self._root.result(self._num_rows)
        return _collate(self._batch, self.take(), "$", self._way)

    def take(self) -> Any:
        """Return the kept samples, for a different collate function."""
        samples, self._kept = self._kept, []
        return samples

    def forget(self) -> None:
        """After an error: release samples, rows and plan."""
        self._root = None
        self._kept = []

    def _add(self, sample: Any) -> None:
        row = self._num_rows
        if row == 0:
            self._add_first(sample)
            return
        try:
            self._root.write(sample, row)
            self._num_rows = row + 1
        except _MismatchError:
            # A dataset that reuses a buffer: the rows held each sample as it was returned, and so do these.
            self._batch.own = functools.partial(map_leaves, function=_owned)
            self._kept = [*map(self._root.restore, range(row)), self._batch.own(sample)]
            self._keeps = True
            self._root = None

    def _add_first(self, sample: Any) -> None:
        self._way = _way_of(sample, self._batch)
        if self._way != _IN_ROWS:
            own = self._batch.own
            self._keeps, self._kept = True, [sample if own is None else own(sample)]
            return
        if self._root is not None:
            try:
                self._root.begin()
                self._root.write(sample, 0)
            except _MismatchError:
                self._root = None
                # The rows for the old kind of sample are no longer needed: start over in the same memory.
                self._batch.allocator.begin(self._batch.allocator.memory)
        if self._root is None:
            self._root = _compile(sample, self._batch)
            self._root.begin()
            self._root.write(sample, 0)
        self._num_rows = 1


def _collate(batch: _Batch, values: Any, path: str, way: int) -> Any:
    """Collate values of all samples of a batch by torch's rules.

    Args:
        batch: The batch.
        values: Whole samples, or the part at ``path`` of each sample.
        path: The place of the values in a sample.
        way: See `_way_of`.
    """
    try:
        return batch.collate(values, way)
    except Exception as error:
        explain(values, path, error)
        raise


def _owned(leaf: Any) -> Any:
    """The leaf, in memory of its own if it is of a kind that is written to rows."""
    if type(leaf) is np.ndarray:
        return leaf.copy(order="K")
    if isinstance(leaf, torch.Tensor) and is_plain(as_stacked(leaf)):
        return leaf.clone()
    return computed(leaf)


def _way_of(sample: Any, batch: _Batch) -> int:
    """What collates samples like this one, or parts of them, best: `_BY_TORCH`, `_STACKED` or `_IN_ROWS`."""
    kind = type(sample)
    if kind in _SCALARS:
        return _BY_TORCH
    if kind is torch.Tensor:
        if _is_row_tensor(sample, batch):
            return _IN_ROWS
        return _STACKED if sample.numel() * sample.itemsize * batch.count >= WARM_BYTES else _BY_TORCH
    if kind is DeferredImage:
        return _IN_ROWS
    if kind is np.ndarray:
        return _IN_ROWS if _is_row_array(sample, batch) else _STACKED
    if kind is dict:
        sample = sample.values()
    elif isinstance(sample, torch.Tensor):
        return _IN_ROWS if _is_row_tensor(as_stacked(sample), batch) else _STACKED
    elif not (kind is list or kind is tuple or (isinstance(sample, tuple) and hasattr(kind, "_make"))):
        return _STACKED  # what is inside, if anything, is not known
    way = _BY_TORCH
    for part in sample:
        way = max(way, _way_of(part, batch))
        if way == _IN_ROWS:
            break
    return way


def _compile(sample: Any, batch: _Batch, path: str = "$", *, in_sequence: bool = False) -> Any:
    """The tree of writers for samples like this one; ``path`` is its place in the whole sample."""
    kind, way = type(sample), _way_of(sample, batch)
    if way != _IN_ROWS:
        return _Kept(batch, path, way, in_sequence=in_sequence)
    if kind is np.ndarray or kind is DeferredImage or issubclass(kind, torch.Tensor):
        return _Rows(batch, sample)
    is_dict = kind is dict
    keys = list(sample) if is_dict else range(len(sample))
    parts = [_compile(sample[key], batch, f"{path}[{key!r}]", in_sequence=not is_dict) for key in keys]
    return _Container(kind, parts, list(keys) if is_dict else None)


def _is_row_array(array: np.ndarray[Any, Any], batch: _Batch) -> bool:
    if not 0 < array.nbytes < (THREADS_PAY_BYTES if batch.has_threads else sys.maxsize):
        return False
    if array.nbytes < ROW_ARRAY_BYTES and batch.layout(array) is None:
        return False
    if array.dtype.hasobject or array.dtype.names is not None:
        return False
    if not array.flags.c_contiguous:
        if min(array.strides) < 0:
            return False
        if not (batch.in_worker or batch.layout(array)):
            return False
    return torch_takes(array.dtype)


def _is_row_tensor(tensor: torch.Tensor, batch: _Batch) -> bool:
    if batch.has_threads or tensor.numel() * tensor.itemsize < ROW_TENSOR_BYTES or not is_plain(tensor):
        return False
    return batch.in_worker or tensor.is_contiguous() or batch.layout(tensor) is not None


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
