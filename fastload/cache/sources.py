"""Datasets that CachedDataset makes itself: one after its deterministic part, and a cache's content.

Made by `dataset` in the parent, read wherever a sample is missing in the cache.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset

from fastload.cache.transform import Call
from fastload.errors import CacheError
from fastload.nested.tree import private_copy

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from fastload.cache.columns import Allocate
    from fastload.cache.lmdb.lmdb_cache import LMDBCache


class PreparedDataset(Dataset[Any]):
    """A dataset whose samples go through a deterministic function, once, before they are cached.

    Args:
        dataset: Map-style.
        prepare: An albumentations pipeline or any callable, as CachedDataset takes them; it is given the
            dataset's own sample.

    Attributes:
        classes: Those of the dataset, for a file that is built from this one; None if it has none.

    Raises:
        TypeError: `prepare` cannot be called.
    """

    def __init__(self, dataset: Any, prepare: Callable[..., Any]) -> None:
        self.dataset = dataset
        self.prepare = prepare
        self.classes = getattr(dataset, "classes", None)
        self._call = Call("prepare", prepare)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        sample = self.dataset[index]
        # A shallow copy for the note on an error: `prepare` may take the containers apart.
        before = copy.copy(sample) if isinstance(sample, (dict, list)) else sample
        return self._call(before, sample, index)


class StoredSamples(Dataset[Any]):
    """The samples of a finished LMDB cache as a dataset, numbered from 0 without those that are not stored.

    It is also a cache of itself (see `protocol`), which is how its batches are read in one go.

    Args:
        cache: The finished cache.

    Attributes:
        cache: The same.
        classes: Names of the classes of the dataset that it was built from, if there were such.
    """

    is_shared = True
    budget_bytes: int | None = None

    def __init__(self, cache: LMDBCache) -> None:
        self.cache = cache
        self.classes = cache.classes
        self._indices = cache.stored_indices
        self.num_samples = cache.num_cached

    def __copy__(self) -> StoredSamples:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredSamples:
        return self

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        if self.cache.is_closed:
            raise CacheError(
                f"sample {index} was asked of the cache at {self.cache.path} after its close(): open it again"
            )
        return private_copy(self.get(index))

    def fingerprint(self) -> dict[str, str]:
        """The build that the samples come from."""
        return {**(self.cache.parts or {}), "build": self.cache.plan.build_id, "codec": self.cache.codec}

    @property
    def num_cached(self) -> int:
        """All samples."""
        return self.num_samples

    @property
    def nbytes(self) -> int:
        """Size of the files."""
        return self.cache.nbytes

    @property
    def layout(self) -> str:
        """How samples lie: `"lmdb"`."""
        return self.cache.layout

    def explain(self) -> str:
        """Why this cache is the one in use, and what it was made of."""
        return self.cache.explain()

    def missing(self) -> npt.NDArray[np.intp]:
        """Nothing that `put` might take."""
        return np.empty(0, np.intp)

    def __contains__(self, index: object) -> bool:
        return isinstance(index, (int, np.integer)) and 0 <= int(index) < self.num_samples

    def get(self, index: int) -> Any | None:
        """The sample, its arrays read-only; None only after close()."""
        return self.cache.get(index if self._indices is None else int(self._indices[index]))

    def put(self, index: int, sample: Any) -> bool:
        """False: a finished cache takes nothing."""
        return False

    def gather(self, indices: npt.NDArray[np.intp], allocate: Allocate) -> Any | None:
        """The batch that torch's default_collate would make of these samples, as LMDBCache.gather()."""
        return self.cache.gather(indices if self._indices is None else self._indices[indices], allocate)

    def close(self) -> None:
        """Give up this object's hold on the files."""
        self.cache.close()
