"""PrivateCache: the cache in RAM where there is no anonymous shared memory: one a process, in a dict.

Made by `dataset` on platforms without memfd (macOS, Windows). Pickles as an empty cache of the same budget,
so each worker fills its own; that costs memory and decoding for every worker, and a warning says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.cache.budget import parse_budget
from fastload.cache.record import decode, encode

if TYPE_CHECKING:
    import numpy.typing as npt

    from fastload.cache.columns import Allocate


class PrivateCache:
    """A cache of records in this process's own memory.

    Args:
        num_samples: Number of samples of the dataset.
        budget: The most memory that one process may take, as in `parse_budget`.
    """

    layout = "private"
    capacity: int | None = None
    is_shared = False

    def __init__(self, num_samples: int, *, budget: str | float = "auto") -> None:
        self.num_samples = num_samples
        self.budget_bytes = parse_budget(budget)
        self.nbytes = 0
        self._records: dict[int, bytes] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty, (self.num_samples, self.budget_bytes)

    def __copy__(self) -> PrivateCache:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PrivateCache:
        return self

    @property
    def num_cached(self) -> int:
        """How many samples are stored now, in this process."""
        return len(self._records)

    def explain(self) -> str:
        """Why this cache is the one in use."""
        return (
            f"private memory, {self.num_cached:,} of {self.num_samples:,} samples: this platform has no "
            "anonymous shared memory"
        )

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
            UnsupportedSampleError: Something in the sample is of no kind that is cached.
        """
        record = encode(sample)
        if index not in self._records:
            if self.nbytes + len(record) > self.budget_bytes:
                return False
            self._records[index] = record
            self.nbytes += len(record)
        return True

    def gather(self, indices: npt.NDArray[np.intp], allocate: Allocate) -> None:
        """Nothing: records lie apart, each sample is read by itself."""
        return

    def close(self) -> None:
        """Forget all samples; those that were handed out stay valid."""
        self._records.clear()
        self.nbytes = self.budget_bytes = 0


def _empty(num_samples: int, budget_bytes: int) -> PrivateCache:
    return PrivateCache(num_samples, budget=max(1, budget_bytes))
