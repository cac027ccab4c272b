"""LMDBCache: the samples in a finished file, and what a file says about them.

Rules:

1. A finished file never changes. What it says and each record are checked before they are used: the file can
   come from an untrusted source, and its checksums find accidents only.
2. A cache pickles as its path and the id of its build; a process opens the file on first use. A closed cache
   stays closed in child processes; loaded from a checkpoint, it is open.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fastload.cache.inventory import PARTIAL, damaged_keys
from fastload.cache.lmdb_store import LmdbStore, open_store, stores_lock
from fastload.cache.sample_cache import SampleCache
from fastload.cache.samples import StoredSamples
from fastload.errors import CacheCorruptError, CacheError, CacheMismatchError
from fastload.memory.segment import is_for_child
from fastload.system.checks import (
    TEXT,
    as_path,
    check_fields,
    dict_of,
    integer,
    list_of,
    optional,
    position_of,
)
from fastload.system.paths import cache_path

if TYPE_CHECKING:
    import numpy.typing as npt

    from fastload.cache.columns import Allocate

KIND = "samples"
CURE = "delete the file, and build it again"


@dataclass(frozen=True)
class Description:
    """What a file says about the samples in it.

    Attributes:
        num_samples: Number of samples of the dataset.
        parts: Parts of the samples' fingerprint; None if the dataset had no fingerprint.
        classes: Names of the dataset's classes, if it has any.
        left_out: Indices of the samples that could not be read, ascending.
    """

    num_samples: int
    parts: dict[str, str] | None
    classes: list[str] | None
    left_out: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, store: LmdbStore) -> Description:
        """The description in a file.

        Raises:
            CacheCorruptError: It is not valid.
        """
        fields: Any = store.meta.get(KIND)
        try:
            check_fields(fields, _FIELDS, "the description")
            found = cls(**fields)
            if found.left_out != sorted({index for index in found.left_out if index < found.num_samples}):
                raise ValueError("the samples that it leaves out are not all indices")
        except ValueError as error:
            raise CacheCorruptError(f"{store.path}: its description is not valid: {error}: {CURE}") from None
        return found


_FIELDS = {
    "num_samples": integer(0, 1 << 48),
    "parts": optional(dict_of(TEXT)),
    "classes": optional(list_of(TEXT)),
    "left_out": list_of(integer(0)),
}


class LMDBCache(StoredSamples):
    """A finished cache in an LMDB file, read-only; also a map-style dataset of its samples.

    Args:
        path: The file.
        renumber: Number the stored samples from 0, without those that are left out.

    Attributes:
        path: The absolute path.
        reason: Why this cache is in use.

    Raises:
        FileNotFoundError: There is no such file.
        CacheMismatchError: It is not a cache of this format.
        CacheCorruptError: It is damaged.
        ValueError: `path` is a URL.
    """

    def __init__(self, path: str | os.PathLike[str], *, renumber: bool = False) -> None:
        self.path = cache_path(as_path("path", path))
        self.place = f"LMDB at {self.path}"
        self.reason = "opened by its path"
        self._is_closed = False
        store, description = open_finished(self.path)
        super().__init__(store, description.num_samples)
        self._description: Description | None = description
        self._uuid = store.meta["uuid"]
        self._left_out = frozenset(description.left_out)
        self._indices: npt.NDArray[np.intp] | None = None  # of the samples, if they are numbered anew
        if renumber and self._left_out:
            self._indices, self._left_out = self.stored_indices, frozenset()
            self.num_samples = len(self._indices)

    def __getstate__(self) -> dict[str, Any]:
        is_closed = self._is_closed and is_for_child()
        changes = {"_store": None, "_description": None, "_is_closed": is_closed}
        return {**vars(self), **changes, "reason": "opened by its path"}

    def _open(self) -> LmdbStore:
        with stores_lock:  # of the threads that meet an unpickled cache, one opens it
            if self._store is None:
                store, self._description = open_finished(self.path)
                if store.meta["uuid"] != self._uuid:
                    raise CacheMismatchError(
                        f"{self.path} was replaced by a different cache while it was in use"
                    )
                self._store = store
            return cast("LmdbStore", self._store)

    # --- as a dataset -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        from fastload.nested.tree import private_copy  # here: it imports torch

        index = position_of(index, self.num_samples)
        if index not in self:
            why = "after close(): open it again" if self._is_closed else "which leaves it out"
            raise CacheError(f"sample {index} was requested from the cache {self.path} {why}")
        return private_copy(self.get(index))

    @property
    def classes(self) -> list[str] | None:
        """Class names of the dataset that it was built from, or None."""
        return self.description.classes

    def fingerprint(self) -> dict[str, str]:
        """The id of the build that the samples come from."""
        return {**(self.parts or {}), "build": self._uuid}

    # --- properties ---------------------------------------------------------------------------------------

    @property
    def description(self) -> Description:
        """What the file says about the samples."""
        if self._description is None:
            self._open()
        return cast("Description", self._description)

    @property
    def is_closed(self) -> bool:
        """Whether close() was called; a closed cache returns no samples."""
        return self._is_closed

    @property
    def nbytes(self) -> int:
        """Size of the file; 0 after close()."""
        return 0 if self._is_closed else self.store.nbytes

    @property
    def num_cached(self) -> int:
        """Number of stored samples: all except those that could not be read; 0 after close()."""
        return 0 if self._is_closed else self.num_samples - len(self._left_out)

    @property
    def stored_indices(self) -> npt.NDArray[np.intp]:
        """Indices of the stored samples, ascending."""
        return np.delete(np.arange(self.description.num_samples), self.description.left_out)

    missing, put = SampleCache.missing, SampleCache.put  # a finished file takes no more samples

    @property
    def parts(self) -> dict[str, str] | None:
        """Of the fingerprint of the samples; None if the dataset had none."""
        return self.description.parts

    def is_left_out(self, index: int) -> bool:
        """Whether the sample at `0 <= index < num_samples` could not be read when the cache was built."""
        return not self._is_closed and index in self._left_out

    # --- reading ------------------------------------------------------------------------------------------

    def __contains__(self, index: object) -> bool:
        """Whether the sample of this index is stored."""
        if self._is_closed or not isinstance(index, (int, np.integer)):
            return False
        return bool(0 <= index < self.num_samples) and index not in self._left_out

    def get(self, index: int) -> Any | None:
        """The sample at `0 <= index < num_samples`; None if it was left out, and after close().

        Arrays are read-only views of a private copy of the record; tensors are private copies.

        Raises:
            CacheCorruptError: The record is damaged or missing.
        """
        if index not in self:
            return None
        self._check_unchanged()
        return super().get(index if self._indices is None else int(self._indices[index]))

    def gather(self, indices: npt.NDArray[np.intp], allocate: Allocate) -> Any | None:
        """The batch, from one look into the file.

        Raises:
            CacheCorruptError: A record is damaged or missing.
        """
        if self._is_closed or (self._left_out and not self._left_out.isdisjoint(indices.tolist())):
            return None
        self._check_unchanged()
        return super().gather(indices if self._indices is None else self._indices[indices], allocate)

    def _check_unchanged(self) -> None:
        """Check that no program has written into the file, as far as its size and times tell.

        Raises:
            CacheMismatchError: One has.
        """
        if self.store.is_overwritten:
            raise CacheMismatchError(
                f"the file at {self.path} was changed while it was open, by a program that writes into a "
                "file (such as cp) instead of replacing it (such as mv): open the cache again"
            )

    def _checked(self, record: memoryview | None, index: int) -> memoryview:
        try:
            if record is None:
                raise CacheCorruptError(f"sample {index}: its record is missing")
            super()._checked(record, index)
        except CacheCorruptError as error:
            raise CacheCorruptError(f"{self.path}: {error}. The file is damaged: {CURE}") from None
        return record

    def verify(self, *, progress: bool = False) -> list[int]:
        """Compare every record with its checksum.

        Args:
            progress: Draw a bar, if standard error is a terminal.

        Returns:
            Indices of the samples that are damaged, ascending.

        Raises:
            CacheCorruptError: The file is damaged outside of its records.
            CacheMismatchError: It was changed while it was open.
        """
        self._check_unchanged()
        return [int.from_bytes(key, "big") for key in damaged_keys(self.store, shown=progress)]

    def close(self) -> None:
        """Release this object's file; samples that were handed out stay valid."""
        store, self._store, self._is_closed = self._store, None, True
        if store is not None:
            store.close()


