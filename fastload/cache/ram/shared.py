"""SharedMemoryCache: decodes each sample once, into one segment of anonymous memory that all processes share.

The parent makes it; the parent and its workers of every start method use it, because the cache pickles as a
handle. Where a process cannot reach it, as when it loads a checkpoint, the handle becomes an empty cache.
Other ranks and jobs of the same user find a cache that has a fingerprint: it is listed in the `registry`. In
the segment (see `arena`):

    table        an entry for each sample: an odd number 2 * row + 1 = a uniform row, else as in all arenas
    columns      uniform samples (see `columns`), if all of them fit; row = index. If not, all are records, so
                 that any subset can be stored: small rows of a random subset would touch nearly all pages
    records      all others

Rules:

1. Nothing is evicted: with a new permutation in each epoch, no policy beats a fixed subset.
2. The memory is freed when the last process that holds the segment ends, however it ends.
3. Rows of columns need no lock, because all writers of a row write the same bytes. Space for records is
   claimed. A process that does not get the lock returns the sample uncached.
4. There is one cache per name: a process that finds none looks again under the creation lock before making
   one.
5. A cache of another process is checked before use: it must belong to this user, be sealed, have the right
   magic and version, and be made of the same parts. The same key with different parts is an error.
6. An unreachable cache is not an error: this process makes its own cache, and one log line says so.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fastload.cache.columns import Column, ColumnTable, plan_columns
from fastload.cache.fingerprint import Fingerprint
from fastload.cache.ram import registry
from fastload.cache.ram.arena import (
    Arena,
    budget_bytes,
    claimed_bytes,
    fixed_bytes,
    reserve_bytes,
    table_end,
)
from fastload.cache.records import ALIGNMENT_BYTES, decode, record_parts
from fastload.cache.sample_cache import SampleCache
from fastload.cache.samples import stack_records
from fastload.errors import CacheMismatchError, SharedMemoryError
from fastload.memory.segment import Segment, is_for_child, is_for_other_machines, round_up
from fastload.nested.leaf import dtype_name, numpy_dtype
from fastload.nested.spec import Spec, flatten
from fastload.system.humanize import readable_size
from fastload.system.logs import log

if TYPE_CHECKING:
    import mmap
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from fastload.cache.columns import Allocate
    from fastload.cache.ram.registry import Entry

_KEY_BYTES = 16
# Of records as large as the largest example: if samples are larger on average, some are not cached.
_SPAN_MULTIPLE, _MIN_SPAN_BYTES = 8, 256 << 20


class SharedMemoryCache(SampleCache):
    """A cache of samples in shared memory.

    Args:
        num_samples: Number of samples of the dataset.
        examples: A few samples that are typical of the dataset, or none; they are not stored.
        max_memory: The limit, as in `parse_memory`; of a private cache, of this rank's share. While the cache
            grows, it leaves 30% of what is free now with `"auto"`, and a twentieth with another limit.
        fingerprint: Of the samples, if other processes should find the cache.

    Attributes:
        layout: `"uniform"` (columns, and records of samples that do not match) or `"ragged"` (records).
        pid: The process that made it.
        created_s: When it was made, in seconds since 1970.
        fingerprint: As given.

    Raises:
        SharedMemoryError: The memory, or the lock that ragged samples need, is not available.
        UnsupportedSampleError: A value in an example cannot be cached.
        ValueError: `parse_memory` does not accept `max_memory`.
    """

    place = "shared memory"
    max_bytes: int

    def __init__(
        self,
        num_samples: int,
        examples: Sequence[Any] = (),
        *,
        max_memory: str | float = "auto",
        fingerprint: Fingerprint | None = None,
    ) -> None:
        limits = budget_bytes(max_memory, is_shared=fingerprint is not None), reserve_bytes(max_memory)
        flat = [flatten(example) for example in examples]
        layout: dict[str, Any] = {"levels": [num_samples], "spec": None, "columns": []}
        if len({spec.node for spec, _ in flat}) == 1:
            spec, values = flat[0][0], [values for _, values in flat]
            planned, end = plan_columns(spec, values, table_end(num_samples), num_samples)
            layout["columns"] = [(dtype_name(dtype), shape, at) for _, dtype, shape, at in planned]
            layout |= {"spec": spec.text.decode("ascii"), "records_at": round_up(end, ALIGNMENT_BYTES)}
        sizes = [claimed_bytes(record_parts(*each, None)[1]) for each in flat]
        # A few examples say little of a small dataset.
        span_bytes = max(_MIN_SPAN_BYTES, _SPAN_MULTIPLE * num_samples * max(sizes)) if sizes else limits[0]
        self._hold(_create({**layout, "span_bytes": span_bytes}, fingerprint, *limits))

    @classmethod
    def of(cls, arena: Arena) -> SharedMemoryCache:
        """The cache in an arena, which it owns from here on."""
        cache = cls.__new__(cls)
        cache._hold(arena)
        return cache

    def _hold(self, arena: Arena) -> None:
        fields = arena.fields
        self._arena = arena
        self._columns: ColumnTable | None = None
        self.num_samples, self.pid, self.created_s = arena.num_entries, arena.pid, arena.created_s
        self.max_bytes = arena.max_bytes
        self.fingerprint = None if fields["fingerprint"] is None else Fingerprint(**fields["fingerprint"])
        self.layout = "uniform" if fields["columns"] else "ragged"
        self.reason = "private to this process and its workers"
        if fields["columns"] and not arena.is_full:
            self._spec = spec = Spec.parse(fields["spec"].encode("ascii"))
            self._places = [
                Column(leaf, numpy_dtype(dtype), tuple(shape), at)
                for leaf, (dtype, shape, at) in zip(spec.leaves, fields["columns"], strict=True)
            ]
            arena.segment.collapse_into(cast("mmap.mmap", arena.memory.obj))
            self._row_bytes = [column.row_bytes for column in self._places]
            self._columns = ColumnTable(spec, tuple(self._places), self.num_samples, arena.memory)

    def __reduce__(self) -> tuple[Any, ...]:
        arena, fingerprint = self._arena, self.fingerprint
        if is_for_child():
            return SharedMemoryCache.of, (arena,)
        # A checkpoint outlives this process, so its cache must not depend on this process.
        if fingerprint is None and is_for_other_machines():
            # One cache for all workers of a machine. Later processes get their own: their data may differ.
            fingerprint = Fingerprint({}, f"for the cache {arena.fields['id']}")
        entry = registry.entry_of("", arena.segment.fd) if arena.segment.fd >= 0 else None
        return _unpickle_anywhere, (entry, arena.fields, fingerprint)

    @property
    def parts(self) -> dict[str, str] | None:
        """Of the fingerprint, with the key."""
        return None if self.fingerprint is None else self.fingerprint.parts_in_file

    @property
    def nbytes(self) -> int:
        """Memory in use now, by all processes together."""
        return self._arena.nbytes

    @property
    def num_cached(self) -> int:
        """How many samples are stored now."""
        return int(np.count_nonzero(self._arena.table))

    def __contains__(self, index: object) -> bool:
        """Whether the sample of this index is stored."""
        is_index = isinstance(index, (int, np.integer)) and 0 <= index < self.num_samples
        return bool(is_index and self._arena.entries[index])

    def missing(self) -> npt.NDArray[np.intp]:
        """Indices of the samples that are not stored, ascending; none once there is no room."""
        arena = self._arena
        is_over = arena.is_full or arena.is_short
        return np.empty(0, np.intp) if is_over else np.flatnonzero(arena.table == 0)

    def get(self, index: int) -> Any | None:
        """The sample at `0 <= index < num_samples`, or None if it is not cached.

        Arrays are read-only views of the shared memory and keep it mapped, also after close(); tensors are
        private copies.
        """
        entry: int = self._arena.entries[index]
        if entry & 1:
            columns = self._columns  # read once: another thread can close the cache
            return None if columns is None else columns.sample(entry >> 1)
        record = self._arena.find(_key(index)) if entry else None
        return None if record is None else decode(record)

    def gather(self, indices: npt.NDArray[np.intp], allocate: Allocate) -> Any | None:
        """The batch, column by column or of records; None if the samples differ, or torch must collate."""
        columns = self._columns
        if columns is not None:
            entries = self._arena.table.take(indices)
            if (entries & 1).all():
                # The rows come from the entries also where row = index: only an address that depends on the
                # entry is read after it (see `memory.memory_model`).
                return columns.gather(entries >> 1, allocate)
        records = [self._arena.find(_key(index)) for index in indices.tolist()]
        return stack_records(records, allocate) if all(records) else None

    def put(self, index: int, sample: Any) -> bool:
        """Store a sample; False if it does not fit, or another process holds the lock.

        Raises:
            UnsupportedSampleError: A value in the sample cannot be cached.
        """
        arena = self._arena
        if arena.is_full or arena.entries[index]:
            return not arena.is_full
        spec, values = flatten(sample)
        with arena.growing():
            if self._columns is not None and spec == self._spec:
                packed = [column.pack(value) for column, value in zip(self._places, values, strict=True)]
                if all(part is not None for part in packed):
                    if not arena.can_grow(sum(self._row_bytes), self._warn_stopped):
                        return False
                    for column, part, nbytes in zip(self._places, packed, self._row_bytes, strict=True):
                        arena.write([part], column.offset + index * nbytes)
                    arena.publish(index, 2 * index + 1)
                    return True
            parts, nbytes = record_parts(spec, values, None)
            if arena.allows(nbytes):
                return arena.can_grow(nbytes, self._warn_stopped) and arena.put(_key(index), parts)
            if not arena.is_short:  # without a lock: at worst, two processes say it
                arena.set_short()
                self._warn(f"max_memory={readable_size(self.max_bytes)} has no room for more")
        return False

    def _warn_stopped(self, free_bytes: int) -> None:
        free = f"{readable_size(free_bytes)} are free, which it leaves to others"
        self._warn(f"it stores more only when memory becomes free: {free}")

    def _warn(self, why: str) -> None:
        log.warning(
            "cache: it holds %s of %s samples in %s, and %s. The others are read again on every access. "
            "Increase max_memory=, or shrink the samples in pre_transform=",
            f"{self.num_cached:,}",
            f"{self.num_samples:,}",
            readable_size(self.nbytes),
            why,
        )

    def close(self) -> None:
        """Release the segment; samples that were handed out stay valid, and all later reads are misses."""
        self._arena.close()
        self._columns = None


def _key(index: int) -> bytes:
    return index.to_bytes(_KEY_BYTES, "little")


def _create(
    fields: dict[str, Any], fingerprint: Fingerprint | None, max_bytes: int, reserved_bytes: int
) -> Arena:
    """A new segment, with columns if all samples fit.

    Args:
        fields: The number of samples as `levels`; the `spec` of uniform samples as JSON, and their
            `columns`: dtype, shape and offset of each; `records_at` behind them; `span_bytes`, the most
            address space for records, which limits of a process count although most of it takes no memory.
        fingerprint: Of the samples; None for a private cache.
        max_bytes: The limit.
        reserved_bytes: As of `Arena.create`.

    Raises:
        SharedMemoryError: The system denied it, or the lock under which space is claimed.
    """
    name, about = ("", None) if fingerprint is None else (fingerprint.name, asdict(fingerprint))
    fields = {**fields, "kind": "samples", "name": name, "fingerprint": about, "entry_bytes": 0}
    columns_at = table_end(sum(fields["levels"]))
    if not fields["columns"] or fixed_bytes(fields) + fields["records_at"] - columns_at > max_bytes:
        fields |= {"spec": None, "columns": [], "records_at": columns_at}
    room_bytes = max_bytes - fixed_bytes(fields) - (fields["records_at"] - columns_at)
    fields["room_bytes"] = max(0, min(room_bytes, fields["span_bytes"]))
    return Arena.create(fields, max_bytes, reserved_bytes)


# --- pickles ----------------------------------------------------------------------------------------------


def _unpickle_anywhere(
    entry: Entry | None, fields: dict[str, Any], fingerprint: Fingerprint | None
) -> SharedMemoryCache:
    """The same cache if this process can reach it, else an empty one; a closed one without shared memory.

    Args:
        entry: The cache in the process that pickled it; None if it was closed.
        fields: Its description.
        fingerprint: Under which other processes find the empty cache; None if it is private.
    """
    if entry is not None:
        with contextlib.suppress(SharedMemoryError, CacheMismatchError):
            cache = SharedMemoryCache.of(Arena.attach(entry.attach()))
            if cache._arena.fields["id"] == fields["id"]:
                return cache
            cache.close()
    try:
        with registry.creating() if fingerprint is not None else contextlib.nullcontext() as is_alone:
            if fingerprint and is_alone and (found := find(fingerprint, sum(fields["levels"]))) is not None:
                return found
            max_bytes = min(fields["max_bytes"], budget_bytes("auto", is_shared=fingerprint is not None))
            arena = _create(fields, fingerprint, max_bytes, reserve_bytes("auto"))
            registry.hold(arena)
            cache = SharedMemoryCache.of(arena)
        cache.reason = "new and empty, because the process that pickled it cannot be reached from here"
        log.info("cache: %s", cache.reason)
    except CacheMismatchError as error:
        log.warning("cache: not shared with other processes: %s", str(error))
        return _unpickle_anywhere(None, fields, None)
    except SharedMemoryError as error:
        log.warning(
            "cache: none, because shared memory is not available: %s. Every access reads the dataset",
            str(error),
        )
        cache = SharedMemoryCache.of(Arena(Segment(-1, 0), fields))
        cache.reason = f"not available: {error}"
    return cache


# --- sharing by fingerprint -------------------------------------------------------------------------------


def find(fingerprint: Fingerprint, num_samples: int) -> SharedMemoryCache | None:
    """The cache of this name that a live process holds, or None.

    Raises:
        CacheMismatchError: It was made from other samples.
    """
    for entry, arena in registry.arenas(fingerprint.name):
        cache = SharedMemoryCache.of(arena)
        differences = fingerprint.differences(cache.fingerprint or fingerprint)
        if not differences and cache.num_samples != num_samples:
            differences = [f"the number of samples is {num_samples} here and {cache.num_samples} there"]
        if differences:
            cache.close()
            raise CacheMismatchError(
                f"the shared cache with key {fingerprint.key!r}, held by process {entry.pid}, was made from "
                f"other samples: {'; '.join(differences)} (here: the dataset, there: the cache)"
            )
        age_s = max(0.0, time.time() - arena.created_s)
        cache.reason = f"found, made by process {arena.pid} {age_s:,.0f} s ago from the same parts"
        if entry.pid != arena.pid:
            cache.reason += f"; process {entry.pid} holds it now"
        registry.hold(arena)
        return cache
    return None


def create(
    fingerprint: Fingerprint, num_samples: int, examples: Mapping[int, Any], max_memory: str | float
) -> SharedMemoryCache | None:
    """The cache of this name: a new one, or one that another process has just made; None without a registry.

    The arguments are those of `SharedMemoryCache`, but the examples come with their indices, and are stored:
    whoever finds the cache compares its own with them.

    Raises:
        CacheMismatchError: Another process has made one from other samples.
        SharedMemoryError: The memory could not be allocated.
    """
    with registry.creating() as is_alone:
        if not is_alone or (cache := find(fingerprint, num_samples)) is not None:
            return cache if is_alone else None
        typical = [*examples.values()]
        cache = SharedMemoryCache(num_samples, typical, max_memory=max_memory, fingerprint=fingerprint)
        for index, sample in examples.items():
            cache.put(index, sample)
        if not registry.hold(cache._arena):
            cache.close()
            return None
        cache.reason = "made now, because no running process had it"
        return cache
