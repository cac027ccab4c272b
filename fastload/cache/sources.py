"""Datasets that CachedDataset makes itself: a dataset after its deterministic part, and a finished cache.

`dataset` makes them in the parent; any process reads them for samples missing from its cache.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset, Subset

from fastload.cache.encoded import DecodedSamples, DerivedSamples, decode_images
from fastload.cache.format.sample_cache import BaseCache
from fastload.cache.transform import TransformCaller
from fastload.errors import CacheError
from fastload.images.folder import ImageFolder
from fastload.nested.tree import private_copy

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from fastload.cache.format.columns import Allocate
    from fastload.cache.lmdb.lmdb_cache import LMDBCache


class PreTransformedDataset(DerivedSamples):
    """A dataset whose samples pass through a deterministic function once, before they are cached.

    Args:
        dataset: Map-style.
        pre_transform: An albumentations pipeline or any other callable, as for CachedDataset; it gets the
            dataset's own sample.

    Raises:
        TypeError: `pre_transform` is not callable.
    """

    def __init__(self, dataset: Any, pre_transform: Callable[..., Any]) -> None:
        super().__init__(dataset)
        self.pre_transform = pre_transform
        self._caller = TransformCaller(pre_transform, role="pre_transform")

    def __getitem__(self, index: int) -> Any:
        sample = decode_images(self.dataset[index])
        # A shallow copy for the note on an error, because `pre_transform` can modify the containers.
        before = copy.copy(sample) if isinstance(sample, (dict, list)) else sample
        return self._caller.call(before, sample, index)


def decoded_source(dataset: Any, pre_transform: Callable[..., Any] | None = None) -> Any:
    """The dataset after its deterministic part, with decoded images."""
    if pre_transform is not None:
        return PreTransformedDataset(dataset, pre_transform)
    inner = dataset
    while type(inner) is Subset:
        inner = inner.dataset
    # These never return undecoded images, or are meant to. All others can, and so can a subclass.
    return dataset if type(inner) in (ImageFolder, StoredSamples) else DecodedSamples(dataset)


class StoredSamples(Dataset[Any], BaseCache):
    """The stored samples of a finished LMDB cache as a dataset, numbered from 0.

    It also implements the interface of a cache (see `sample_cache`), through which whole batches are read.

    Args:
        cache: The finished cache.

    Attributes:
        cache: The same.
        classes: Class names of the dataset that it was built from, or None.
        description: What the files say about the cache.
    """

    # Attributes of the class, because the properties of SampleCache with these names cannot be set.
    num_samples, num_cached, nbytes = 0, 0, 0
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
        return {
            **(self.description.parts or {}),
            "build": self.description.build_id,
            "codec": self.description.codec,
        }

    def explain(self) -> str:
        """Why this cache is in use, and the parts of its fingerprint."""
        return self.cache.explain()

    def __contains__(self, index: object) -> bool:
        return isinstance(index, (int, np.integer)) and 0 <= int(index) < self.num_samples

    def get(self, index: int, *, undecoded: bool = False) -> Any | None:
        """The sample, with read-only arrays; None only after close(). See LMDBCache.get()."""
        position = index if self._indices is None else int(self._indices[index])
        return self.cache.get(position, undecoded=undecoded)

    def gather(self, indices: npt.NDArray[np.intp], allocate: Allocate) -> Any | None:
        """The batch that torch's default_collate would make of these samples; see LMDBCache.gather()."""
        return self.cache.gather(indices if self._indices is None else self._indices[indices], allocate)

    def close(self) -> None:
        """Release this object's files."""
        self.cache.close()
