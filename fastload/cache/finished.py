"""LMDBCache: the samples in a finished file; what a file says about itself, and whether a dataset made it.

Rules:

1. A finished file never changes. What it says and each record are checked before they are used: the file can
   come from an untrusted source, and its checksums find accidents only.
2. A cache pickles as its path and the id of its build; a process opens the file on first use. A closed cache
   stays closed in child processes; loaded from a checkpoint, it is open.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import lmdb
import numpy as np

from fastload.cache.fingerprint import KEY_PART, Fingerprint
from fastload.cache.inventory import PARTIAL, damaged_keys
from fastload.cache.lmdb_store import LmdbStore, open_store, usable
from fastload.cache.records import encode, outline
from fastload.cache.sample_cache import SampleCache
from fastload.cache.samples import StoredSamples
from fastload.errors import CacheCorruptError, CacheError, CacheMismatchError, UnsupportedSampleError
from fastload.memory.segment import is_for_child
from fastload.nested.spec import Spec
from fastload.system.checks import (
    TEXT,
    Check,
    as_path,
    check_fields,
    dict_of,
    integer,
    list_of,
    optional,
)
from fastload.system.humanize import fastload_command
from fastload.system.logs import say_once
from fastload.system.notes import add_note
from fastload.system.paths import cache_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from fastload.cache.columns import Allocate

KIND = "samples"
CURE = "delete the file, and build it again"
_MAX_SECONDS = 250_000_000_000  # in the year 9892, which calendars can still represent
_opening = threading.Lock()


@dataclass(frozen=True)
class Description:
    """What a file says about the samples in it.

    Attributes:
        num_samples: Number of samples of the dataset.
        spec: Structure of sample 0, as JSON; None if the cache is empty or sample 0 could not be read.
        checksum: Of the content of sample 0.
        parts: Parts of the samples' fingerprint; None if the dataset had no fingerprint.
        classes: Names of the dataset's classes, if it has any.
        libraries: Versions of the libraries that wrote the cache, by name.
        created_s: When the build began, in seconds since 1970.
        left_out: Indices of the samples that could not be read, ascending.
    """

    num_samples: int
    spec: str | None
    checksum: str | None
    parts: dict[str, str] | None
    classes: list[str] | None
    libraries: dict[str, str]
    created_s: float
    left_out: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, dataset: Any, probed: Mapping[int, Any], fingerprint: Fingerprint | None) -> Description:
        """The description of a new build.

        Args:
            dataset: The samples to store.
            probed: Samples that were read, by index; without sample 0 if it cannot be read.
            fingerprint: Of the samples.
        """
        import PIL.Image  # here: reading needs none; the submodule, so that forked workers inherit it

        spec = checksum = None
        if 0 in probed:
            try:
                record = encode(probed[0])
            except UnsupportedSampleError as error:
                add_note(error, "in sample 0 of the dataset")
                raise
            spec, checksum = outline(record).spec.text.decode("ascii"), record[:8].hex()
        classes = getattr(dataset, "classes", None)
        is_listed = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
        return cls(
            num_samples=len(dataset),
            spec=spec,
            checksum=checksum,
            parts=None if fingerprint is None else fingerprint.parts_in_file,
            classes=classes if is_listed else None,
            libraries={"lmdb": lmdb.__version__, "numpy": np.__version__, "pillow": PIL.__version__},
            created_s=time.time(),
        )

    @classmethod
    def parse(cls, fields: Any) -> Description:
        """A description from the fields of one, or from any other value.

        Raises:
            ValueError: The value is not a description; the error gives the reason.
        """
        check_fields(fields, _FIELDS, "the description")
        found = cls(**fields)
        if found.left_out != sorted({index for index in found.left_out if index < found.num_samples}):
            raise ValueError("the samples that it leaves out are not all indices")
        return found

    def difference(self, here: Description) -> str | None:
        """How the samples of a dataset differ from those of this description; None if they do not.

        Samples are compared by both fingerprints, or else by sample 0. Where both have a key, the structure
        of sample 0 is compared, too: nothing else shows that a class was edited.
        """
        names = {"num_samples": "number of samples", "spec": "structure of sample 0"}
        differences: list[str] = []
        if self.parts is None or here.parts is None:
            names["checksum"] = "content of sample 0"
        else:
            del names["num_samples"]  # the parts have it
            has_keys = KEY_PART in self.parts and KEY_PART in here.parts
            if not has_keys:
                del names["spec"]
            ours, theirs = (
                {name: part for name, part in parts.items() if has_keys or name != KEY_PART}
                for parts in (here.parts, self.parts)
            )
            differences = Fingerprint(ours).differences(Fingerprint(theirs))
        for name, what in names.items():
            ours, theirs = getattr(here, name), getattr(self, name)
            if ours != theirs and None not in (ours, theirs):  # else sample 0 could not be read
                differences.append(f"the {what} is {ours} here and {theirs} there")
        return "; ".join(differences) or None


_FIELDS = {
    "num_samples": integer(0, 1 << 48),
    "spec": optional(TEXT),
    "checksum": optional(TEXT),
    "parts": optional(dict_of(TEXT)),
    "classes": optional(list_of(TEXT)),
    "libraries": dict_of(TEXT),
    "created_s": Check(
        "a time in seconds", lambda s: type(s) in (int, float) and 0 <= s < _MAX_SECONDS
    ),  # not NaN
    "left_out": list_of(integer(0)),
}


class LMDBCache(StoredSamples):
    """A finished cache in an LMDB file, read-only.

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
        self._spec: Spec | None = None  # of an unpickled cache that is not open yet
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
        changes = {
            "_store": None,
            "_description": None,
            "_is_closed": is_closed,
            "_spec": self._spec_to_pickle(),
        }
        return {**vars(self), **changes, "reason": "opened by its path"}

    def _spec_to_pickle(self) -> Spec | None:
        """The structure of sample 0; it takes the classes of its namedtuples along to another process.

        None if it is unknown, or if this process has not imported those classes.
        """
        if self._description is None:
            return self._spec
        text = self._description.spec
        spec = None if text is None else Spec.parse(text.encode("ascii"))
        with contextlib.suppress(CacheError):
            return spec if pickle.dumps(spec) else None
        return None

    def _open(self) -> LmdbStore:
        with _opening:  # of the threads that meet an unpickled cache, one opens it
            if self._store is None:
                store, self._description = open_finished(self.path)
                if store.meta["uuid"] != self._uuid:
                    raise CacheMismatchError(
                        f"{self.path} was replaced by a different cache while it was in use"
                    )
                self._store = store
            return cast("LmdbStore", self._store)

    @property
    def description(self) -> Description:
        """What the file says about the cache, such as the classes."""
        if self._description is None:
            _, self._description = open_finished(self.path)
        return self._description

    # --- properties ---------------------------------------------------------------------------------------

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
    description = described(store)
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
        return usable(open_store(path))
    except FileNotFoundError as error:
        partial = path + PARTIAL
        hint = f"; {partial} is left of a build: run it again" if os.path.exists(partial) else ""
        raise FileNotFoundError(f"{error}{hint}") from None


