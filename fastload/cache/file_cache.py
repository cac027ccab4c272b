"""FileCache: a loader's `cache="ram"`; the files that any dataset decodes are remembered while it is read.

The dataset's code runs in full on every access; see `fastload.readers`. Rules:

1. It is active in the thread that reads a sample, and only while it reads. In worker processes the libraries
   stay met for good, elsewhere during a fetch.
2. It pickles as a handle of the store, so all workers read and fill one store.
3. FASTLOAD_CACHE decides for the loaders of a script that name no cache ("ram", "ram:32G"), or turns all
   of them off ("off").
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from fastload.cache.ram.file_store import FileStore, open_store
from fastload.readers import patches
from fastload.readers.decode_cache import DecodeCache
from fastload.system.budget import check_memory
from fastload.system.humanize import readable_size

if TYPE_CHECKING:
    from collections.abc import Iterator

CACHE_VARIABLE = "FASTLOAD_CACHE"
_OFF = "off"


def check_cache(cache: Any) -> str | None:
    """The limit that `cache=` of a loader names: "auto" or an amount of memory; None for no cache.

    Raises:
        ValueError: It is not None, "ram" or "ram:" and an amount of memory.
    """
    if cache is None:
        return None
    kind, colon, max_memory = cache.partition(":") if isinstance(cache, str) else ("", "", "")
    if kind != "ram" or bool(colon) != bool(max_memory):
        raise ValueError(
            f'cache should be "ram", "ram:32G" or None, but got {cache!r}: a loader remembers files in memory. '
            'For samples on disk, make the loader of fastload.CachedDataset(dataset, cache="lmdb:PATH")'
        )
    if max_memory:
        check_memory(max_memory, name="cache")
    return max_memory or "auto"


def requested_cache(cache: str | None) -> str | None:
    """What a loader does with this `cache=`: the argument, or what FASTLOAD_CACHE says.

    Raises:
        ValueError: FASTLOAD_CACHE is neither "off" nor a cache.
    """
    text = os.environ.get(CACHE_VARIABLE) or None
    if text == _OFF:
        return None
    try:
        check_cache(text)
    except ValueError as error:
        raise ValueError(f"{CACHE_VARIABLE}: {error}; or set it to {_OFF!r}") from None
    return cache or text


class FileCache:
    """The files of datasets, remembered in the store of this user and machine.

    Args:
        store: Where they are.

    Attributes:
        store: As given.
    """

    def __init__(self, store: FileStore) -> None:
        self.store = store
        self._decode_cache = DecodeCache(store)
        patches.retain(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return FileCache, (self.store,)

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
        """What is remembered, in one line."""
        store = self.store
        memory = f"{readable_size(store.nbytes)}, at most {readable_size(store.max_bytes)}"
        return (
            "the dataset's code runs on every access; the pixels of the files that it decodes are remembered: "
            f"{store.num_files:,} files now ({memory})"
        )

    def close(self) -> None:
        """Let the classes of the libraries be as they were, if no other cache of this process needs them."""
        patches.release(self)


def open_file_cache(cache: str) -> FileCache:
    """What a loader's `cache=` asks for."""
    return FileCache(open_store(check_cache(cache) or "auto"))
