"""LMDBCache: reads finished caches on disk through the page cache.

See `format` for the layout of a file. Rules:

1. A cache pickles as its path and the id of its build; a process opens the file on first use. A closed cache
   stays closed in child processes; loaded from a checkpoint, it is open.
2. get() copies a value before it reads it; samples are views of that copy.
3. gather() verifies the records of the batch, and then copies only the needed bytes from the page cache
   directly to the rows of the batch. The records are valid only while it holds the files. It requests the
   memory of the batch only if all records make one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.cache.columns import INT64_BYTES
from fastload.cache.lmdb.files import damaged, open_file
from fastload.cache.lmdb.format import CURE
from fastload.cache.progress import BuildProgress
from fastload.cache.records import PREFIX_AT, decode, outline
from fastload.cache.sample_cache import SampleCache
from fastload.errors import CacheCorruptError, CacheError, CacheMismatchError
from fastload.memory.segment import is_for_child
from fastload.nested.leaf import TEXT_KINDS, Leaf, storage_dtype
from fastload.nested.leaves import tensor_functions, text_value
from fastload.nested.spec import Spec, build_batch
from fastload.system.checks import as_path
from fastload.system.humanize import readable_size
from fastload.system.paths import cache_path

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import numpy.typing as npt

    from fastload.cache.columns import Allocate
    from fastload.cache.lmdb.description import Plan
    from fastload.cache.lmdb.files import OpenFile

_MAX_DIMENSIONS = 64  # of an array; a batch has one more than its samples


class LMDBCache(SampleCache):
    """A finished cache in an LMDB file, read-only.

    Args:
        path: The file.

    Attributes:
        path: The absolute path.
        reason: Why this cache is in use.

    Raises:
        FileNotFoundError: There is no such file.
        CacheMismatchError: It is not a cache of this format.
        CacheCorruptError: It is damaged.
        ValueError: `path` is a URL.
    """

    layout = "lmdb"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._is_closed = False
        self._spec: Spec | None = None  # of an unpickled cache that is not open yet
        self.path = cache_path(as_path("path", path))
        self._file: OpenFile | None = open_file(self.path)
        self.reason = "opened by its path"
        self._plan: Plan | None = self._file.plan
        self._build_id, self.num_samples = self._plan.build_id, self._plan.num_samples

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "_file": None,
            "_plan": None,
            "_is_closed": self._is_closed and is_for_child(),
            "_spec": self._spec_to_pickle(),
            "reason": "opened by its path",
        }

    def _spec_to_pickle(self) -> Spec | None:
        """The structure of sample 0; it takes the classes of its namedtuples along to another process.

        None if it is unknown, or if this process has not imported those classes.
        """
        if self._plan is None:
            return self._spec
        if self._plan.spec is None:
            return None
        spec = Spec.parse(self._plan.spec.encode("ascii"))
        try:
            spec.__reduce__()
        except CacheError:
            return None
        return spec

    @property
    def is_closed(self) -> bool:
        """Whether close() was called; a closed cache returns no samples."""
        return self._is_closed

    # --- properties ---------------------------------------------------------------------------------------

    @property
    def description(self) -> Plan:
        """What the file says about the cache, such as the classes."""
        if self._plan is None:
            self._plan = self._opened().plan
        return self._plan

    @property
    def num_cached(self) -> int:
        """Number of stored samples: all except those that could not be read."""
        return self._opened().num_stored

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self._opened().nbytes

    @property
    def stored_indices(self) -> npt.NDArray[np.intp] | None:
        """Indices of the stored samples, ascending; None if all samples are stored."""
        if self.num_cached == self.num_samples:
            return None
        return self._opened().stored_indices

    def explain(self) -> str:
        """Why this cache is in use, and the parts of its fingerprint."""
        parts = "".join(f"\n  {name}: {value}" for name, value in (self.description.parts or {}).items())
        size = readable_size(self.nbytes)
        content = f"{self.num_cached:,} of {self.num_samples:,} samples, {size}"
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.description.created_s))
        return f"LMDB at {self.path}, {content}, made {made}: {self.reason}{parts}"

    # --- reading ------------------------------------------------------------------------------------------

    def _opened(self) -> OpenFile:
        file = self._file
        if file is None:
            file = open_file(self.path)
            if file.plan.build_id != self._build_id:
                raise CacheMismatchError(f"{self.path} was replaced by a different cache while it was in use")
            if not self._is_closed:
                self._file = file
        return file

    def __contains__(self, index: object) -> bool:
        """Whether the sample of this index is stored."""
        if self._is_closed or not isinstance(index, (int, np.integer)) or not 0 <= index < self.num_samples:
            return False
        return self._opened().holds(int(index))

    def is_left_out(self, index: int) -> bool:
        """Whether the sample at `0 <= index < num_samples` could not be read when the cache was built."""
        return not self._is_closed and not self._opened().holds(index)

    def get(self, index: int) -> Any | None:
        """The sample at `0 <= index < num_samples`; None if it was left out, and after close().

        Arrays are read-only views of a private copy of the record; tensors are private copies.

        Raises:
            CacheCorruptError: The record is damaged or missing.
        """
        if self._is_closed:
            return None
        file = self._opened()
        record = file.record(index)
        if record is None:
            return None
        try:
            return decode(record)
        except CacheCorruptError as error:
            raise damaged(file.path, index, error) from error

    def gather(self, indices: npt.NDArray[np.intp], allocate: Allocate) -> Any | None:
        """The batch, read in the order of keys.

        Raises:
            CacheCorruptError: A record is damaged or missing.
        """
        if self._is_closed:
            return None
        order = np.argsort(indices, kind="stable")
        ascending = indices[order]
        in_file = self._opened().records(ascending)
        if in_file is None:
            return None
        records: list[Any] = [None] * len(indices)
        for position, record in zip(order.tolist(), in_file, strict=True):
            records[position] = record
        try:
            return stack_records(records, allocate)
        except CacheCorruptError as error:
            raise CacheCorruptError(f"{self.path}: {error}: {CURE}") from error

    def verify(self, *, progress: bool = False) -> list[int]:
        """Compare every record with its checksum; the index was checked when the file was opened.

        Args:
            progress: Draw a bar, if standard error is a terminal.

        Returns:
            Indices of the samples that are damaged or missing, ascending.
        """
        bad = []
        with BuildProgress(f"verifying {self.path}", self.num_samples, shown=progress) as shown:
            file = self._opened()
            shown.advance(0, self.num_samples - file.num_stored)
            for index in file.stored_indices.tolist():
                nbytes = 0
                try:
                    nbytes = len(file.record(index, verify=True) or b"")
                except CacheCorruptError:
                    bad.append(index)
                shown.advance(nbytes)
        return bad

    def close(self) -> None:
        """Release this object's file; samples that were handed out stay valid."""
        self._file = None
        self._is_closed = True


# --- a batch of records -----------------------------------------------------------------------------------


def stack_records(records: Sequence[memoryview], allocate: Allocate) -> Any | None:
    """The batch that default_collate would make of the samples in these records.

    Args:
        records: Verified; not empty.
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
