"""Files that changed a moment ago have an identity here, and caches compare all their hits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fastload.readers import identity, patches
from fastload.readers.decode_cache import DecodeCache
from fastload.system.cache_counts import cache_counts
from tests.kit.decoding import DictStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

for library in ("cv2", "tifffile"):
    pytest.importorskip(library)
patches.meet()  # before tests hold their functions, which would then be left alone


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files need not have been unchanged for a while."""
    monkeypatch.setattr(identity, "SETTLED_S", 0)
    monkeypatch.setattr(identity, "SETTLED_REMOTE_S", 0)
    identity._file_systems.clear()
    yield
    identity._file_systems.clear()


@pytest.fixture
def store() -> DictStore:
    """An empty store."""
    return DictStore()


@pytest.fixture
def cache(store: DictStore, settled: None) -> Iterator[DecodeCache]:
    """A cache over the store, active in this thread; each of its hits is decoded again and compared."""
    cache = DecodeCache(store, verify_share=1)
    patches.meet()
    with cache.active():
        yield cache


@pytest.fixture
def active(settled: None) -> Iterator[DictStore]:
    """A store that this thread uses, whose hits are not decoded again."""
    patches.meet()
    with DecodeCache(store := DictStore(), verify_share=0.0).active():
        yield store


@pytest.fixture
def counts() -> Callable[[], tuple[int, int]]:
    """Call it for the hits and misses of this thread since the last call."""
    before = [cache_counts.hits, cache_counts.misses]

    def since() -> tuple[int, int]:
        change = cache_counts.hits - before[0], cache_counts.misses - before[1]
        before[:] = cache_counts.hits, cache_counts.misses
        return change

    return since
