"""StoredSamples: samples by index as the records of a store, and batches without a copy of each record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fastload.cache.columns import INT64_BYTES
from fastload.cache.records import PREFIX_AT, decode, is_intact, outline, record_parts
from fastload.cache.sample_cache import SampleCache
from fastload.cache.store import INDEX_BYTES, index_key
from fastload.errors import CacheCorruptError, CacheError
from fastload.nested.leaf import TEXT_KINDS, storage_dtype
from fastload.nested.leaves import tensor_functions, text_value
from fastload.nested.spec import build_batch, flatten
from fastload.system.humanize import readable_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from fastload.cache.columns import Allocate
    from fastload.cache.store import Store

_MAX_DIMENSIONS = 64  # of an array; a batch has one more than its samples


class StoredSamples(SampleCache):
    """Samples in a store.

    Args:
        store: Keeps them.
        num_samples: Number of samples of the dataset.

    Attributes:
        place: Where they are.
        reason: Why this cache is in use.
    """

    layout = "lmdb"
    place, reason = "LMDB", "filled now"

    def __init__(self, store: Store, num_samples: int) -> None:
        self._store: Any = store
        self._salt = store.salt
        self.num_samples = num_samples

    @property
    def store(self) -> Any:
        """What keeps them."""
        return self._open() if self._store is None else self._store

    def _open(self) -> Store:
        raise CacheError("the samples were closed")

    @property
    def parts(self) -> dict[str, str] | None:
        """Of the fingerprint of the samples, by name; None if there is none."""
        return None

    def explain(self) -> str:
        """Where the samples are, how many, why this cache is in use, and the parts of its fingerprint."""
        parts = "".join(f"\n  {name}: {value}" for name, value in (self.parts or {}).items())
        size = f"{self.num_cached:,} of {self.num_samples:,} samples, {readable_size(self.nbytes)}"
        return f"{self.place}, {size}: {self.reason}{parts}"

    @property
    def nbytes(self) -> int:
        """Bytes in use now."""
        return int(self.store.nbytes)

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
        return bool(self.store.holds(np.frombuffer(index_key(int(index)), np.uint8)[None])[0])

    def get(self, index: int) -> Any | None:
        """The sample at `0 <= index < num_samples`; None if it is not stored.

        Raises:
            CacheCorruptError: The record is damaged.
        """
        record = self._checked(self.store.get(index_key(index)), index)
        return None if record is None else decode(record)

    def _checked(self, record: memoryview | None, index: int) -> memoryview | None:
        if record is None or self._salt is None:
            return record
        if not is_intact(record, self._salt + index_key(index)):
            raise CacheCorruptError(f"sample {index}: its checksum is wrong")
        return record

    def put(self, index: int, sample: Any) -> bool:
        """Store a sample; False if it is not kept. Others find it after `flush`."""
        key = index_key(index)
        checked = None if self._salt is None else self._salt + key
        return bool(self.store.put(key, record_parts(*flatten(sample), checked)[0]))

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
            def check(row: int) -> None:
                self._checked(records[row], numbers[row])

            if None in records:
                check(records.index(None))  # a cache that should have it raises
                return None
            return stack_records(cast("list[memoryview]", records), allocate, check)

        return self.store.lend(list(map(index_key, numbers)), stacked)

    def close(self) -> None:
        """Release this process's resources; samples that were handed out stay valid."""
        self.store.close()


# --- a batch of records -----------------------------------------------------------------------------------


def stack_records(
    records: Sequence[memoryview], allocate: Allocate, check: Callable[[int], None] = lambda row: None
) -> Any | None:
    """The batch that default_collate would make of the samples in these records.

    Args:
        records: Not empty.
        allocate: Returns a writable C-contiguous array of a shape and dtype, for a part of the batch.
        check: Raises if the record of a row is damaged. It is called right before the record is copied, which
            then comes from the processor's cache.

    Returns:
        None if the samples differ in structure, or default_collate would not make tensors or lists of them.
    """
    check(0)
    first = outline(records[0])
    make = tensor_functions()
    leaves = first.spec.leaves
    if not all(make.collates(leaf) and len(leaf.shape) < _MAX_DIMENSIONS for leaf in leaves):
        return None
    size = PREFIX_AT + len(first.prefix)
    end = max((sum(span) for span in first.spans), default=size)
    spans = []
    for row, record in enumerate(records):
        if len(record) >= end and bytes(record[PREFIX_AT:size]) == first.prefix:  # the usual case
            spans.append(first.spans)
            continue
        check(row)
        other = outline(record)
        if other.spec != first.spec:
            return None
        spans.append(other.spans)
    ints = [number for number, leaf in enumerate(leaves) if leaf.kind == "int"]
    if any(span[number][1] != INT64_BYTES for span in spans for number in ints):
        return None  # beyond 64 bits
    columns: list[Any] = []
    for leaf in leaves:
        is_text = leaf.kind in TEXT_KINDS
        columns.append([] if is_text else allocate((len(records), *leaf.shape), storage_dtype(leaf)))
    targets = [
        (number, None if isinstance(column, list) else column.reshape(-1).view(np.uint8).data)
        for number, column in enumerate(columns)
        if isinstance(column, list) or column.nbytes
    ]
    for row, (record, span) in enumerate(zip(records, spans, strict=True)):
        check(row)
        for number, rows in targets:
            start, nbytes = span[number]
            if rows is None:
                columns[number].append(text_value(leaves[number].kind, bytes(record[start : start + nbytes])))
            else:
                rows[row * nbytes : (row + 1) * nbytes] = record[start : start + nbytes]
    batch = (
        column if isinstance(column, list) else make.batch_tensor(leaf, column)
        for leaf, column in zip(leaves, columns, strict=True)
    )
    return build_batch(first.spec.node, batch)
