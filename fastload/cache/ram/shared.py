"""SharedMemoryCache: decodes each sample once, into one segment of anonymous memory that all processes share.

The parent makes it; the parent and its workers of every start method use it, because the cache pickles as a
handle. Where a process cannot reach it, as when it loads a checkpoint, the handle becomes an empty cache.
Other ranks and jobs of the same user find a cache that has a fingerprint: it is listed in the `registry`. The
segment is sparse, so memory is allocated as samples are stored, and sealed, so its size never changes. Its
`layout` is that of samples by index; `arena` claims the space in it. Rules:

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
import logging
import struct
import time
import weakref
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fastload.cache.columns import ColumnReader
from fastload.cache.fingerprint import Fingerprint
from fastload.cache.ram import registry
from fastload.cache.ram.arena import Arena, budget_bytes, claimed_bytes, reserve_bytes
from fastload.cache.ram.layout import Layout, Origin, make_segment
from fastload.cache.records import decode, record_parts
from fastload.cache.sample_cache import SampleCache
from fastload.errors import CacheMismatchError, SharedMemoryError
from fastload.memory.segment import Segment, is_for_child, is_for_other_machines
from fastload.nested.spec import flatten
from fastload.system.budget import parse_memory
from fastload.system.humanize import readable_size
from fastload.system.logs import log, say_once
from fastload.system.ranks import count_ranks_of_host

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from fastload.cache.columns import Allocate
    from fastload.cache.ram.registry import Entry
    from fastload.nested.spec import Spec

_KEY = struct.Struct("<8sQ")  # of a record: magic, index
_MAGIC = b"FLragged"


class SharedMemoryCache(SampleCache):
    """A cache of samples in shared memory.

    Args:
        num_samples: Number of samples of the dataset.
        examples: A few samples that are typical of the dataset, or none; they are not stored.
        max_memory: The limit, as in `parse_memory`.
        fingerprint: Of the samples, if other processes should find the cache.
        reserved_bytes: Memory of the machine that the cache leaves free while it grows; None for 30% of
            what is free now with `"auto"`, and a twentieth with a limit of the user's.

    Attributes:
        layout: `"uniform"` (columns, and records of samples that do not match) or `"ragged"` (records).
        capacity: How many samples fit; None if their sizes differ.
        origin: Which process made it, when, and from which samples.

    Raises:
        SharedMemoryError: The memory, or the lock that ragged samples need, is not available.
        UnsupportedSampleError: A value in an example cannot be cached.
        ValueError: `parse_memory` does not accept `max_memory`.
    """

    max_bytes: int
    capacity: int | None
    _arena: Arena
    _plan: Layout
    _columns: ColumnReader | None

    def __init__(
        self,
        num_samples: int,
        examples: Sequence[Any] = (),
        *,
        max_memory: str | float = "auto",
        fingerprint: Fingerprint | None = None,
        reserved_bytes: int | None = None,
    ) -> None:
        max_bytes = parse_memory(max_memory)
        self._hold(*make_segment(num_samples, max_bytes, examples, Origin.new(fingerprint)))
        self._arena.leave_free(reserve_bytes(max_memory) if reserved_bytes is None else reserved_bytes)

    @classmethod
    def attach(cls, segment: Segment) -> SharedMemoryCache:
        """The cache in a segment; the cache owns the segment from here on, and closes it if this fails.

        Raises:
            CacheMismatchError: The segment is not a cache of this format version, or its size could change.
        """
        return _unpickle(segment, _layout_of(segment))

    def _hold(self, segment: Segment, plan: Layout, mapping: mmap.mmap | None = None) -> None:
        arena = Arena(segment, plan.num_samples, plan.ragged_at, plan.limits, mapping)
        self._arena, self._plan, self._columns = arena, plan, None
        self.num_samples, self.max_bytes, self.origin = plan.num_samples, plan.max_bytes, plan.origin
        self.layout, self.capacity = "uniform" if plan.columns else "ragged", plan.capacity
        if plan.spec is not None and plan.columns and not arena.is_full:
            segment.collapse_into(cast("mmap.mmap", arena.memory.obj))
            self._columns = ColumnReader(plan.spec, plan.columns, plan.num_samples, arena.memory)
        self.reason = "private to this process and its workers"
        self.unregister: Callable[[], object] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if is_for_child():
            return _unpickle, (self._arena.segment, self._plan)
        # A checkpoint outlives this process, so its cache must not depend on this process.
        fingerprint = self.origin.fingerprint
        if fingerprint is None and is_for_other_machines():
            # One cache for all workers of a machine. Later processes get their own: their data may differ.
            fingerprint = Fingerprint({}, f"for the cache {self.origin.cache_id}")
        entry = registry.entry_of("", self._fd) if self._fd >= 0 else None
        return _unpickle_anywhere, (entry, self._plan, fingerprint)

    # --- properties ---------------------------------------------------------------------------------------

    @property
    def _fd(self) -> int:
        """A descriptor of the cache in this process; -1 once closed."""
        return self._arena.segment.fd

    @property
    def num_cached(self) -> int:
        """How many samples are stored now."""
        return int(np.count_nonzero(self._arena.table))

    @property
    def nbytes(self) -> int:
        """Memory in use now, by all processes together."""
        return self._arena.nbytes

    def explain(self) -> str:
        """Why this cache is in use, and the parts of its fingerprint."""
        fingerprint = self.origin.fingerprint
        parts = {} if fingerprint is None else dict(fingerprint.parts)
        if fingerprint is not None and fingerprint.key is not None:
            parts = {"cache_key": fingerprint.key, **parts}
        lines = "".join(f"\n  {name}: {value}" for name, value in parts.items())
        num_cached = self.num_cached
        so_far = " so far" if num_cached < self.num_samples and not self._arena.is_full else ""
        size = f"{num_cached:,} of {self.num_samples:,} samples{so_far}, {readable_size(self.nbytes)}"
        return f"shared memory, {size}: {self.reason}{lines}"

    def missing(self) -> npt.NDArray[np.intp]:
        """Indices of missing samples that fit, ascending; the first ones if not all fit."""
        arena, plan = self._arena, self._plan
        if arena.is_full:
            return np.empty(0, np.intp)
        empty = np.flatnonzero(arena.table == 0)
        if not plan.record_bytes:
            return empty
        return empty[: max(0, plan.room_bytes - arena.cursor.used_bytes) // plan.record_bytes]

    def expect_short(self) -> None:
        """Keep all processes from warning that the cache cannot hold all samples."""
        self._arena.expect_short()

    # --- reading ------------------------------------------------------------------------------------------

    def __contains__(self, index: object) -> bool:
        if not isinstance(index, (int, np.integer)) or not 0 <= index < self.num_samples:
            return False
        return bool(self._arena.entries[int(index)])

    def get(self, index: int) -> Any | None:
        """The sample at `0 <= index < num_samples`, or None if it is not cached.

        Arrays are read-only views of the shared memory and keep it mapped, also after close(); tensors are
        private copies.
        """
        arena = self._arena  # read once, as are the columns: another thread can close the cache
        entry: int = arena.entries[index]
        if entry & 1:
            columns = self._columns
            return None if columns is None else columns.sample(entry >> 1)
        record = arena.record(entry, _KEY.pack(_MAGIC, index)) if entry else None
        return None if record is None else decode(record)

    def gather(self, indices: npt.NDArray[np.intp], allocate: Allocate) -> Any | None:
        """The batch, column by column; None if a sample is not a uniform row, or torch must collate."""
        columns = self._columns
        if columns is None:
            return None
        entries = self._arena.table.take(indices)
        if not (entries & 1).all():
            return None
        # The rows come from the entries also where row = index: only an address that depends on the entry is
        # read after it (see `memory.memory_model`).
        return columns.gather(entries >> 1, allocate)

    # --- writing ------------------------------------------------------------------------------------------

    def put(self, index: int, sample: Any) -> bool:
        """Store a sample; False if it does not fit, or another process holds the lock.

        Raises:
            UnsupportedSampleError: A value in the sample cannot be cached.
        """
        spec, values = flatten(sample)
        arena = self._arena
        if arena.is_full:
            return False
        try:
            return bool(arena.entries[index]) or self._store(arena, index, spec, values)
        except (OSError, MemoryError) as error:  # a cache that cannot grow is slower, but not an error
            arena.is_full = True
            log.warning(
                "the cache stops growing at %s of %s, the rest is read from the dataset: %s",
                readable_size(self.nbytes),
                readable_size(self.max_bytes),
                str(error),  # the error itself would keep this frame alive in a log handler
            )
            return False

    def _store(self, arena: Arena, index: int, spec: Spec, values: list[Any]) -> bool:
        plan = self._plan
        if plan.columns and spec == plan.spec:
            packed = [column.pack(value) for column, value in zip(plan.columns, values, strict=True)]
            if all(part is not None for part in packed):
                if not arena.can_grow(plan.row_bytes, self._warn_stopped):
                    return False
                for column, part in zip(plan.columns, packed, strict=True):
                    arena.write([part], column.offset + index * column.row_bytes)
                arena.publish(index, 2 * index + 1)
                return True
        parts, nbytes = record_parts(spec, values, None)
        if not arena.can_grow(claimed_bytes(nbytes), self._warn_stopped):
            return False
        if arena.cursor.is_short and not arena.allows(plan.after(arena.cursor, nbytes)):
            return False  # usually `max_memory` is too small, and a warning has said so
        with arena.locked() as cursor:
            if cursor is None or arena.entries[index]:
                return cursor is not None
            after = plan.after(cursor, nbytes)
            is_allowed = arena.allows(after)
            arena.move(after if is_allowed else cursor._replace(is_short=1))
        if is_allowed:
            arena.publish(index, arena.append(cursor, _KEY.pack(_MAGIC, index), parts, nbytes))
        elif not cursor.is_short:
            log_short(self.max_bytes, self.num_cached, self.num_samples)
        return is_allowed

    def _warn_stopped(self, free_bytes: int) -> None:
        log.warning(
            "cache: it holds %s of %s samples in %s, and stores more only when memory becomes free: %s are "
            "free, and it leaves them to the model, the workers and other caches. The other samples are read "
            "again on every access",
            f"{self.num_cached:,}",
            f"{self.num_samples:,}",
            readable_size(self.nbytes),
            readable_size(free_bytes),
        )

    def close(self) -> None:
        """Release the segment; samples that were handed out stay valid, and all later reads are misses."""
        if self.unregister is not None:
            self.unregister()
        self._arena.segment.close()
        self._arena = Arena(Segment(-1, 0), self.num_samples)
        self._columns = None


def log_short(max_bytes: int, num_fitting: int, num_samples: int, needed: str = "of several sizes") -> None:
    """Warn that the cache holds only some of the samples."""
    log.warning(
        "cache: max_memory=%s holds only %s of %s samples (%.0f%%), %s: the others are read again on "
        "every access. Increase max_memory=, or shrink the samples in pre_transform=",
        readable_size(max_bytes),
        f"{num_fitting:,}",
        f"{num_samples:,}",
        100 * num_fitting / num_samples,
        needed,
    )


def _layout_of(segment: Segment) -> Layout:
    try:
        return Layout.read(segment)
    except CacheMismatchError:
        segment.close()
        raise


def _unpickle(segment: Segment, layout: Layout, mapping: mmap.mmap | None = None) -> SharedMemoryCache:
    cache = SharedMemoryCache.__new__(SharedMemoryCache)
    cache._hold(segment, layout, mapping)
    return cache


def _unpickle_anywhere(
    entry: Entry | None, layout: Layout, fingerprint: Fingerprint | None
) -> SharedMemoryCache:
    """The same cache if this process can reach it, else an empty one; a closed one without shared memory.

    Args:
        entry: The cache in the process that pickled it; None if it was closed.
        layout: Of that cache.
        fingerprint: Under which other processes find the empty cache; None if it is private.
    """
    if entry is not None:
        with contextlib.suppress(SharedMemoryError, CacheMismatchError):
            cache = SharedMemoryCache.attach(entry.attach())
            if cache.origin.cache_id == layout.origin.cache_id:
                return cache
            cache.close()
    max_bytes = min(layout.max_bytes, budget_bytes("auto", is_shared=fingerprint is not None))
    try:
        if fingerprint is None:
            return _empty(layout, max_bytes, None)
        with registry.creating() as is_alone:
            if is_alone and (shared := find(fingerprint, layout.num_samples)) is not None:
                return shared
            cache = _empty(layout, max_bytes, fingerprint)
            _register(cache, fingerprint.name)
            return cache
    except CacheMismatchError as error:
        log.warning("cache: not shared with other processes: %s", str(error))
        return _unpickle_anywhere(None, layout, None)
    except SharedMemoryError as error:
        log.warning(
            "cache: none, because shared memory is not available: %s. Every access reads the dataset",
            str(error),
        )
        cache = _unpickle(Segment(-1, 0), layout)
        cache.reason = f"not available: {error}"
        return cache


def _empty(layout: Layout, max_bytes: int, fingerprint: Fingerprint | None) -> SharedMemoryCache:
    segment, _ = layout.on_machine(max_bytes, Origin.new(fingerprint)).create_segment()
    cache = SharedMemoryCache.attach(segment)
    cache._arena.leave_free(reserve_bytes("auto"))
    cache.reason = "new and empty, because the process that pickled it cannot be reached from here"
    log.info("cache: %s", cache.reason)
    return cache


# --- sharing by fingerprint -------------------------------------------------------------------------------


def find(fingerprint: Fingerprint, num_samples: int) -> SharedMemoryCache | None:
    """The cache of this name that a live process holds, or None.

    Raises:
        CacheMismatchError: It was made from other samples.
        SharedMemoryError: It would take most of the address space that is left.
    """
    name = fingerprint.name
    for entry in registry.entries(name):
        try:
            segment, layout = _reach(entry)
        except (SharedMemoryError, CacheMismatchError) as error:
            text = f"cache: process {entry.pid} holds {name}, but it cannot be shared: {error}"
            say_once(text, logging.WARNING if count_ranks_of_host() > 1 else logging.INFO)
            continue
        try:
            mapping = segment.map(writable=False, sparing=True)
        except SharedMemoryError:
            segment.close()
            raise
        cache = _unpickle(segment, layout, mapping)
        try:
            _check(cache, fingerprint, num_samples, entry.pid)
        except CacheMismatchError:
            cache.close()
            raise
        age_s = max(0.0, time.time() - cache.origin.created_s)
        maker = cache.origin.pid
        cache.reason = f"found, made by process {maker} {age_s:,.0f} s ago from the same parts"
        if entry.pid != maker:
            cache.reason += f"; process {entry.pid} holds it now"
        _register(cache, name)
        return cache
    return None


def create(
    fingerprint: Fingerprint,
    num_samples: int,
    examples: Sequence[Any],
    max_bytes: int,
    reserved_bytes: int,
) -> SharedMemoryCache | None:
    """The cache of this name: a new one, or one that another process has just made; None without a registry.

    The arguments are those of `SharedMemoryCache`.

    Raises:
        CacheMismatchError: Another process has made one from other samples.
        SharedMemoryError: The memory could not be allocated.
    """
    with registry.creating() as is_alone:
        if not is_alone:
            return None
        if (cache := find(fingerprint, num_samples)) is not None:
            return cache
        cache = SharedMemoryCache(
            num_samples,
            examples,
            max_memory=max_bytes,
            fingerprint=fingerprint,
            reserved_bytes=reserved_bytes,
        )
        _register(cache, fingerprint.name)
        if cache.unregister is None:
            cache.close()
            return None
        cache.reason = "made now, because no running process had it"
        return cache


def live_caches() -> list[dict[str, Any]]:
    """Every shared cache of this user that can be reached from this process, by age, ready for JSON.

    Each has its `name`, `key`, `label` and `parts` (see `Fingerprint`), `owners` (the processes that opened
    it by its name; their workers hold it too), `num_samples`, `num_cached`, `nbytes` (in use by all processes
    together), `max_bytes`, and `created_s` (seconds since 1970).
    """
    caches: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in registry.entries():
        try:
            cache = _unpickle(*_reach(entry))
        except (SharedMemoryError, CacheMismatchError):
            continue
        fingerprint = cache.origin.fingerprint or Fingerprint({})
        facts: dict[str, Any] = {
            "name": entry.name,
            "key": fingerprint.key,
            "label": fingerprint.label,
            "parts": dict(fingerprint.parts),
            "owners": [],
            "num_samples": cache.num_samples,
            "num_cached": cache.num_cached,
            "nbytes": cache.nbytes,
            "max_bytes": cache.max_bytes,
            "created_s": cache.origin.created_s,
        }
        caches.setdefault((entry.name, cache.origin.cache_id), facts)["owners"].append(entry.pid)
        cache.close()
    return sorted(caches.values(), key=lambda facts: facts["created_s"])


def _reach(entry: Entry) -> tuple[Segment, Layout]:
    """The memory of the cache behind an entry, which the caller owns, and its layout.

    Raises:
        SharedMemoryError: It cannot be reached.
        CacheMismatchError: Its descriptor is not a valid cache of this name.
    """
    segment = entry.attach()
    layout = _layout_of(segment)
    if layout.origin.fingerprint is None or layout.origin.fingerprint.name != entry.name:
        segment.close()
        raise CacheMismatchError("the descriptor now refers to another cache")
    return segment, layout


def _check(cache: SharedMemoryCache, fingerprint: Fingerprint, num_samples: int, pid: int) -> None:
    origin = cache.origin.fingerprint
    differences = [] if origin is None else fingerprint.differences(origin)
    if not differences and cache.num_samples != num_samples:
        differences = [f"the number of samples is {num_samples} here and {cache.num_samples} there"]
    if differences:
        raise CacheMismatchError(
            f"the shared cache with key {fingerprint.key!r}, held by process {pid}, was made from other "
            f"samples: {'; '.join(differences)} (here: the dataset, there: the cache)"
        )


def _register(cache: SharedMemoryCache, name: str) -> None:
    entry = registry.register(name, cache._fd)
    if entry is not None:
        cache.unregister = weakref.finalize(cache, registry.unregister, entry)