def open_finished(path: str) -> tuple[LmdbStore, Description]:
    """The file of a finished cache, and what it says.

    Raises:
        FileNotFoundError: There is no such file.
        CacheMismatchError: It is not a finished cache of samples of this format.
        CacheCorruptError: It is damaged.
        CacheError: This process cannot read it.
    """
    store = open_existing(path)
    if store.meta["kind"] != KIND:
        raise CacheMismatchError(
            f"{path} has decoded files, not samples: read it with fastload.DataLoader(dataset, "
            f"cache={f'lmdb:{path}'!r}), or use a different path for the samples of CachedDataset"
        )
    description = Description.of(store)
    if not store.meta["finished"]:
        raise CacheMismatchError(f"{path} is the file of an unfinished build: run the build again")
    num_records = description.num_samples - len(description.left_out)
    if store.num_records != num_records:
        raise CacheCorruptError(
            f"{path} should have {num_records:,} records, but has {store.num_records:,}: {CURE}"
        )
    return store, description


def open_existing(path: str) -> LmdbStore:
    """The file of a cache; the error of one that is missing names what is left of its build."""
    try:
        return open_store(path)
    except FileNotFoundError as error:
        partial = path + PARTIAL
        hint = f"; {partial} is left of a build: run it again" if os.path.exists(partial) else ""
        raise FileNotFoundError(f"{error}{hint}") from None
