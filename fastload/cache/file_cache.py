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
from typing import TYPE_CHECKING, Any

from fastload.augmentation import ends
from fastload.cache.decoded_files import KIND, DecodedFiles, count_files, open_files
from fastload.cache.lmdb_file import RefusedError
from fastload.cache.lmdb_store import LmdbStore
from fastload.cache.ram.arena import reserve_bytes
from fastload.cache.ram.store import SharedStore, Use, open_store
from fastload.readers import patches
from fastload.readers.decode_cache import DecodeCache
from fastload.readers.lessons import Lessons
from fastload.readers.request import DISK, check_cache
from fastload.system.budget import available_bytes
from fastload.system.humanize import readable_size

if TYPE_CHECKING:
    from collections.abc import Iterator


_MIN_SHARE = 0.1  # of the files that had no room; if the store holds fewer, it is of no use to the loader


class FileCache:
    """The files of datasets, remembered in the store of this user and machine.

    Args:
        store: Where they are.
        lessons: What the processes of the loader learn; nothing so far if None.

    Attributes:
        store: As given.
    """

    def __init__(self, store: SharedStore | LmdbStore, lessons: Lessons | None = None) -> None:
        self.store = store
        self._lessons = lessons or Lessons.shared()
        self._decode_cache = DecodeCache(DecodedFiles(store), lessons=self._lessons)
        self._use = Use()
        patches.retain(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return FileCache, (self.store, self._lessons)

    def poll(self) -> None:
        """Let the store replace what it let go of; the process that owns a loader calls it once a batch."""
        if isinstance(self.store, SharedStore):
            self.store.look() if self.is_given_up else self.store.poll(self._use)

    def end_epoch(self) -> bool:
        """Decide now what is stored of images that are resized first, and need only what was used.

        Returns:
            Whether images were resized first, of which the first ones were not stored.
        """
        self._use.end_epoch()
        self.flush()
        return self._lessons.conclude()

    def flush(self) -> bool:
        """Let others find what this process stored; False if another process commits to the disk now."""
        return not isinstance(self.store, LmdbStore) or self.store.flush(0.0)

    @property
    def is_given_up(self) -> bool:
        """Whether the loader does without it, see `shortage`."""
        return self._lessons.has_given_up

    def shortage(self, num_refused: int) -> str | None:
        """What did not fit into memory, and what would hold it, in one line; None if the limit is not why.

        Where nobody chose the limit, and the store holds less than a tenth of what had no room, and has none
        now, the cache is given up: as the system's cache of the encoded files, its memory serves training
        better.

        Args:
            num_refused: The results of decoding that had no room in an epoch.
        """
        store = self.store
        if isinstance(store, LmdbStore):
            return None
        num_files, nbytes = store.num_files, store.nbytes
        what = f"{num_refused:,} decoded files had no room beside {num_files:,} in {readable_size(nbytes)}"
        is_useless = num_files < _MIN_SHARE * num_refused and not store.has_room(nbytes // max(1, num_files))
        if store.is_auto and is_useless:
            self._lessons.give_up()
            store.retire_own()
            return f"{what}, too few to be of use: nothing is remembered any more"
        if not store.is_short:
            return None
        if not num_files:
            return f"{what}, and are decoded on each access: raise the limit"
        needed_bytes = nbytes + num_refused * nbytes // num_files
        free_bytes = available_bytes() - reserve_bytes(nbytes) + nbytes
        # Tables are not filled to the end.
        limit_gb = max(needed_bytes * 17 // 16, store.max_bytes) // 10**9 + 1
        advice = f'cache="ram:{limit_gb}G" would hold all'
        if needed_bytes > free_bytes:
            advice = f'of which {readable_size(free_bytes)} are free. cache="lmdb:PATH" keeps them on disk'
        return (
            f"{what}, and are decoded on each access. Together they take about "
            f"{readable_size(needed_bytes)}: {advice}"
        )

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Remember the files that this thread decodes meanwhile."""
        patches.meet()
        active: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.is_given_up:
            self.poll()  # a worker lets go of the memory, too
        else:
            active = self._decode_cache.active()
        with ends.met() or contextlib.nullcontext(), active:
            yield

    def explain(self) -> str:
        """What happens, and what is remembered, in one line."""
        store, nbytes = self.store, self.store.nbytes
        if self.is_given_up:
            return "nothing is remembered any more, because less than a tenth of the files fits into memory"
        if isinstance(store, LmdbStore):
            num_files, limit = count_files(store)[0], f"at {store.path}"
        else:
            num_files, limit = store.num_files, f"at most {readable_size(store.max_bytes)}; {store.reason}"
            if nbytes > store.max_bytes:
                own = readable_size(store.max_bytes)
                limit = f"stored by jobs with a larger limit than the {own} of this one"
        return (
            "the dataset's code runs on every access, and the pixels of files that it decodes are "
            f"remembered: now {num_files:,} decoded files "
            f"({readable_size(nbytes)}, {limit})"
        )

    def close(self) -> None:
        """Let the classes of the libraries be as they were, if no other cache of this process needs them."""
        patches.release(self)
        self._use = Use()


_stores: dict[str | float, SharedStore | LmdbStore] = {}  # by limit, or by place on disk
_stores_lock = threading.Lock()


def _poll_all() -> None:
    """Poll where torch's loaders start workers, and read nothing in this process."""
    for store in list(_stores.values()):
        if isinstance(store, SharedStore) and store.is_owner:
            store.poll()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(
        before=_poll_all, after_in_child=lambda: globals().update(_stores_lock=threading.Lock())
    )


def store_of_process(place: str | float) -> SharedStore | LmdbStore:
    """The store with a limit, or on disk, as `check_cache` names it.

    This process holds it to its end: a cell that runs again finds its files.
    """
    with _stores_lock:
        if place not in _stores:
            if isinstance(place, str) and place.startswith(DISK):
                path = place.removeprefix(DISK)
                try:
                    _stores[place] = open_files(path)
                except RefusedError as error:
                    meta = {"kind": KIND, "finished": False}
                    _stores[place] = LmdbStore(path, -1, meta, error.reason)
            else:
                _stores[place] = open_store(place)
        return _stores[place]


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
