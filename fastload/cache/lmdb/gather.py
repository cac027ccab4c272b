"""Makes a batch of raw records by copying them directly from the page cache to the memory of the batch.

The memory is valid only while the caller holds the files. All records are checked before memory is requested:
it is requested only if all records make one batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.cache.format.columns import INT64_BYTES
from fastload.cache.format.record import outline
from fastload.nested.leaf import TEXT_KINDS, Leaf, storage_dtype
from fastload.nested.leaves import tensor_functions, text_value
from fastload.nested.spec import build_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastload.cache.format.columns import Allocate

_MAX_DIMENSIONS = 64  # of an array; a batch has one more than its samples


def stack_records(records: Sequence[memoryview], allocate: Allocate) -> Any | None:
    """The batch that default_collate would make of the samples in these records.

    Args:
        records: Verified; not empty.
        allocate: Returns a writable C-contiguous array of a shape and dtype, for a part of the batch.

    Returns:
        None if the samples differ in structure, hold encoded images, or default_collate would not make
        tensors or lists of them.
    """
    first = outline(records[0])
    make = tensor_functions()
    if first.codec != "raw" or not all(make.collates(leaf) for leaf in first.spec.leaves):
        return None
    if any(len(leaf.shape) >= _MAX_DIMENSIONS for leaf in first.spec.leaves):
        return None
    size = len(first.prefix)
    end = max((sum(span) for span in first.spans), default=size)
    spans = []
    for record in records:
        if len(record) >= end and bytes(record[:size]) == first.prefix:  # the usual case
            spans.append(first.spans)
            continue
        other = outline(record)
        if other.spec != first.spec or other.codec != "raw":
            return None
        spans.append(other.spans)
    ints = [number for number, leaf in enumerate(first.spec.leaves) if leaf.kind == "int"]
    if any(span[number][1] != INT64_BYTES for span in spans for number in ints):
        return None  # beyond 64 bits
    columns = [
        _column(leaf, records, [span[number] for span in spans], allocate)
        for number, leaf in enumerate(first.spec.leaves)
    ]
    return build_batch(first.spec.node, iter(columns))


def _column(
    leaf: Leaf, records: Sequence[memoryview], spans: Sequence[tuple[int, int]], allocate: Allocate
) -> Any:
    """One leaf of all samples: a list of texts, or a tensor `(len(records), ...)`."""
    if leaf.kind in TEXT_KINDS:
        return [
            text_value(leaf.kind, bytes(record[start : start + nbytes]))
            for record, (start, nbytes) in zip(records, spans, strict=True)
        ]
    out = allocate((len(records), *leaf.shape), storage_dtype(leaf))
    row_bytes = out.nbytes // len(records)
    if row_bytes:
        rows = out.reshape(-1).view(np.uint8).data
        for row, (record, (start, _)) in enumerate(zip(records, spans, strict=True)):
            rows[row * row_bytes : (row + 1) * row_bytes] = record[start : start + row_bytes]
    return tensor_functions().batch_tensor(leaf, out)
