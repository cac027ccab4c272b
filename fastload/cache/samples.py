"""StoredSamples: samples by index as the records of a store, and batches without a copy of each record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fastload.cache.columns import INT64_BYTES
from fastload.cache.records import PREFIX_AT, decode, is_intact, outline, record_parts
from fastload.cache.sample_cache import SampleCache
from fastload.cache.store import INDEX_BYTES, index_key
from fastload.errors import CacheCorruptError, CacheError
from fastload.nested.leaf import TEXT_KINDS, Leaf, storage_dtype
from fastload.nested.leaves import tensor_functions, text_value
from fastload.nested.spec import build_batch, flatten

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from fastload.cache.columns import Allocate
    from fastload.cache.lmdb_store import LmdbStore

_MAX_DIMENSIONS = 64  # of an array; a batch has one more than its samples


class StoredSamples(SampleCache):
    """Samples in a store.

    Args:
        store: Keeps them.
        num_samples: Number of samples of the dataset.
    """

    layout = "lmdb"

    def __init__(self, store: LmdbStore, num_samples: int) -> None:
        self._store: LmdbStore | None = store
        self._salt = store.salt
        self.num_samples = num_samples

    @property
    def store(self) -> LmdbStore:
        """What keeps them."""
        return self._open() if self._store is None else self._store

    def _open(self) -> LmdbStore:
        raise CacheError("the samples were closed")

    def explain(self) -> str:
        """Where the samples are, and how many."""
        return f"{self.num_cached:,} of {self.num_samples:,} samples in {type(self.store).__name__}"

    @property
    def nbytes(self) -> int:
        """Bytes in use now."""
        return self.store.nbytes

    @property
    def num_cached(self) -> int:
        """How many samples are stored now."""
        return self.num_samples - len(self.missing())

    def missing(self) -> npt.NDArray[np.intp]:
        """Indices of the samples that are not stored, ascending."""
        keys = np.arange(self.num_samples, dtype=f">u{INDEX_BYTES}").view(np.uint8).reshape(-1, INDEX_BYTES)
        return np.flatnonzero(~self.store.holds(keys))

    def __contains__(self, index: object) -> bool:
        """Whether the sample of this index is stored."""
        if not isinstance(index, (int, np.integer)) or not 0 <= index < self.num_samples:
            return False
        return self.store.get(index_key(int(index))) is not None

    def get(self, index: int) -> Any | None:
        """The sample at `0 <= index < num_samples`; None if it is not stored.

        Raises:
            CacheCorruptError: The record is damaged.
        """
        record = self._checked(self.store.get(index_key(index)), index)
        return None if record is None else decode(record)

    def _checked(self, record: memoryview | None, index: int) -> memoryview | None:
        if record is not None and not is_intact(record, self._salt + index_key(index)):
            raise CacheCorruptError(f"sample {index}: its checksum is wrong")
        return record

    def put(self, index: int, sample: Any) -> bool:
        """Store a sample; False if it is not kept. Others find it after `flush`."""
        key = index_key(index)
        return self.store.put(key, record_parts(*flatten(sample), self._salt + key)[0])

    def flush(self) -> None:
        """Let others find all that was put."""
        self.store.flush()

    def gather(self, indices: npt.NDArray[np.intp], allocate: Allocate) -> Any | None:
        """The batch of these samples, from one look into the store.

        Raises:
            CacheCorruptError: A record is damaged.
        """
        numbers = indices.tolist()

        def stacked(records: list[memoryview | None]) -> Any | None:
            found = list(map(self._checked, records, numbers))
            return None if None in found else stack_records(cast("list[memoryview]", found), allocate)

        return self.store.lend(list(map(index_key, numbers)), stacked)

    def close(self) -> None:
        """Release this process's resources; samples that were handed out stay valid."""
        self.store.close()


# --- a batch of records -----------------------------------------------------------------------------------


def stack_records(records: Sequence[memoryview], allocate: Allocate) -> Any | None:
    """The batch that default_collate would make of the samples in these records.

    Args:
        records: Intact; not empty.
        allocate: Returns a writable C-contiguous array of a shape and dtype, for a part of the batch.

    Returns:
        None if the samples differ in structure, or default_collate would not make tensors or lists of them.
    """
    first = outline(records[0])
    make = tensor_functions()
    if not all(make.collates(leaf) for leaf in first.spec.leaves):
        return None
    if any(len(leaf.shape) >= _MAX_DIMENSIONS for leaf in first.spec.leaves):
        return None
    size = PREFIX_AT + len(first.prefix)
    end = max((sum(span) for span in first.spans), default=size)
    spans = []
    for record in records:
        if len(record) >= end and bytes(record[PREFIX_AT:size]) == first.prefix:  # the usual case
            spans.append(first.spans)
            continue
        other = outline(record)
        if other.spec != first.spec:
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
