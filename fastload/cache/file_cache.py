"""FileCache: a loader's `cache=`; the files that any dataset decodes are remembered while it is read.

The dataset's code runs in full on every access; see `fastload.readers`. Rules:

1. It is active in the thread that reads a sample, and only while it reads. In worker processes the libraries
   stay met for good, elsewhere during a fetch.
2. It pickles as a handle of the store, so all workers read and fill one store.
3. Where the store will hold less than a quarter of what a loader reads, the loader stops storing before the
   memory is used up in which the system keeps the encoded files: they take a fraction of their pixels.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from fastload.cache.disk.disk_store import DiskFileStore
from fastload.cache.ram.file_store import SharedFileStore, open_store
from fastload.readers import patches
from fastload.readers.decode_cache import DecodeCache
from fastload.readers.front import NUM_EQUAL
from fastload.readers.request import DISK, check_cache
from fastload.system.budget import unused_bytes
from fastload.system.humanize import readable_size
from fastload.system.logs import log

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from fastload.readers.decode_cache import Stored

_SMALL_SHARE = 0.25  # of what a loader reads; a store that holds less cannot make it much faster
_ENCODED_SHARE = 0.125  # of the pixels' memory that encoded files take, about
_VAIN_SHARE = 0.05
_JUDGED_SHARE = 1 / 64  # of the limit; so much is stored before the rest is guessed
_JUDGE_EVERY_S = 0.25


class _UntilStopped:
    """The store of a loader, until the loader is to store nothing more.

    Args:
        store: Where the files are.
        loader: The number of the loader.
    """

    def __init__(self, store: SharedFileStore, loader: int) -> None:
        self._store, self._loader = store, loader

    def get(self, key: bytes) -> Stored | None:
        """What is stored under a key, if anything."""
        return self._store.get(key)

    def put(self, key: bytes, array: npt.NDArray[Any], note: Any) -> bool:
        """Store an array and a note of plain values; False if it does not."""
        return not self._is_stopped and self._store.put(key, array, note)

    def has_room(self, nbytes: int) -> bool:
        """Whether it is worth preparing an array of this size."""
        return not self._is_stopped and self._store.has_room(nbytes)

    @property
    def _is_stopped(self) -> bool:
        return self._store.is_stopped(self._loader)


class Forecast:
    """How much of what a loader reads the store will hold, from the growth of the store in the first epoch.

    Args:
        store: Where the files are.
        num_batches: Of an epoch; 0 if it is not known, so that nothing is judged.
        num_ahead: The batches that workers read beside those that the caller has received, at most.
        num_learning: The first batches, of which more is stored than of later ones (see `readers.front`).

    Attributes:
        is_stopped: Whether the loader is to store nothing more.
        is_vain: Whether what it has stored is so little that the system makes more of the memory.
        has_told: Whether a line has said how much is held.
    """

    def __init__(
        self, store: SharedFileStore, num_batches: int, num_ahead: int, num_learning: int = 0
    ) -> None:
        self.is_stopped = self.is_vain = self.has_told = False
        self._store = store
        self._num_batches, self._num_ahead, self._num_learning = num_batches, num_ahead, num_learning
        self._first: tuple[int, int] | None = None  # batches received and bytes stored at the first look
        self._num_received = 0
        self._all_bytes = 0.0  # what all files of an epoch take

    def look(self, num_received: int) -> None:
        """Judge what is stored by now.

        Args:
            num_received: The batches of this epoch that the caller has received.
        """
        stored_bytes, max_bytes = self._store.nbytes, self._store.max_bytes
        has_ended = num_received < self._num_received
        self._num_received = num_received
        if has_ended or self._num_batches <= 0:
            self._num_batches = 0  # the second epoch reads what is stored
            return
        if num_received < self._num_learning:
            return
        if self._first is None:
            self._first = num_received, stored_bytes
        stored_bytes -= self._first[1]
        # Too many rather than too few: some of them are not stored yet.
        num_begun = num_received - self._first[0] + self._num_ahead
        self._all_bytes = max(self._all_bytes, stored_bytes / max(1, num_begun) * self._num_batches)
        is_small = stored_bytes >= max_bytes * _JUDGED_SHARE and max_bytes < self._all_bytes * _SMALL_SHARE
        if not is_small and not self.is_stopped:
            return
        spare_bytes = max(0.0, unused_bytes() - self._all_bytes * _ENCODED_SHARE)
        if not spare_bytes and not self.is_stopped:
            self.is_stopped = True
            self.is_vain = stored_bytes < self._all_bytes * _VAIN_SHARE
        if not self.has_told and num_begun > 4 * self._num_ahead:  # the guess is good enough to be told
            self.has_told = True
            held_bytes = min(max_bytes, stored_bytes + (0 if self.is_stopped else spare_bytes))
            share = 0.0 if self.is_vain else held_bytes / self._all_bytes
            log.warning(
                "cache: the decoded files of an epoch take about %s, of which %.0f%% are remembered: expect "
                "at most %.2f times the speed. The rest of the memory is left to the system, which keeps the "
                "encoded files in it",
                readable_size(int(self._all_bytes)),
                100 * share,
                1 / (1 - share),
            )


class FileCache:
    """The files of datasets, remembered in the store of this user and machine.

    Args:
        store: Where they are.
        loader: The number of the loader; a new one if None.

    Attributes:
        store: As given.
        forecast: How much of what the loader reads will be held, where its length is known.
    """

    def __init__(self, store: SharedFileStore | DiskFileStore, loader: int | None = None) -> None:
        self.store = store
        self.forecast: Forecast | None = None
        self._loader = secrets.randbits(63) | 1 if loader is None else loader
        self._look_at_s, self._has_let_go = 0.0, False
        self._decode_cache = DecodeCache(
            _UntilStopped(store, self._loader) if isinstance(store, SharedFileStore) else store
        )
        _open_caches.add(self)
        weakref.finalize(self, _forget_uses).atexit = False
        patches.retain(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return FileCache, (self.store, self._loader)

    def expect(self, num_batches: int, batch_size: int | None, num_workers: int, num_ahead: int) -> None:
        """Say in time if the store will hold a small part of an epoch; see `Forecast`.

        Args:
            num_batches: Of an epoch; 0 if it is not known.
            batch_size: Of the loader; None if batches have no fixed size.
            num_workers: Each of them learns by itself what is of use to be stored.
            num_ahead: The batches that workers read beside those that the caller has received, at most.
        """
        num_learning = -(-NUM_EQUAL * max(1, num_workers) // (batch_size or 1))
        if isinstance(self.store, SharedFileStore):
            self.forecast = Forecast(self.store, num_batches, num_ahead, num_learning)

    def poll(self, num_received: int = 0) -> None:
        """Let the store replace what it let go of; the process that owns a loader calls it once a batch.

        Args:
            num_received: The batches of this epoch that the caller has received.
        """
        store, forecast = self.store, self.forecast
        store.poll()
        if forecast is not None and (now_s := time.monotonic()) >= self._look_at_s:
            self._look_at_s = now_s + _JUDGE_EVERY_S
            forecast.look(num_received)
            if forecast.is_stopped and isinstance(store, SharedFileStore):
                if forecast.is_vain and not self._has_let_go:
                    self._has_let_go = True
                    store.retire_own()
                store.stop(self._loader)  # also in the tables that are new

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
        store, nbytes = self.store, self.store.nbytes
        if isinstance(store, DiskFileStore):
            limit = f"at {store.path}"
        elif nbytes > store.max_bytes:
            limit = (
                f"stored by jobs with a larger limit than the {readable_size(store.max_bytes)} of this one"
            )
        else:
            limit = f"at most {readable_size(store.max_bytes)}"
        return (
            "the dataset's code runs on every access, and the pixels of files that it decodes are "
            f"remembered: now {store.num_files:,} results of decoding files "
            f"({readable_size(nbytes)}, {limit})"
        )

    def close(self) -> None:
        """Let the classes of the libraries be as they were, if no other cache of this process needs them."""
        patches.release(self)
        _open_caches.discard(self)
        _forget_uses()


_open_caches: weakref.WeakSet[FileCache] = weakref.WeakSet()


def _forget_uses() -> None:
    """If no cache of this process is open, let what it has used make room for others."""
    if not list(_open_caches):
        for store in list(_stores.values()):  # without the lock: the garbage collector can call this anywhere
            store.forget()


_stores: dict[str | float, SharedFileStore | DiskFileStore] = {}  # by limit, or by place on disk
_stores_lock = threading.Lock()


def _poll_all() -> None:
    """Poll where torch's loaders start workers, and read nothing in this process."""
    for store in list(_stores.values()):
        if store.is_owner:
            store.poll()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(
        before=_poll_all, after_in_child=lambda: globals().update(_stores_lock=threading.Lock())
    )


def store_of_process(place: str | float) -> SharedFileStore | DiskFileStore:
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