def described(store: LmdbStore) -> Description:
    """What the file of a store says about its samples."""
    try:
        return Description.parse(store.meta.get(KIND))
    except ValueError as error:
        raise CacheCorruptError(f"{store.path}: its description is not valid: {error}: {CURE}") from None


def check_source(cache: LMDBCache, here: Description) -> None:
    """Check that a cache was made from the samples of a dataset.

    Args:
        cache: Its `reason` becomes that it matches.
        here: Of the dataset.

    Raises:
        CacheMismatchError: It was not; the error says what differs, and which of the two to change.
    """
    there = cache.description
    why = there.difference(here)
    if why is not None:
        raise CacheMismatchError(
            f"{cache.path} was made from other samples, or from an earlier state of them: {why} (here: the "
            "dataset, there: the cache). If the cache is right, change the dataset, or train without it from "
            f"CachedDataset.from_cache({cache.path!r}). If the dataset is right, remove it with "
            f"{fastload_command('cache', 'rm', cache.path)}, build it again with --force on the command "
            "line, or use a different path"
        )
    key = (here.parts or {}).get(KEY_PART) if KEY_PART in (there.parts or {}) else None
    if key is not None and None not in (here.checksum, there.checksum) and here.checksum != there.checksum:
        say_once(
            f"cache: sample 0 of the dataset is no longer that in {cache.path}, although both have the key "
            f"{key!r}. The cache is used as it is. If you edited the dataset, change cache_key= "
            "and the path; another release of a library that decodes can change pixels, too"
        )
    is_known = there.parts is not None and here.parts is not None
    if not is_known and here.num_samples:
        say_once(
            f"cache: only the number of samples and sample 0 of {cache.path} were compared with the dataset. "
            "Other samples, such as edited labels, are as they were when it was built. Build it with "
            "cache_key=, and change the key and the path with the samples"
        )
    what = "fingerprint matches" if is_known else "number of samples and its sample 0 match"
    cache.reason = f"opened, because its {what} the dataset"
