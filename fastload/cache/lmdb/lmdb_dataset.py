"""LMDBDataset: the samples of a finished LMDB cache as a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset

from fastload.cache.sample_cache import SampleCache
from fastload.errors import CacheError
from fastload.nested.tree import private_copy

if TYPE_CHECKING:
    import numpy.typing as npt

    from fastload.cache.columns import Allocate
    from fastload.cache.lmdb.lmdb_cache import LMDBCache


class LMDBDataset(Dataset[Any], SampleCache):
    """The stored samples of a finished LMDB cache as a dataset, numbered from 0.

    It also implements the interface of a cache (see `sample_cache`), through which whole batches are read.

    Attributes:
        cache: The finished cache.
        classes: Class names of the dataset that it was built from, or None.
        description: What the file says about the cache.
    """

    # Attributes of the class, because the properties of SampleCache with these names cannot be set.
    num_cached, nbytes = 0, 0
    layout = "lmdb"

    def __init__(self, cache: LMDBCache) -> None:
        self.cache = cache
        self.classes = cache.description.classes
        self.description = cache.description
        self._indices = cache.stored_indices
        self.num_samples = self.num_cached = cache.num_cached
        self.nbytes = cache.nbytes

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        if self.cache.is_closed:
            raise CacheError(
                f"sample {index} was requested from the cache {self.cache.path} after close(): open it again"
            )
        return private_copy(self.get(index))

    def fingerprint(self) -> dict[str, str]:
        """The id of the build that the samples come from."""
        return {**(self.description.parts or {}), "build": self.description.build_id}

    def explain(self) -> str:
        """Why this cache is in use, and the parts of its fingerprint."""
        return self.cache.explain()

    def __contains__(self, index: object) -> bool:
        return isinstance(index, (int, np.integer)) and 0 <= int(index) < self.num_samples

    def get(self, index: int) -> Any | None:
        """The sample, with read-only arrays; None only after close(). See LMDBCache.get()."""
        position = index if self._indices is None else int(self._indices[index])
        return self.cache.get(position)

    def gather(self, indices: npt.NDArray[np.intp], allocate: Allocate) -> Any | None:
        """The batch that torch's default_collate would make of these samples; see LMDBCache.gather()."""
        return self.cache.gather(indices if self._indices is None else self._indices[indices], allocate)

    def close(self) -> None:
        """Release this object's file."""
        self.cache.close()
