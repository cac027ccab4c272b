"""StoredSamples: samples by index as the records of a store, and batches without a copy of each record."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.cache.columns import INT64_BYTES
from fastload.cache.records import PREFIX_AT, checksum_of, decode, is_intact, outline, record_parts, seed_of
from fastload.cache.sample_cache import SampleCache
from fastload.cache.store import INDEX_BYTES, index_key
from fastload.errors import CacheCorruptError, CacheError
from fastload.nested.leaf import TEXT_KINDS, storage_dtype
from fastload.nested.leaves import tensor_functions, text_value
from fastload.nested.spec import build_batch, flatten

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from fastload.cache.columns import Allocate
    from fastload.cache.store import Store

_INDEX, _KEY = np.dtype(f">u{INDEX_BYTES}"), np.dtype(f"V{INDEX_BYTES}")
_LARGE_BYTES = 16 << 10  # of a part of a sample, from which on it is copied into the batch at once
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
    def nbytes(self) -> int:
        """Bytes in use now."""
        return int(self.store.nbytes)

    @property
    def num_cached(self) -> int:
        """How many samples are stored now."""
        return self.num_samples - len(self.missing())

    def missing(self) -> npt.NDArray[np.intp]:
        """Indices of the samples that are not stored, ascending."""
        keys = np.arange(self.num_samples, dtype=_INDEX).view(np.uint8).reshape(-1, INDEX_BYTES)
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
        salt = self._salt
        seeds = [] if salt is None else (indices.astype(np.uint64) ^ np.uint64(seed_of(salt))).tolist()

        def stacked(records: list[Any]) -> Any | None:
            if all(records):
                with contextlib.suppress(CacheCorruptError):
                    return stack_records(records, allocate, seeds)
            for record, number in zip(records, indices.tolist(), strict=True):
                self._checked(record, number)  # raises for the one that is damaged
            return None

        return self.store.lend(indices.astype(_INDEX).view(_KEY).tolist(), stacked)

    def close(self) -> None:
        """Release this process's resources; samples that were handed out stay valid."""
        self.store.close()


# --- a batch of records -----------------------------------------------------------------------------------


def stack_records(records: Sequence[Any], allocate: Allocate, seeds: Sequence[int] = ()) -> Any | None:
    """The batch that default_collate would make of the samples in these records.

    Args:
        records: Not empty.
        allocate: Returns a writable C-contiguous array of a shape and dtype, for a part of the batch.
        seeds: Of their checksums; none if they have no checksums.

    Returns:
        None if the samples differ in structure, or default_collate would not make tensors or lists of them.

    Raises:
        CacheCorruptError: One of them is damaged.
    """
    num_rows, total = len(records), len(records[0])
    # Before its shape claims memory.
    if seeds and checksum_of(records[0], seeds[0]) != records[0][:PREFIX_AT]:
        raise CacheCorruptError("a checksum is wrong")
    first, make = outline(records[0]), tensor_functions()
    leaves = list(enumerate(first.spec.leaves))
    if not all(make.collates(leaf) and len(leaf.shape) < _MAX_DIMENSIONS for _, leaf in leaves):
        return None
    copied = [number for number, leaf in leaves if leaf.kind not in TEXT_KINDS]
    large = [number for number in copied if first.spans[number][1] >= _LARGE_BYTES]
    outlines, rest = [first], None
    if {*map(len, records)} == {total}:
        rest = _without(records, [first.spans[number] for number in large])
        if (rest[:, PREFIX_AT:][:, : len(first.prefix)] != np.frombuffer(first.prefix, np.uint8)).any():
            rest = None
    if rest is None:  # such as texts of different lengths
        outlines, large = list(map(outline, records)), copied
    ints = [number for number, leaf in leaves if leaf.kind == "int"]
    for spec, _, spans in outlines:
        if spec != first.spec or any(spans[number][1] != INT64_BYTES for number in ints):
            return None
    outlines *= num_rows // len(outlines)
    columns: list[Any] = [
        allocate((num_rows, *leaf.shape), storage_dtype(leaf)) if number in copied else None
        for number, leaf in leaves
    ]
    rows = [(number, columns[number].reshape(-1).view(np.uint8).data) for number in large]
    checksums = [] if rows else list(map(checksum_of, records, seeds))
    for row, record in enumerate(records if rows else ()):
        for number, memory in rows:
            start, nbytes = outlines[row].spans[number]
            memory[row * nbytes : (row + 1) * nbytes] = record[start : start + nbytes]
        if seeds:
            checksums.append(checksum_of(record, seeds[row]))  # of what is in the processor's cache now
    stored = [record[:PREFIX_AT] for record in records] if rest is None else [rest[:, :PREFIX_AT].tobytes()]
    if seeds and b"".join(checksums) != b"".join(stored):
        raise CacheCorruptError("a checksum is wrong")
    batch, cut = [], 0
    for number, leaf in leaves:
        start, nbytes = first.spans[number]
        if number not in copied:
            parts = (each.spans[number] for each in outlines)
            texts = (bytes(record[at : at + size]) for record, (at, size) in zip(records, parts, strict=True))
            batch.append([text_value(leaf.kind, text) for text in texts])
            continue
        if number in large:
            cut += nbytes
        elif rest is not None and nbytes:
            columns[number].reshape(num_rows, -1).view(np.uint8)[:] = rest[:, start - cut :][:, :nbytes]
        batch.append(make.batch_tensor(leaf, columns[number]))
    return build_batch(first.spec.node, iter(batch))


def _without(records: Sequence[memoryview], spans: list[tuple[int, int]]) -> npt.NDArray[np.uint8]:
    """The bytes outside of some spans of records of one length, `(len(records), nbytes)`."""
    ends = (start + nbytes for start, nbytes in spans)
    kept = list(map(slice, (0, *ends), (*(start for start, _ in spans), None)))
    parts = [record[part] for record in records for part in kept] if spans else records
    return np.frombuffer(b"".join(parts), np.uint8).reshape(len(records), -1)
