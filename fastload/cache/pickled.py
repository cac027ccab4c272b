"""A CachedDataset in plain values, for pickles that outlive this process.

Such a pickle names `fastload.cache.load_dataset` and nothing else of the datasets and caches here, so another
release can load it, wherever its classes are then. The values hold no samples: they say where a cache in RAM
is while this process lives, how an empty one is made, and where a file is.
"""

from __future__ import annotations

from typing import Any

from fastload.cache.file_cache import RememberedFiles
from fastload.cache.lmdb.lmdb_cache import LMDBCache
from fastload.cache.lmdb.lmdb_dataset import LMDBDataset
from fastload.cache.ram.private import PrivateCache
from fastload.cache.ram.shared import SharedMemoryCache
from fastload.cache.tiered_cache import TieredCache

VERSION = 1
_KINDS: dict[str, Any] = {
    "ram": SharedMemoryCache,
    "private": PrivateCache,
    "lmdb": LMDBCache,
    "file": LMDBDataset,
    "files": RememberedFiles,
}


def plain_values(cache: Any) -> dict[str, Any]:
    """A cache, or the dataset of a finished one, as plain values; a cache of the user's class as it is."""
    if type(cache) is TieredCache:
        tiers = [plain_values(tier) for tier in cache.tiers]
        backing = None if cache.backing is None else plain_values(cache.backing)
        return {"kind": "tiers", "num_samples": cache.num_samples, "tiers": tiers, "backing": backing}
    kind = next((kind for kind, cls in _KINDS.items() if type(cache) is cls), None)
    return {"kind": "object", "cache": cache} if kind is None else {"kind": kind, **cache.plain_values()}


def cache_of(values: dict[str, Any]) -> Any:
    """What `plain_values` described: the cache, or an empty one like it if this process cannot reach it."""
    values = dict(values)
    kind = values.pop("kind")
    if kind == "tiers":
        backing = None if values["backing"] is None else cache_of(values["backing"])
        return TieredCache(values["num_samples"], [*map(cache_of, values["tiers"])], backing)
    return values["cache"] if kind == "object" else _KINDS[kind].of_plain_values(values)
