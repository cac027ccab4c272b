"""SharedMemoryCache: decodes each sample once, into one segment of anonymous memory that all processes share.

The parent makes it; the parent and its workers of every start method use it, as the cache pickles as a
handle. Other ranks and jobs of the same user find a cache that has a fingerprint (see `registry`). The
segment (see `layout`) is sparse, so memory is allocated as samples are stored, and sealed, so its size never
changes. How samples are read and stored is in `generation`. Rules:

1. Nothing is evicted: with a new permutation in each epoch, no policy beats a fixed subset.
2. The memory is freed when the last process that holds the segment ends, in whatever way.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fastload.cache.ram.generation import NOT_MAPPED, Generation
from fastload.cache.ram.layout import Layout, Origin, create
from fastload.cache.sample_cache import BaseCache
from fastload.errors import CacheMismatchError
from fastload.memory.segment import Segment
from fastload.nested.spec import flatten
from fastload.system.budget import parse_budget
from fastload.system.logs import log
from fastload.system.sizes import readable_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastload.cache.columns import Allocate
    from fastload.cache.fingerprint import Fingerprint


class SharedMemoryCache(BaseCache):
    """A cache of samples in shared memory.

    Args:
        num_samples: Number of samples of the dataset.
        examples: A few samples that are typical of the dataset, or none; they are not stored.
        budget: The most memory it may take, as in `parse_budget`.
        fingerprint: Of the samples, if other processes shall find the cache.

    Raises:
        SegmentError: The system refused the memory, or the lock that ragged samples need.
        UnsupportedSampleError: A value in an example cannot be cached.
        ValueError: `parse_budget` does not accept the budget.
    """

    _now: Generation

    def __init__(
        self,
        num_samples: int,
        examples: Sequence[Any] = (),
        *,
        budget: str | float = "auto",
        fingerprint: Fingerprint | None = None,
    ) -> None:
        origin = Origin(os.getpid(), time.time(), fingerprint)
        layout, segment, mapping = create(num_samples, parse_budget(budget), examples, origin)
        self._hold(layout)
        self._now = Generation(segment, layout, self._logged, mapping)

    @classmethod
    def attach(cls, segment: Segment) -> SharedMemoryCache:
        """The cache in a segment; the cache owns the segment from here on.

        Raises:
            CacheMismatchError: The segment is not a cache of this format version, or its size could change.
        """
        if not segment.is_sealed or not segment.is_own:
            raise CacheMismatchError(
                "not a shared cache: its size could change, or it belongs to another user"
            )
        return _attached(segment, Layout.read(segment))

    def _hold(self, layout: Layout) -> None:
        """Set all attributes but the generation in use."""
        self._plan = layout
        self._logged: set[str] = set()
        self.reason = "it is private to this process and its workers"
        self.unregister: Callable[[], object] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (self._now.segment, self._plan)

    def _usable(self) -> Generation | None:
        """The generation in use; None if the cache is closed or cannot be mapped."""
        now = self._now
        return now if now.followed != NOT_MAPPED or now.map() else None

    # --- properties ---------------------------------------------------------------------------------------

    @property
    def num_samples(self) -> int:
        """Number of samples of the dataset."""
        return self._plan.num_samples

    @property
    def budget_bytes(self) -> int:
        """The most memory it takes."""
        return self._plan.budget_bytes

    @property
    def layout(self) -> str:
        """`"uniform"` (columns, and ragged records for samples that do not match) or `"ragged"`."""
        return "ragged" if self._plan.spec is None else "uniform"

    @property
    def capacity(self) -> int | None:
        """How many uniform samples fit; None for ragged samples, whose sizes are not known."""
        return None if self._plan.spec is None else self._plan.rows

    @property
    def origin(self) -> Origin:
        """Which process made it, when, and from which samples."""
        return self._plan.origin

    @property
    def fd(self) -> int:
        """The segment's descriptor in this process; -1 once closed."""
        return self._now.segment.fd

    def explain(self) -> str:
        """The reason why this cache is in use, and the parts of its fingerprint."""
        fingerprint = self._plan.origin.fingerprint
        parts = "" if fingerprint is None else "".join(f"\n  {k}: {v}" for k, v in fingerprint.parts.items())
        held = f"{self.num_cached:,} of {self.num_samples:,} samples, {readable_size(self.nbytes)}"
        return f"shared memory, {held}: {self.reason}{parts}"

    def missing(self) -> npt.NDArray[np.intp]:
        """Indices of samples that are not stored and fit, ascending; the first ones if not all fit."""
        now = self._usable()
        return np.empty(0, np.intp) if now is None else now.missing()

    @property
    def num_cached(self) -> int:
        """How many samples are stored now."""
        now = self._usable()
        return 0 if now is None else now.num_cached

    @property
    def nbytes(self) -> int:
        """Memory in use now, by all processes together."""
        return self._now.nbytes

    # --- reading ------------------------------------------------------------------------------------------

    def __contains__(self, index: object) -> bool:
        if not isinstance(index, (int, np.integer)) or not 0 <= index < self.num_samples:
            return False
        now = self._usable()
        return now is not None and now.holds(int(index))

    def get(self, index: int) -> Any | None:
        """The sample at `0 <= index < num_samples`, or None if it is not cached.

        Arrays are read-only views of the shared memory and keep it mapped, also after close(); tensors are
        private copies.
        """
        now = self._now
        if now.successor[0] != now.followed:
            usable = self._usable()
            if usable is None:
                return None
            now = usable
        entry = now.entries[index]
        if entry & 1 and now.columns is not None:
            return now.columns.sample(entry >> 1)
        return now.ragged_sample(index, entry) if entry else None

    def cached_rows(self, indices: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """Which of these samples are cached as uniform rows, `(len(indices),) bool`."""
        now = self._usable()
        return np.zeros(len(indices), np.bool_) if now is None else now.cached_rows(indices)

    def gather(self, indices: npt.NDArray[np.intp], allocate: Allocate) -> Any | None:
        """The batch, column by column; None if a sample is not a uniform row, or torch must collate."""
        now = self._usable()
        return None if now is None else now.gather(indices, allocate)

    # --- writing ------------------------------------------------------------------------------------------

    def put(self, index: int, sample: Any) -> bool:
        """Store a sample; False if it does not fit, or another process holds the lock.

        Raises:
            UnsupportedSampleError: A value in the sample cannot be cached.
        """
        spec, values = flatten(sample)
        now = self._usable()
        if now is None or now.is_full:
            return False
        try:
            return now.put(index, spec, values)
        except (OSError, MemoryError) as error:  # a cache that cannot grow is slower, but not an error
            now.is_full = True
            log.warning(
                "the cache stops growing at %s of %s, the rest is read from the dataset: %s",
                readable_size(self.nbytes),
                readable_size(self.budget_bytes),
                str(error),  # the error itself would keep this frame alive in a log handler
            )
            return False

    def close(self) -> None:
        """Release the segment; samples that were handed out stay valid, and all later reads are misses."""
        if self.unregister is not None:
            self.unregister()
        self._now.segment.close()
        self._now = Generation(Segment(-1, 0), self._plan, self._logged)


def _attached(segment: Segment, layout: Layout) -> SharedMemoryCache:
    cache = SharedMemoryCache.__new__(SharedMemoryCache)
    cache._hold(layout)
    cache._now = Generation(segment, layout, cache._logged)
    return cache
