"""FileCache: a loader's `cache=`; the files that any dataset decodes are remembered while it is read.

The dataset's code runs in full on every access; see `fastload.readers`. Rules:

1. It is active in the thread that reads a sample, and only while it reads. In worker processes the libraries
   stay met for good, elsewhere during a fetch.
2. It pickles as a handle of the store, so all workers read and fill one store.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.cache.disk.disk_store import DiskFileStore, is_file_store
from fastload.cache.format.sample_cache import BaseCache
from fastload.cache.ram.file_store import FileStore, open_store
from fastload.readers import patches
from fastload.readers.decode_cache import OTHER_FORMAT, DecodeCache
from fastload.readers.request import DISK, check_cache
from fastload.system.budget import check_memory
from fastload.system.cache_counts import cache_counts
from fastload.system.humanize import readable_size
from fastload.system.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt


@contextlib.contextmanager
def listening() -> Iterator[Callable[[], bool]]:
    """Yields a function: has this thread decoded a file of a known format since? Nothing is remembered."""
    counts = cache_counts
    before = counts.hits, counts.misses, counts.reasons
    counts.misses, counts.reasons = 0, Counter()
    try:
        with patches.installed(), DecodeCache(_Nothing(), verify_share=0).active():
            yield lambda: counts.misses > counts.reasons[OTHER_FORMAT]
    finally:
        counts.hits, counts.misses, counts.reasons = before


class _Nothing:
    """A store that keeps nothing."""

    def get(self, key: bytes) -> None:
        """Nothing."""

    def put(self, key: bytes, array: Any, note: Any) -> bool:
        """False."""
        return False


class FileCache:
    """The files of datasets, remembered in the store of this user and machine.

    Args:
        store: Where they are.

    Attributes:
        store: As given.
    """

    def __init__(self, store: FileStore | DiskFileStore) -> None:
        self.store = store
        self._decode_cache = DecodeCache(store)
        patches.retain(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return FileCache, (self.store,)

    def poll(self) -> None:
        """Let the store replace what it let go of; the process that owns a loader calls it once a batch."""
        self.store.poll()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Remember the files that this thread decodes meanwhile."""
        with patches.installed(), self._decode_cache.active():
            yield

    def read_for_good(self) -> None:
        """Remember the files that this thread decodes from now on: for the main thread of a worker."""
        self._for_good = self.reading()  # collecting it would end it
        self._for_good.__enter__()

    def explain(self) -> str:
        """What happens, and what is remembered, in one line."""
        store = self.store
        limit = (
            f"at {store.path}"
            if isinstance(store, DiskFileStore)
            else f"at most {readable_size(store.max_bytes)}"
        )
        return (
            "the dataset's code runs on every access, and the pixels of files that it decodes are "
            f"remembered: now {store.num_files:,} files ({readable_size(store.nbytes)}, {limit})"
        )

    def close(self) -> None:
        """Let the classes of the libraries be as they were, if no other cache of this process needs them."""
        patches.release(self)


class RememberedFiles(BaseCache):
    """The cache of a `CachedDataset` by file.

    Args:
        num_samples: Of the dataset.
        max_memory: As for `CachedDataset`.
        cache: `"ram"`, or `"lmdb:PATH"`, to which `max_memory` does not apply.

    Attributes:
        max_memory: As given.
        cache: As given.
    """

    num_samples = 0  # as an attribute of the class: the property of SampleCache cannot be set
    layout = "files"

    def __init__(self, num_samples: int, max_memory: str | float, cache: str = "ram") -> None:
        check_memory(max_memory, name="max_memory")
        self.num_samples = num_samples
        self.max_memory, self.cache = max_memory, cache
        self._files = FileCache(store_of_process(max_memory if cache == "ram" else check_cache(cache) or ""))
        log.info("cache: %s", self.explain())

    def plain_values(self) -> dict[str, Any]:
        """What a pickle that outlives this process holds."""
        return {"num_samples": self.num_samples, "max_memory": self.max_memory, "cache": self.cache}

    @classmethod
    def of_plain_values(cls, values: dict[str, Any]) -> RememberedFiles:
        """A cache like the one with these `plain_values`."""
        return cls(**values)

    def read(self, function: Callable[[Any], Any], index: Any) -> Any:
        """What the dataset's ``function(index)`` returns."""
        with self._files.reading():
            return function(index)

    @property
    def num_cached(self) -> int:
        """How many files are remembered, of all datasets."""
        return self._files.store.num_files

    @property
    def nbytes(self) -> int:
        """Memory of the files, of all datasets."""
        return self._files.store.nbytes

    @property
    def max_bytes(self) -> int | None:
        """Their limit."""
        return self._files.store.max_bytes

    def explain(self) -> str:
        """What happens, and what is remembered."""
        return self._files.explain()

    def missing(self) -> npt.NDArray[np.intp]:
        """All indices: what files a sample needs shows only when it is read."""
        return np.arange(self.num_samples)

    def __contains__(self, index: object) -> bool:
        return False

    def get(self, index: int) -> None:
        """None: samples are not stored."""

    def close(self) -> None:
        """See `FileCache`."""
        self._files.close()


_stores: dict[str | float, FileStore | DiskFileStore] = {}  # by limit, or by place on disk
_stores_lock = threading.Lock()
if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=lambda: globals().update(_stores_lock=threading.Lock()))


def store_of_process(place: str | float) -> FileStore | DiskFileStore:
    """The store with a limit, or on disk, as `check_cache` names it.

    This process holds it to its end: a cell that runs again finds its files.
    """
    with _stores_lock:
        if place not in _stores:
            if isinstance(place, str) and place.startswith(DISK):
                _stores[place] = DiskFileStore(place[len(DISK) :])
            else:
                _stores[place] = open_store(place)
        return _stores[place]


def has_files(cache: Any) -> bool:
    """Whether `cache=` of a dataset names a directory of decoded files."""
    if not isinstance(cache, str) or not cache.startswith(DISK):
        return False
    try:
        return is_file_store((check_cache(cache) or "")[len(DISK) :])
    except ValueError:  # a URL
        return False


def forget_stores() -> None:
    """Let this process hold no store any more; what is in use stays valid."""
    with _stores_lock:
        stores = list(_stores.values())
        _stores.clear()
    for store in stores:
        store.close()
    patches.release(forget_stores)  # a cache that was dropped and not closed has released nothing


def open_file_cache(cache: str) -> FileCache:
    """What a loader's `cache=` asks for."""
    return FileCache(store_of_process(check_cache(cache) or "auto"))
