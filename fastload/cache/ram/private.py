"""PrivateCache: a cache in RAM for systems without anonymous shared memory: a dict in each process.

`open_cache` makes it if memfd is missing (macOS, Windows) or denied (by a seccomp filter or a resource
limit). It pickles as an empty cache of the same size limit, so each worker fills its own. This costs memory
and decoding in every worker; a warning says so.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.cache.format.record import decode, encode
from fastload.cache.format.sample_cache import BaseCache
from fastload.cache.ram.arena import log_stopped
from fastload.system.budget import GrowthCheck, available_bytes

if TYPE_CHECKING:
    import numpy.typing as npt


class PrivateCache(BaseCache):
    """A cache of records in this process's own memory.

    Args:
        num_samples: Number of samples of the dataset.
        max_bytes: The limit for one process.
        reason: Why the cache is not shared, as a readable clause.
        reserved_bytes: Memory of the machine that the cache leaves free while it grows.
    """

    layout = "private"
    is_shared = False
    # Attributes of the class, because the properties of SampleCache with these names cannot be set.
    num_samples, nbytes, max_bytes = 0, 0, 0

    def __init__(self, num_samples: int, max_bytes: int, reason: str, reserved_bytes: int = 0) -> None:
        self.num_samples = num_samples
        self.max_bytes = max_bytes
        self.reason = reason
        self.reserved_bytes = reserved_bytes
        self.nbytes = 0
        self._records: dict[int, bytes] = {}
        self._growth = GrowthCheck(available_bytes)
        self._has_stopped = False
        self._locks: dict[int, threading.Lock] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return PrivateCache, tuple(self.plain_values().values())

    def plain_values(self) -> dict[str, Any]:
        """The arguments of an empty cache like this one."""
        names = ("num_samples", "max_bytes", "reason", "reserved_bytes")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def of_plain_values(cls, values: dict[str, Any]) -> PrivateCache:
        """An empty cache like the one that `plain_values` described."""
        return cls(**values)

    @property
    def num_cached(self) -> int:
        """How many samples this process stores now."""
        return len(self._records)

    def explain(self) -> str:
        """Why this cache is in use."""
        return f"private memory, {self.num_cached:,} of {self.num_samples:,} samples: {self.reason}"

    def missing(self) -> npt.NDArray[np.intp]:
        """Indices of the samples that are not stored in this process, ascending."""
        return np.array([i for i in range(self.num_samples) if i not in self._records], np.intp)

    def __contains__(self, index: object) -> bool:
        return index in self._records

    def get(self, index: int) -> Any | None:
        """The sample, or None if it is not cached; its arrays are read-only views of the record."""
        record = self._records.get(index)
        return None if record is None else decode(record)

    def put(self, index: int, sample: Any) -> bool:
        """Store a sample; False if it does not fit.

        Raises:
            UnsupportedSampleError: A value in the sample cannot be cached.
        """
        if index in self._records:
            return True
        record = encode(sample)
        # Worker threads share the cache. Each process has its own lock, because a fork can copy a held one.
        with self._lock():
            nbytes = self.nbytes + len(record)
            if index in self._records or nbytes > self.max_bytes:
                return index in self._records
            # Every worker has a cache of this size; together they can need more than there is.
            if not self._growth.allows(self.nbytes, len(record), self.reserved_bytes):
                if not self._has_stopped:
                    self._has_stopped = True
                    log_stopped(self.num_cached, self.num_samples, self.nbytes, self._growth.free_bytes)
                return False
            self._records[index] = record
            self.nbytes = nbytes
            return True

    def _lock(self) -> threading.Lock:
        return self._locks.setdefault(os.getpid(), threading.Lock())

    def close(self) -> None:
        """Forget all samples; samples that were handed out stay valid."""
        self._records.clear()
        self.nbytes = self.max_bytes = 0
