"""Stores uniform samples as columns: one contiguous `(rows, *shape)` array per leaf.

A column of str or bytes is `(rows, 4 + width) uint8`: the length in four little-endian bytes, then the text.
A batch is one gather per column, in the structure that torch's default_collate would give it.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastload.memory.segment import round_up
from fastload.nested.leaf import TEXT_KINDS, Array, Leaf, storage_dtype
from fastload.nested.leaves import tensor_functions, text_value, to_bytes, view_array
from fastload.nested.spec import Spec, build_batch
from fastload.system.cached_property import cached_property

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Array]

COLUMN_ALIGNMENT_BYTES = 64
_LENGTH_BYTES = 4
_MIN_TEXT_BYTES = 64
_TEXT_MARGIN = 2  # a text column is twice as wide as the longest example; longer texts are stored elsewhere
INT64_BYTES = 8


class Column(NamedTuple):
    """The array of one leaf: its offset in the segment, and the dtype and shape of a row."""

    leaf: Leaf
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return prod(self.row_shape) * self.dtype.itemsize

    def pack(self, value: Any) -> bytes | Array | None:
        """The bytes of a row, or None if this value does not fit: a long text, or an int beyond 64 bits."""
        payload = to_bytes(self.leaf, value)
        if self.leaf.kind in TEXT_KINDS:
            room = self.row_shape[0] - _LENGTH_BYTES
            return len(payload).to_bytes(_LENGTH_BYTES, "little") + payload if len(payload) <= room else None
        if self.leaf.kind == "int" and len(payload) != INT64_BYTES:
            return None
        return payload


def plan_columns(
    spec: Spec, examples: Sequence[list[Any]], rows_at: int, rows: int
) -> tuple[tuple[Column, ...], int]:
    """Lay out the columns of samples of one spec.

    Args:
        spec: The structure of all samples.
        examples: The values of some samples; they determine the width of text columns.
        rows_at: Offset of the first column.
        rows: Number of samples.

    Returns:
        The columns, and the offset after the last one.
    """
    columns = []
    end = rows_at
    for number, leaf in enumerate(spec.leaves):
        dtype, shape = _row(leaf, [values[number] for values in examples])
        columns.append(Column(leaf, dtype, shape, round_up(end, COLUMN_ALIGNMENT_BYTES)))
        end = columns[-1].offset + rows * columns[-1].row_bytes
    return tuple(columns), end


def _row(leaf: Leaf, examples: list[Any]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    if leaf.kind in TEXT_KINDS:
        longest = max(len(to_bytes(leaf, value)) for value in examples)
        return np.dtype(np.uint8), (_LENGTH_BYTES + max(_MIN_TEXT_BYTES, _TEXT_MARGIN * longest),)
    return (np.dtype(np.uint8), (0,)) if leaf.kind == "none" else (storage_dtype(leaf), leaf.shape)


class ColumnTable:
    """Reads rows and batches through the mapping of one process.

    Args:
        spec: The structure of the samples.
        columns: As `plan_columns` laid them out.
        rows: Number of rows.
        mapping: The segment, read-only; views keep it alive.
    """

    def __init__(self, spec: Spec, columns: tuple[Column, ...], rows: int, mapping: Any) -> None:
        self._spec = spec
        self._columns = [
            (column.leaf, view_array(column.dtype, (rows, *column.row_shape), mapping, column.offset))
            for column in columns
        ]
        self._made_getters: list[Callable[[int], Any]] | None = None
        self._make = spec.builder

    @property
    def _getters(self) -> list[Callable[[int], Any]]:
        """What returns the value in a row, per column; made at the first sample, as tensors import torch."""
        if self._made_getters is None:
            self._made_getters = [_value_getter(leaf, array) for leaf, array in self._columns]
        return self._made_getters

    def sample(self, row: int) -> Any:
        """The sample in a row, with read-only views of arrays and private copies of tensors."""
        getters = self._made_getters or self._getters
        if len(getters) == 2:  # most samples: without the function that a comprehension is before Python 3.12
            first, second = getters
            return self._make([first(row), second(row)])
        return self._make([read(row) for read in getters])

    @cached_property
    def _makes_batches(self) -> bool:
        """Whether default_collate makes tensors or lists of such samples."""
        collates = tensor_functions().collates
        return all(collates(leaf) for leaf, _ in self._columns)

    def gather(self, rows: npt.NDArray[np.intp], allocate: Allocate) -> Any | None:
        """A batch of rows, `(len(rows), ...)` each, in the structure of torch's default_collate.

        Args:
            rows: Numbers of rows that are written; the caller checks the bounds.
            allocate: Returns a writable C-contiguous array of a shape and dtype, for a part of the batch.

        Returns:
            None if default_collate would not make tensors or lists of such samples.
        """
        if not self._makes_batches:
            return None
        make = tensor_functions()
        batch: list[Any] = []
        for (leaf, array), read in zip(self._columns, self._getters, strict=True):
            if leaf.kind in TEXT_KINDS:
                batch.append([read(row) for row in rows.tolist()])
                continue
            out = allocate((len(rows), *array.shape[1:]), array.dtype)
            array.take(rows, axis=0, out=out, mode="clip")  # "raise" would use a temporary buffer
            batch.append(make.batch_tensor(leaf, out))
        return build_batch(self._spec.node, iter(batch))


def _value_getter(leaf: Leaf, array: Array) -> Callable[[int], Any]:
    """A function that returns the value in a row, by the row's number."""
    if leaf.kind == "array":
        # One index of a row with dimensions makes an array, faster than an ellipsis.
        return array.__getitem__ if array.ndim > 1 else (lambda row: array[row, ...])
    if leaf.kind == "tensor":
        array_tensor = tensor_functions().array_tensor
        return lambda row: array_tensor(array[row, ...].copy(), leaf.dtype)
    if leaf.kind == "scalar":
        return lambda row: array[row, ...].copy()[()]
    if leaf.kind in TEXT_KINDS:
        return lambda row: text_value(leaf.kind, _text(array[row]))
    if leaf.kind == "none":
        return lambda _: None
    return array.item


def _text(row: Array) -> bytes:
    length = int.from_bytes(row[:_LENGTH_BYTES].tobytes(), "little")
    return row[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes()
