"""FileCache: what it lets others have."""

from __future__ import annotations

import gc
import os

import pytest

from fastload.cache import file_cache
from fastload.cache.file_cache import FileCache
from fastload.cache.ram.store import SharedStore
from tests.cache.test_ram_store import MB, put

pytestmark = pytest.mark.usefixtures("registry_folder", "small_tables")


@pytest.mark.parametrize("ending", ["close", "drop"])
def test_the_last_cache_of_a_process_lets_others_have_its_tables(ending: str) -> None:
    """Not the first of two, and not a fork's copies."""
    store = file_cache.store_of_process(MB)
    assert isinstance(store, SharedStore)
    caches = [FileCache(store), FileCache(store)]
    caches[0].poll()
    put(store, range(20))
    caches.pop().close()
    gc.collect()
    pid = os.fork()
    if pid == 0:
        caches.clear()
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)
    assert len(store._uses) == 1
    if ending == "close":
        caches[0].close()
    caches.clear()
    gc.collect()
    assert not list(store._uses)
